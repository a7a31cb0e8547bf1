"""How fast a store is taken to be: over a disk in virtual time, so that no test depends on a real one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vmm.store_speed import _Probe

MIB = 1 << 20


class BurstyEngine:
    """A disk of 100 MB/s each way that lets bytes through ten times a second, as a blkio control group's limit does."""

    burst_nbytes, turn_ns = 10_000_000, 100_000_000

    def __init__(self) -> None:
        self.now_ns = 0
        self.ends_ns: dict[str, list[int]] = {"read": [], "write": []}
        self.turns: dict[str, tuple[int, int]] = {"read": (0, 0), "write": (0, 0)}  # the present one, its bytes

    def submit(self, way: str) -> tuple[str, int]:
        turn, nbytes = max(self.turns[way], (self.now_ns // self.turn_ns, 0))
        if nbytes + MIB > self.burst_nbytes:
            turn, nbytes = turn + 1, 0
        self.turns[way] = turn, nbytes + MIB
        self.ends_ns[way].append(max(turn * self.turn_ns, self.now_ns))
        return way, len(self.ends_ns[way]) - 1

    def submit_read(self, *_: Any, **__: Any) -> Any:
        return self.submit("read")

    def submit_write(self, *_: Any, **__: Any) -> Any:
        return self.submit("write")

    def wait(self, ticket: Any) -> None:
        way, index = ticket
        self.now_ns = max(self.now_ns + 1000, self.ends_ns[way][index])

    def statistics(self, way: str) -> SimpleNamespace:
        return SimpleNamespace(nbytes=sum(end_ns <= self.now_ns for end_ns in self.ends_ns[way]) * MIB)


def test_a_slow_disk_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time that will do for a fast disk, one burst of a slow one would be all there is."""
    engine: Any = BurstyEngine()
    monkeypatch.setattr(time, "monotonic_ns", lambda: engine.now_ns)
    probe = _Probe(engine, 0, 0, [None], drop_cache=False)  # type: ignore[list-item]
    for ways in (("write",), ("read",), ("write", "read")):
        assert all(0.7e8 < rate < 1.3e8 for rate in probe.run(ways))
