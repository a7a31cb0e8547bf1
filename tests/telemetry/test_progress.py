"""What a session says of itself while it trains: lines, statistics, metrics, explanations."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ooc
from ooc.telemetry.progress import Position, Progress, ProgressBar, bar_line, rank, step_line
from ooc.telemetry.steps import StepRow
from tests import forked
from tests.cli.test_run import environment
from tests.html_report.cases import MIB, net, train

TRAIN = str(Path(__file__).parents[1] / "scripts" / "train.py")
LINE = re.compile(
    r"ooc: step \d+ (learning|planned|off plan) [\d.]+ (us|ms|s), stall [\d.]+%, moved [\d.]+ \w+, "
    r"resident [\d.]+ \w+, remapped chunks \d+(; .+)?"
)
ROW = StepRow(
    mode="off_plan",
    duration_s=2.0,
    stall_s=0.5,
    loaded_nbytes=MIB,
    evicted_nbytes=2 * MIB,
    dropped_nbytes=0,
    num_remapped_chunks=7,
    num_faults=0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def nowhere() -> Position:
    return Position(mode="learning", num_done=0, num_ops=None)


# -- lines


def test_a_step_is_one_line_with_units() -> None:
    line = step_line(12, ROW, 3 * MIB)
    assert line == "ooc: step 12 off plan 2.00 s, stall 25.0%, moved 3.0 MiB, resident 3.0 MiB, remapped chunks 7"
    assert LINE.fullmatch(line)


def test_a_bar_needs_a_length() -> None:
    assert bar_line(Position(mode="learning", num_done=12, num_ops=None)) == "ooc: learning, 12 ops"
    half = bar_line(Position(mode="planned", num_done=50, num_ops=100))
    assert half == f"ooc: planned [{'#' * 12}{'.' * 12}] 50 of 100 ops"
    assert "[" + "#" * 24 + "]" in bar_line(Position(mode="learning", num_done=140, num_ops=100))


@pytest.mark.parametrize(
    ("when", "is_terminal", "speaks"),
    [("never", True, False), ("auto", True, True), ("auto", False, False), ("always", False, True)],
)
def test_it_is_quiet_off_a_terminal(when: str, is_terminal: bool, speaks: bool) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    progress = Progress(when, stream)  # type: ignore[arg-type]
    progress.note_step(1, ROW, 0)
    progress.close()
    assert bool(stream.getvalue()) == speaks


def test_only_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    progress = Progress("always", stream)
    monkeypatch.setenv("RANK", "3")
    assert rank() == 3
    progress.note_step(1, ROW, 0)
    with progress.planning(100):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setenv("RANK", "0")
    progress.note_step(1, ROW, 0)
    assert LINE.match(stream.getvalue())
    progress.close()


def test_a_long_step_shows_a_bar_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.telemetry.progress._TICK_S", 0.01)
    monkeypatch.setattr("ooc.telemetry.progress._PATIENCE_S", 0.0)
    stream = Terminal()
    progress = Progress("auto", stream)
    bar = ProgressBar(progress, lambda: Position(mode="planned", num_done=5, num_ops=10))
    _until(lambda: "5 of 10 ops" in stream.getvalue())
    bar.close()
    assert stream.getvalue().endswith("\r")
    assert "ooc-progress" not in [thread.name for thread in threading.enumerate()]
    _screen(stream.getvalue(), "")


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen in 300 s")


def _screen(written: str, expected: str) -> None:
    """What a terminal's last line shows after `written`."""
    line: list[str] = []
    column = 0
    for character in written.rsplit("\n", 1)[-1]:
        if character == "\r":
            column = 0
            continue
        line[column : column + 1] = [character]
        column += 1
    assert "".join(line).strip() == expected


def test_a_session_writes_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with ooc.Session("6MiB", plan_cache=False, progress="always") as session:
        train(session, 5)
    lines = capsys.readouterr().err.splitlines()
    steps = [line for line in lines if LINE.fullmatch(line)]
    assert [int(line.split()[2]) for line in steps] == [1, 2, 3, 4, 5]
    assert any(re.fullmatch(r"ooc: planned \d+ ops in .*", line) for line in lines)
    assert " planned " in steps[-1]


def test_a_wrong_setting_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(ValueError, match=r"progress='loud'. Options: never, auto, always"):
        ooc.Session("6MiB", progress="loud")
    with ooc.Session("6MiB"):
        pass


@pytest.mark.parametrize("always", [False, True])
def test_run_with_progress(always: bool) -> None:
    """Off a terminal the option says nothing; the variable makes it speak. Standard output stays the script's."""
    command = [sys.executable, "-m", "ooc", "run", "--budget", "6MiB", *([] if always else ["--progress"]), TRAIN]
    variables = {**environment(), **({"OOC_PROGRESS": "always"} if always else {})}
    done = forked.run(command, env=variables, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "ooc:" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if LINE.fullmatch(line)]
    assert bool(lines) == always


# -- statistics


def test_memory_stats_without_a_session_are_empty() -> None:
    assert ooc.memory_stats() == {}


def test_memory_stats_add_up_and_disturb_nothing() -> None:
    with ooc.Session("6MiB", plan_cache=False) as session:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(7):
            with session.step():
                loss = model(torch.randn(256, 256)).square().mean()
                loss.backward()
                inside = ooc.memory_stats()
                optimizer.step()
                optimizer.zero_grad()
                del loss
        assert session.steps.rows[-1].mode == "planned"  # although it was looked at in mid-step
        stats = session.memory_stats()
        report = session.report()
    assert stats["allocated_bytes.all.current"] == 16 * 256 * 1024  # 8 weights and 8 momentum buffers
    assert inside["allocated_bytes.all.current"] > stats["allocated_bytes.all.current"]
    for one in (inside, stats):
        assert one["resident_bytes.all.current"] <= one["reserved_bytes.all.current"] == 6 * MIB
        assert (
            one["resident_bytes.all.current"] - one["inactive_bytes.all.current"] + one["away_bytes.all.current"]
            == one["allocated_bytes.all.current"]
        )
    assert stats["resident_bytes.all.peak"] == report["peak_nbytes"]
    assert stats["allocated_bytes.all.peak"] == report["in_core_peak_nbytes"]
    assert stats["num_steps.learning"] + stats["num_steps.planned"] + stats["num_steps.off_plan"] == 7
    for name in ("loaded", "evicted", "dropped"):
        assert stats[f"{name}_bytes.all.total"] >= sum(step[f"{name}_nbytes"] for step in report["steps"])
    assert all(type(value) is int for value in stats.values())


def test_metrics_are_the_last_steps_scalars() -> None:
    with ooc.Session("6MiB", plan_cache=False) as session:
        assert session.metrics() == {}
        train(session, 6)
        metrics, row = session.metrics(), session.steps.rows[-1]
    assert metrics["ooc/step_duration_s"] == row.duration_s
    assert metrics["ooc/step_is_planned"] == 1.0
    assert metrics["ooc/step_evicted_bytes"] == row.evicted_nbytes > 0
    assert metrics["ooc/step_stall_fraction"] == pytest.approx(row.stall_s / row.duration_s)
    assert all(key.startswith("ooc/") for key in metrics)


# -- explanations


def test_explain_by_tensor_and_by_name() -> None:
    with ooc.Session("3MiB", plan_cache=False) as session:
        model, optimizer = train(session, 6)
        by_name = [session.explain(f"{2 * k}.weight") for k in range(8)]
        by_tensor = session.explain(model[0].weight)  # type: ignore[index]
        momenta = [session.explain(f"momentum_buffer of {2 * k}.weight") for k in range(8)]
        assert by_tensor == by_name[0]
        plan = session.plan()
        with session.step():
            pass
    del optimizer
    assert plan is not None
    every = [*by_name, *momenta]
    assert all(e.is_managed and e.nbytes == 256 * 1024 and e.stays and e.state for e in every)
    moved = [e for e in every if any("written out" in stay or "dropped" in stay for stay in e.stays)]
    assert moved  # it does not fit: something is away for a while
    assert all(
        any("the budget is 3.0 MiB" in reason for reason in e.reasons) for e in moved if "loaded" in str(e.stays)
    )
    text = str(moved[0])
    assert text.startswith(f"{moved[0].name}: 256.0 KiB, ")
    assert re.search(r"op \d+ \(aten\.\w+", text)


def test_explain_says_what_it_cannot() -> None:
    exports = torch.zeros(1 << 20)
    with ooc.Session("6MiB", plan_cache=False) as session:
        model = net()
        assert "no plan is being played" in str(session.explain(model[0].weight))
        small = session.explain(model[0].bias)
        assert not small.is_managed
        assert "below 64.0 KiB" in str(small)
        assert not session.explain(exports).is_managed
        with pytest.raises(ValueError, match=r"no tensor is called '0.wieght'.*Options: 0\.weight"):
            session.explain("0.wieght")
        with pytest.raises(TypeError, match=r"explain\(3\): a int\. Options: a tensor"):
            session.explain(3)  # type: ignore[arg-type]
    with pytest.raises(ooc.SessionError):
        session.explain(exports)
