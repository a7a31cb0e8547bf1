"""Pages of 16 and 64 KiB, as kernels of boards and servers have them: given from outside, on any machine."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
KIB = 1 << 10


@pytest.mark.parametrize("page_nbytes", [pytest.param(4 * KIB, marks=pytest.mark.slow), 16 * KIB, 64 * KIB])
def test_a_session_works_in_whole_pages(page_nbytes: int) -> None:
    """Losses and weights to the last bit; mappings, transfers, guards and reserved space in whole pages."""
    if page_nbytes % mmap.PAGESIZE:
        pytest.skip(f"this machine's pages have {mmap.PAGESIZE} bytes")
    command = [sys.executable, "-m", "tests.scripts.other_page", str(page_nbytes)]
    done = forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert all(seen.values()), seen
