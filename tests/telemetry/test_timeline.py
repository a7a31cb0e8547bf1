"""What a timeline says of times."""

from __future__ import annotations

import time

import pytest

from ooc.telemetry.timeline import ClockPair


@pytest.mark.parametrize("when", ["before the wall clock is read", "after it was read", "never"])
def test_a_pause_between_the_clocks_is_not_taken_for_a_difference(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is taken away for 20 ms within most readings: the pair is right to a microsecond all the same."""
    apart_ns = 1_795_357_879_829_418_601
    now_ns, num_read = 5_000_000_000, 0

    def monotonic_ns() -> int:
        nonlocal now_ns
        now_ns += 100
        return now_ns

    def time_ns() -> int:
        nonlocal now_ns, num_read
        num_read += 1
        pause_ns = 20_000_000 if when != "never" and num_read % 5 != 0 else 0
        now_ns += 100 + (pause_ns if when == "before the wall clock is read" else 0)
        read_ns = now_ns
        now_ns += pause_ns if when == "after it was read" else 0
        return read_ns + apart_ns

    monkeypatch.setattr(time, "monotonic_ns", monotonic_ns)
    monkeypatch.setattr(time, "time_ns", time_ns)
    pair = ClockPair.now()
    assert abs(pair.unix_ns - pair.monotonic_ns - apart_ns) <= 1000
