"""The demo's parts: curves, memory as the kernel counts it, trials in child processes, the whole."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ooc import models
from ooc.cli import demo
from ooc.cli.demo import DemoModel
from ooc.cli.memory_group import MeasuredProcess, MemoryGroup, MemoryGroupUnavailable, PssWatch
from ooc.cli.trial import TrialFailed, TrialOptions, TrialResult, follow_trial, run_trial, train
from ooc.reporting.memory_curves import Curve, step_curves
from ooc.reporting.report import REPORT_SCHEMA_VERSION
from ooc.reporting.step_view import Measured, measured_view, traced_view
from ooc.units import MIB, format_duration
from scheduler.plan import Born, Dies, Evicted, Loaded, Machine, Plan, Residency
from scheduler.trace import Op, Trace, Use, Variable

SMALL_GPT = {"depth": 1, "width": 64, "context": 64, "batch_size": 4}


def _trace() -> Trace:
    """Three ops of 1, 2 and 1 ms; variable 0 (30 bytes) lives from op 0 to the end of op 2."""
    use = Use(variable=0, reads=True, writes=False)
    return Trace(
        ops=(
            Op(
                name="make",
                start_tick=0,
                stop_tick=2,
                duration_ns=1_000_000,
                uses=(Use(variable=0, reads=False, writes=True),),
            ),
            Op(name="other", start_tick=2, stop_tick=5, duration_ns=2_000_000, uses=()),
            Op(name="use", start_tick=5, stop_tick=6, duration_ns=1_000_000, uses=(use,)),
        ),
        variables=(
            Variable(nbytes=30, birth_tick=1, death_tick=6),
            Variable(nbytes=10, birth_tick=3, death_tick=4),
        ),
        num_ticks=7,
        cyclic=False,
    )


def test_live_curve_places_ticks_in_time() -> None:
    curve = traced_view(_trace()).live_curve()
    assert [nbytes for _, nbytes in curve] == [0, 30, 40, 30, 0]
    times = [ns for ns, _ in curve]
    assert times == [0, 500_000, 1_000_000 + 2_000_000 // 3, 1_000_000 + 4_000_000 // 3, 4_000_000]


def _plan(trace: Trace) -> Plan:
    return Plan(
        trace_fingerprint=trace.fingerprint(),
        policy="by hand",
        machine=Machine(chunk_nbytes=16, num_chunks=3),
        residencies=(
            Residency(variable=0, start=Born(), stop=Evicted(write_op=0, release_op=1), chunks=((0, 2),)),
            Residency(variable=1, start=Born(), stop=Dies(), chunks=((2, 1),)),
            Residency(variable=0, start=Loaded(before_op=2), stop=Dies(), chunks=((0, 2),)),
        ),
    )


def test_resident_curve_counts_whole_chunks_while_a_residency_holds_them() -> None:
    trace = _trace()
    measured = Measured(
        step_index=0,
        unix_ns=0,
        duration_ns=6_000_000,
        op_start_ns=(0, 1_000_000, 4_000_000),
        op_stop_ns=(1_000_000, 3_000_000, 5_000_000),
        moves=(),
    )
    view = measured_view(trace, _plan(trace), measured)
    assert [nbytes for _, nbytes in view.resident_curve()] == [0, 32, 0, 16, 0, 32, 0]


def test_curves_of_a_trace_alone_end_with_the_step_and_take_the_time_that_they_are_given() -> None:
    report = {
        "schema": "ooc.report",
        "schema_version": REPORT_SCHEMA_VERSION,
        "policy": "auto",
        "steps": [],
        **dict.fromkeys(("budget_nbytes", "chunk_nbytes", "peak_nbytes", "in_core_peak_nbytes"), 0),
    }
    assert step_curves(report, None) == {}
    curves = step_curves(report, _trace())
    assert curves.keys() == {"live"}
    assert curves["live"][-1] == (0.004, 0)
    scaled = step_curves(report, _trace(), duration_s=2.0)["live"]
    assert scaled == [(pytest.approx(500 * s), n) for s, n in curves["live"]]


def test_pss_of_a_child_is_seen() -> None:
    code = "b = bytearray(64 << 20); input()"
    with MeasuredProcess([sys.executable, "-c", code], is_told=True) as child, PssWatch(child.process.pid) as watch:
        deadline = time.monotonic() + 120
        while watch.peak_nbytes() < 64 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        child.process.communicate("\n")
    assert 64 * MIB <= watch.peak_nbytes() < 128 * MIB
    assert child.process.returncode == 0


@pytest.mark.cgroup
def test_a_group_counts_limits_and_goes_away() -> None:
    try:
        group = MemoryGroup()
    except MemoryGroupUnavailable as reason:
        pytest.skip(str(reason))
    group.close()
    code = "b = bytearray(64 << 20); print(len(b))"
    with MeasuredProcess([sys.executable, "-c", code]) as child:
        assert child.source == "cgroup"
        child.process.wait()
        assert 64 * MIB <= child.peak_nbytes() < 128 * MIB
    with MeasuredProcess([sys.executable, "-c", code], limit_nbytes=32 * MIB) as child:
        assert child.process.wait() == -9
    assert not group.directory.exists()
    orphan = group.directory.parent / f"ooc-{2**22 + 1}-0"  # no process has such a number
    orphan.mkdir()
    MemoryGroup().close()
    assert not orphan.exists()


@pytest.mark.usefixtures("one_thread")
def test_a_trial_tells_each_step_and_repeats() -> None:
    """In a process of its own and in this one: the same losses to the last bit."""
    told = []
    options = TrialOptions(workload="gpt", sizes=SMALL_GPT, num_steps=3, num_threads=1)
    result = run_trial(options, on_step=told.append)
    assert tuple(told) == result.steps
    assert [step.index for step in told] == [0, 1, 2]
    here = train(models.get("gpt", options.preset, **SMALL_GPT), num_steps=3)
    assert result.losses == tuple(step.loss for step in here)
    assert result.peak_nbytes > 50 * MIB


def test_a_trial_that_fails_says_why() -> None:
    with pytest.raises(TrialFailed, match=r"no workload is called 'alexnet'. Options: "):
        run_trial(TrialOptions(workload="alexnet", num_steps=1))
    with pytest.raises(TrialFailed, match="exit code 7 after 0 steps"):
        follow_trial([sys.executable, "-c", "raise SystemExit(7)"])


def test_the_demo_ends_with_equal_losses_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(demo.DEMO_MODELS, "gpt", DemoModel(workload="gpt", num_steps=7, share=0.5, sizes=SMALL_GPT))
    picture = tmp_path / "pictures" / "gpt.svg"
    drawn = []
    plot = demo.plot

    def watched(curves: dict[str, Curve], *arguments: Any, **options: Any) -> None:
        drawn.append((curves, options["title"]))
        plot(curves, *arguments, **options)

    monkeypatch.setattr(demo, "plot", watched)
    assert demo.main(model="gpt", budget="2MiB", out=str(tmp_path), store=str(tmp_path), picture=str(picture)) == 0
    printed = capsys.readouterr().out
    assert "7 of 7" in printed
    assert printed.index("in core: 7 steps ...") < printed.index("out of core, 2.0 MiB: 7 steps ...")
    assert "2.0 MiB" in printed
    assert str(picture) in printed
    svg = picture.read_text()
    assert svg.startswith("<?xml")
    ((curves, title),) = drawn
    assert curves.keys() == {"live", "resident"}
    (in_table,) = re.findall(r"time a step, median .* (\S+ m?s) \(", printed)
    ends = {format_duration(curve[-1][0]) for curve in curves.values()}
    assert ends == {in_table}, "the time axis ends where the table says that a step ends"
    assert in_table in title
    assert max(nbytes for _, nbytes in curves["resident"]) <= 2 * MIB < max(nbytes for _, nbytes in curves["live"])


def test_the_in_core_column_says_why_the_kernel_counts_less_than_the_tensors_are() -> None:
    """The LSTM's had 639.6 MiB of tensors and 465.2 MiB by the kernel, side by side and without a word."""

    def trial(peak: int, report: dict[str, Any] | None = None) -> TrialResult:
        return TrialResult(steps=(), peak_nbytes=peak, source="kernel", report=report or {}, curves={})

    def said(in_core: int) -> str:
        out_of_core = trial(300 * MIB, {"in_core_peak_nbytes": 640 * MIB})
        runs = demo._Runs(
            budget_nbytes=160 * MIB, baseline=trial(100 * MIB), in_core=trial(in_core), out_of_core=out_of_core
        )
        return demo._unwritten(runs)

    assert said(740 * MIB) == ""
    text = said(565 * MIB)
    assert "counts 465.0 MiB for 640.0 MiB of tensors" in text and "at least 175.0 MiB never are" in text


def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        demo.plot({"live": [(0.0, MIB), (1.0, 0)]}, MIB, tmp_path / name, title="small")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_demo_refuses_what_it_cannot_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.main(model="alexnet", out=str(tmp_path)) == 2
    assert demo.main(num_steps=2, out=str(tmp_path)) == 2
    assert demo.main(out=str(tmp_path), picture="memory.bmp") == 2
    assert demo.main(budget="12G", out=str(tmp_path)) == 1
    captured = capsys.readouterr()
    assert ".png or .svg" in captured.out
    assert "Options: gpt" in captured.out
    assert "'12GiB'" in captured.err
