"""Timelines for Perfetto: their form, what they say, and torch.profiler's clock."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ooc
from ooc.cli.main import main
from ooc.reporting.chrome_trace import _flows, chrome_trace, profiler_base_ns
from ooc.reporting.documents import BadDocument, Document, parse_document
from ooc.reporting.step_view import StepView
from tests.html_report.cases import net, recorded_text, synthetic
from tests.reporting.chrome_schema import problems

Event = dict[str, Any]


def simulated() -> Document:
    trace, plan = synthetic(share=0.3)
    return Document(name="plan.json", kind="plan", trace=trace, plan=plan)


def real() -> Document:
    return parse_document("run.json", json.loads(recorded_text()))


def by_track(trace: dict[str, Any]) -> dict[tuple[str, str], list[Event]]:
    """Slices by process and track name, in order of start."""
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[processes[event["pid"]], tracks[event["pid"], event["tid"]]].append(event)
    return {key: sorted(slices, key=lambda e: (e["ts"], -e["dur"])) for key, slices in found.items()}


@pytest.mark.parametrize("make", [simulated, real], ids=["simulated", "real"])
def test_tracks_hold_every_op_and_transfer_without_overlap(make: Callable[[], Document]) -> None:
    document = make()
    view = document.view()
    assert view is not None
    trace = chrome_trace([document])
    tracks = {track: slices for (name, track), slices in by_track(trace).items() if view.source in name}
    assert [e["name"] for e in tracks["compute"]] == [op.name for op in view.trace.ops]
    for kind, title in (("load", "loads"), ("evict", "evictions")):
        slices = [e for track, found in tracks.items() if track.startswith(title) for e in found]
        moves = [move for move in view.moves if move.kind == kind]
        assert len(slices) == len(moves) > 0
        assert sum(e["args"]["bytes"] for e in slices) == sum(move.nbytes for move in moves)
    for slices in tracks.values():
        for one, other in pairwise(slices):
            # As Perfetto cuts microseconds off to nanoseconds: of slices that cross it drops one.
            assert int(one["ts"] * 1000) + int(one["dur"] * 1000) <= int(other["ts"] * 1000)
    assert "disk" in tracks


@pytest.mark.parametrize("make", [simulated, real], ids=["simulated", "real"])
def test_the_file_is_valid(make: Callable[[], Document]) -> None:
    document = make()
    """Event by event, as Perfetto reads it; and the check itself finds what is wrong."""
    trace = chrome_trace([document])
    assert problems(json.dumps(trace)) == []
    assert {"M", "X", "C"} <= {e["ph"] for e in trace["traceEvents"]}
    op = next(e for e in trace["traceEvents"] if e["ph"] == "X")
    counter = next(e for e in trace["traceEvents"] if e["ph"] == "C")
    for spoilt in (
        {**op, "ts": -1.0},
        {**op, "ts": math.nan},
        {**op, "ts": op["ts"] + op["dur"] / 2, "dur": op["dur"] * 2 + 1e9},
        {**op, "tid": 999},
        {**counter, "ts": 0.0, "args": {"bytes": 1.5}},
        {"ph": "s", "name": "n", "cat": "c", "id": 1, "pid": op["pid"], "tid": op["tid"], "ts": op["ts"]},
    ):
        assert problems(json.dumps({**trace, "traceEvents": [*trace["traceEvents"], spoilt]})) != []


def test_flows_lead_from_a_transfer_to_the_op_that_waited() -> None:
    document = simulated()
    view = document.view()
    assert isinstance(view, StepView)
    assert view.waits
    trace = chrome_trace([document])
    tracks = by_track(trace)
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(view.waits)
    slices = [e for found in tracks.values() for e in found]
    for number, wait in zip(sorted(starts), view.waits, strict=True):
        start, end = starts[number], ends[number]
        (source,) = [e for e in slices if e["tid"] == start["tid"] and e["ts"] <= start["ts"] <= e["ts"] + e["dur"]]
        assert source["args"]["variable"] == view.moves[wait.move].variable
        (target,) = [e for e in slices if e["cat"] == "op" and e["args"]["op"] == wait.op]
        assert end["ts"] == target["ts"] >= start["ts"]


def test_no_arrow_leads_backwards() -> None:
    """A wait at the step's start may be for an eviction of the step before, whose like in this step comes later."""
    document = simulated()
    view = document.view()
    assert view is not None
    last = len(view.moves) - 1
    late = replace(view.moves[last], issue_ns=view.duration_ns, start_ns=view.duration_ns, stop_ns=view.duration_ns + 9)
    moved = replace(view, moves=(*view.moves[:last], late), waits=(replace(view.waits[0], move=last), *view.waits[1:]))
    tids = [1] * len(view.moves)
    arrows = [e["id"] for e in _flows(moved, tids, 7, float) if e["ph"] == "s"]
    assert arrows == [(7 << 24) + number for number, wait in enumerate(moved.waits) if wait.move != last]
    assert len(arrows) < len(view.waits)


def test_counters_reach_what_the_plan_says() -> None:
    document = simulated()
    assert document.plan is not None
    assert document.trace is not None
    trace = chrome_trace([document])
    highest: Counter[str] = Counter()
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            highest[event["name"]] = max(highest[event["name"]], event["args"]["bytes"])
    assert highest["resident"] == document.plan.predicted["peak_nbytes"]
    assert highest["live"] == document.trace.peak_nbytes()
    assert highest["budget"] == document.plan.machine.budget_nbytes
    assert highest["in flight"] > 0
    last = [e for e in trace["traceEvents"] if e["name"] == "in flight"][-1]
    assert last["args"]["bytes"] == 0


def test_a_run_is_drawn_beside_its_plan() -> None:
    names = [e["args"]["name"] for e in chrome_trace([real()])["traceEvents"] if e["name"] == "process_name"]
    assert names == ["ooc: run.json, measured", "ooc: run.json, as planned"]


def test_the_profilers_base_is_ours(tmp_path: Path) -> None:
    """Times in its file count from a moment that we compute in the same way."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(8).sum()
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    written = json.loads((tmp_path / "profile.json").read_text())
    base_ns = written["baseTimeNanoseconds"]
    moment_ns = base_ns + int(max(e["ts"] for e in written["traceEvents"] if e.get("ph") == "X") * 1000)
    assert profiler_base_ns(moment_ns) == base_ns


def test_our_timeline_is_on_the_profilers_clock(tmp_path: Path) -> None:
    """One planned step under torch.profiler: each op of ours lies within the profiler's slice of it."""
    torch.manual_seed(0)
    with ooc.Session("6MiB", plan_cache=False) as session:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            with session.step():
                loss = model(torch.randn(256, 256)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss

        for _ in range(6):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        with session.step():  # the step above is whole only now
            pass
        report = session.report(with_timeline=True)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    (tmp_path / "run.json").write_text(json.dumps(report))
    out = tmp_path / "both.json"
    assert (
        main(
            ["report", str(tmp_path / "run.json"), "--trace-json", str(out), "--beside", str(tmp_path / "profile.json")]
        )
        == 0
    )
    events = json.loads(out.read_text())["traceEvents"]
    compute = [e for e in events if e.get("cat") == "op" and e["pid"] == 1 << 22]
    theirs = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::addmm"]
    theirs.sort(key=lambda e: e["ts"])
    # The profiler sees each op twice: around the dispatch mode, and around the kernel within. We stamp between.
    around, within = theirs[0::2], theirs[1::2]
    ours = [e for e in compute if e["name"] == "aten.addmm.default"]
    assert len(ours) == len(around) == len(within) == 9
    clocks_agree_us = 200
    for outer, one, inner in zip(around, ours, within, strict=True):
        assert outer["ts"] - clocks_agree_us <= one["ts"] <= inner["ts"] + clocks_agree_us
        stops = [e["ts"] + e["dur"] for e in (inner, one, outer)]
        assert stops[0] - clocks_agree_us <= stops[1] <= stops[2] + clocks_agree_us


def test_the_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run.json", tmp_path / "trace.json"
    run.write_text(recorded_text())
    assert main(["report", str(run), "--trace-json", str(out)]) == 0
    assert json.loads(out.read_text())["baseTimeNanoseconds"] > 0
    _, plan = synthetic()
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert main(["report", str(tmp_path / "plan.json"), "--trace-json", str(out)]) == 2
    assert "give its trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "no 'traceEvents'"),
        (b'{"traceEvents": []}', "baseTimeNanoseconds"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "cannot be read"),
    ],
)
def test_a_bad_profile_gets_a_reason(tmp_path: Path, body: bytes, message: str) -> None:
    from ooc.reporting.chrome_trace import write_chrome_trace

    (tmp_path / "profile.json").write_bytes(body)
    with pytest.raises(BadDocument, match=message):
        write_chrome_trace(tmp_path / "out.json", [real()], beside=tmp_path / "profile.json")
    assert not (tmp_path / "out.json").exists()
