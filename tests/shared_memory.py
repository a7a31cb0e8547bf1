"""What a test's processes leave in /dev/shm, where other programs of the machine have files, too."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Set as AbstractSet
from pathlib import Path

_DIRECTORY = "/dev/shm"
_ATTEMPTS = 20


def shared_memory() -> set[str]:
    """The names that are there now; none where there is no such folder."""
    return set(os.listdir(_DIRECTORY)) if os.path.isdir(_DIRECTORY) else set()


def shared_memory_beyond(before: AbstractSet[str]) -> list[str]:
    """Names that are there and were not, but for those of living processes (torch_NUMBER_...) and of a moment."""
    for _ in range(_ATTEMPTS):
        found = sorted(name for name in shared_memory() - before if not _is_of_a_living_process(name))
        if not found:
            break
        time.sleep(0.1)
    return found


def _is_of_a_living_process(name: str) -> bool:
    found = re.match(r"torch_(\d+)_", name)
    return found is not None and Path("/proc", found[1]).exists()
