"""A store that is as fast as it is told to be: no plan of a test depends on the disk, or on what ran before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ooc.telemetry import steps
from vmm.store import FileStore, StoreSpeed

USUAL = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=6e8, read_together_bytes_per_s=6e8
)
SLOW = StoreSpeed(
    write_bytes_per_s=1e6, read_bytes_per_s=1e6, write_together_bytes_per_s=5e5, read_together_bytes_per_s=5e5
)
"""In the planner's eyes: everything that can be is recomputed."""


@contextmanager
def store_speed(speed: StoreSpeed) -> Iterator[None]:
    """Sessions in this process plan for this speed, and neither measure nor remember another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "measure", lambda self, buffer=None: speed)
        patch.setattr(steps, "_measured", {})
        yield
