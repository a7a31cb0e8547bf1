"""The package's worked example runs as it stands, and leaves nothing behind."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

import vmm
from tests.vmm.memory_cases import num_open_files, num_threads


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_STORE", str(tmp_path))
    monkeypatch.setattr("vmm.files.is_in_memory", lambda _: False)  # pytest's directory may be on tmpfs
    text = (Path(vmm.__file__).parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    gc.collect()  # what earlier tests have left
    files, threads = num_open_files(), num_threads()
    exec(example, {})
    assert (num_open_files(), num_threads()) == (files, threads)
