"""Ops on a device whose ops run on streams (native/stream_watch.h): Python is called only where the stream is another
than at the op before, or the end of the chain has moved; and how long ops on demand take there (native/op_times.h).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dispatch.device_without import GUARD, LOAD

ROOT = Path(__file__).parents[2]

SCRIPT = f"""
{LOAD}
num_moves = ctypes.c_uint64()
called, raised = [], []

def follow():
    called.append(session.engine.runner.dispatcher.cursor)
    if raised:
        raise raised.pop()

def step(*streams, between=lambda: None):
    # Six planned ops on variables, the third one on another stream where a second stream is given.
    with session.step():
        x = torch.ones(1 << 16)
        y = x + 1
        guard.set_stream(streams[-1])
        between()
        z = y * weight
        guard.set_stream(streams[0])
        found = float((z - x).sum())
    return found, session.steps.rows[-1].mode

with ooc.Session("4MiB", threshold_nbytes="64KiB", plan_cache=False, background_planning=False,
                 step_boundary="explicit") as session:
    weight = torch.full((1 << 16,), 3.0)
    expected = 5.0 * (1 << 16)
    dispatcher = session.engine.runner.dispatcher
    for wrong in ("no-device", "xla"):
        try:
            dispatcher.follow_stream(wrong, 0, follow)
        except ValueError as error:
            print(error)
        else:
            raise AssertionError(wrong)
    dispatcher.follow_stream("privateuseone:0", ctypes.addressof(num_moves), follow)
    for _ in range(5):
        assert step(0)[0] == expected
    assert session.steps.rows[-1].mode == "planned" and dispatcher.num_boxed > 0
    assert called == called[:1], called  # once, at the first planned op of all
    called.clear()
    assert step(0) == (expected, "planned") and called == []
    assert step(0, 7) == (expected, "planned") and len(called) == 2, called  # there and back
    called.clear()
    def move(): num_moves.value += 1
    assert step(0, between=move) == (expected, "planned") and len(called) == 1, called
    called.clear()
    raised.append(OSError("the chain is broken"))
    try:
        step(0, 7)
    except OSError as error:
        assert str(error) == "the chain is broken"
    else:
        raise AssertionError("nothing was raised")
    guard.set_stream(0)
    for _ in range(3):
        assert step(0)[0] == expected
    assert session.steps.rows[-1].mode == "planned"
    guard.set_fails(1)
    try:
        step(0)
    except RuntimeError as error:
        assert "no stream" in str(error)
    else:
        raise AssertionError("nothing was raised")
    guard.set_fails(0)
    for _ in range(3):
        assert step(0)[0] == expected
    assert session.steps.rows[-1].mode == "planned"
"""


@pytest.mark.parametrize("with_boxed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_python_is_called_where_the_stream_is_another(with_boxed: bool, tmp_path: Path) -> None:
    run(SCRIPT, tmp_path, with_boxed=with_boxed)


TIMES = f"""
{LOAD}
num_moves = ctypes.c_uint64()
followed = []
SLOW_MS = 60_000.0  # of the device, which nobody waits for: no op takes the host as long

def durations_ms(num_ops, num_steps=2, waits=False):
    # Of the products in the last of these steps, none of which has a plan yet. Each allocates, and one ends the operand
    # of the one before. `waits`: an allocation moves something, for which the device waits.
    with ooc.Session("8MiB", threshold_nbytes="64KiB", plan_cache=False, step_boundary="explicit") as session:
        weight = torch.full((1 << 16,), 1.0)
        runner = session.engine.runner
        dispatcher, served = runner.dispatcher, runner._served
        dispatcher.follow_stream("privateuseone:0", ctypes.addressof(num_moves), lambda: followed.append(1))

        def in_time(address, nbytes):
            dispatcher.begin_op_again()
            return served(address, nbytes)

        runner._served = in_time if waits else served
        for _ in range(num_steps):
            with session.step():
                x = torch.ones(1 << 16)
                for _ in range(num_ops):
                    x = x * weight
                found = [op.duration_ns / 1e6 for op in runner.recording.recorder.ops if "mul" in str(op.func)]
    assert len(found) == num_ops and followed, found
    return found[1:]  # the first is Python's, which tries it

guard.set_step_ms(ctypes.c_double(SLOW_MS))
found = durations_ms(20)
assert min(found) >= SLOW_MS, found
reused = guard.count_events()
found = durations_ms(20)
assert min(found) >= SLOW_MS, found
assert guard.count_events() == reused, "events are not used again"
found = durations_ms(20, num_steps=1, waits=True)
assert SLOW_MS <= min(found) and max(found) < 2 * SLOW_MS, found
guard.set_records(0)  # the device refuses: the host's times stand
found = durations_ms(20)
assert max(found) < SLOW_MS, found
guard.set_records(1)
found = durations_ms(5000)  # more than wait to be asked for
assert min(found) >= SLOW_MS and guard.count_events() < 9000, guard.count_events()
"""


@pytest.mark.parametrize("with_boxed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_op_on_demand_lasts_as_long_as_the_device_says(with_boxed: bool, tmp_path: Path) -> None:
    run(TIMES, tmp_path, with_boxed=with_boxed)


def run(script: str, tmp_path: Path, *, with_boxed: bool) -> None:
    source = tmp_path / "guard.cpp"
    source.write_text(GUARD)
    if not with_boxed:
        hide = "import ooc.dispatch.mode as mode\nmode.boxed_ops = lambda: None\n"
        script = script.replace("num_moves = c", f"{hide}num_moves = c").replace(" and dispatcher.num_boxed > 0", "")
    done = subprocess.run(
        [sys.executable, "-c", script, str(source)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
