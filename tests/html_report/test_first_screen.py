"""The first screen's promises: all time is accounted for, red means a warning, a comparison leads with the answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.html_report.comparison import leading_lines
from ooc.html_report.facts import make_facts
from ooc.html_report.page import make_page
from ooc.html_report.time_changes import reasons
from ooc.html_report.time_shares import time_shares
from ooc.reporting.documents import Document, parse_document, read_documents
from ooc.reporting.step_view import RerunRow, StepView, Wait
from ooc.units import format_rate
from scheduler.trace import Op, Trace
from tests.html_report.cases import MIB, recorded, recorded_text, synthetic


@pytest.fixture(scope="module")
def run() -> Document:
    return parse_document("run.json", json.loads(recorded_text()))


# -- the time of a step


def view_of(
    ops: list[tuple[int, int]], waits: list[tuple[int, int]], reruns: list[tuple[int, int]], stop: int
) -> StepView:
    trace = Trace(
        ops=tuple(
            Op(name="op", start_tick=i, stop_tick=i + 1, duration_ns=b - a, uses=()) for i, (a, b) in enumerate(ops)
        ),
        variables=(),
        num_ticks=len(ops) + 1,
    )
    return StepView(
        source="measured",
        trace=trace,
        plan=None,
        op_start_ns=tuple(a for a, _ in ops),
        op_stop_ns=tuple(b for _, b in ops),
        moves=(),
        waits=tuple(Wait(op=0, start_ns=a, stop_ns=b, move=0) for a, b in waits),
        reruns=tuple(RerunRow(op=0, start_ns=a, stop_ns=b) for a, b in reruns),
        duration_ns=stop,
    )


def test_each_category_has_its_time() -> None:
    """A step of 100: ops in [10, 30) and [50, 80), a wait in [40, 50), a re-run in [32, 36)."""
    shares = {s.name: s.ns for s in time_shares(view_of([(10, 30), (50, 80)], [(40, 50)], [(32, 36)], 100))}
    assert shares == {
        "ops": 50,
        "waiting for transfers": 10,
        "computed again": 4,
        "before the first op": 10,
        "between ops": 6,
        "after the last op": 20,
    }


INTERVALS = st.lists(st.tuples(st.integers(-5, 60), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])), max_size=6)


@settings(max_examples=200, deadline=None)
@given(ops=INTERVALS, waits=INTERVALS, reruns=INTERVALS, stop=st.integers(1, 70))
def test_the_shares_add_up_whatever_overlaps(
    ops: list[tuple[int, int]], waits: list[tuple[int, int]], reruns: list[tuple[int, int]], stop: int
) -> None:
    shares = time_shares(view_of(sorted(ops), waits, reruns, stop))
    assert sum(share.ns for share in shares) == stop
    assert all(share.ns >= 0 for share in shares)
    waiting = {t for a, b in waits for t in range(max(a, 0), min(b, stop))}
    assert sum(s.ns for s in shares if s.name == "waiting for transfers") == len(waiting)
    rerunning = {t for a, b in reruns for t in range(max(a, 0), min(b, stop))} - waiting
    computing = {t for a, b in ops for t in range(max(a, 0), min(b, stop))} - waiting - rerunning
    assert next(s.ns for s in shares if s.name == "ops") == len(computing)


def test_all_of_a_measured_steps_time_is_on_the_page(run: Document) -> None:
    view = run.view()
    assert view is not None and run.measured is not None
    facts = make_facts(run, view, run.planned_view())
    assert sum(share.ns for share in facts.time) == run.measured.duration_ns
    # Waits that no op of the plan explains are counted, too.
    waited = sum(share.ns for share in facts.time if share.name == "waiting for transfers")
    assert waited >= view.stall_ns
    assert "Where the step&#x27;s time goes" in make_page([run])
    trace, plan = synthetic(num_blocks=8, share=0.5, policy="sublinear", replayable=True)
    simulated = Document(name="plan.json", kind="plan", trace=trace, plan=plan).view()
    assert simulated is not None
    assert sum(share.ns for share in time_shares(simulated)) == simulated.duration_ns


# -- warnings


def test_a_red_figure_is_a_warning_and_none_else(run: Document) -> None:
    """A step that writes 1,000 MiB in 0.1 s wears a card out in days, and waits 40 % of the time."""
    assert run.run is not None
    step = {**run.run["steps"][-1], "mode": "planned", "duration_s": 0.1, "stall_s": 0.04, "evicted_nbytes": 1000 * MIB}
    for steps in ([step] * 4, [{**step, "stall_s": 0.0}] * 4, [{**step, "evicted_nbytes": 0, "stall_s": 0.0}] * 4):
        document = parse_document("run.json", {**run.run, "steps": steps})
        page = make_page([document])
        facts = make_facts(document, document.view(), document.planned_view())
        bad = [figure for figure in facts.figures if figure.warning]
        assert page.count('class="tile bad"') == len(bad)
        assert all(figure.warning in facts.warnings for figure in bad)
        assert not (bad and "No warnings." in page)
    assert "A disk rated for" in make_page([parse_document("run.json", {**run.run, "steps": [step] * 4})])


def test_a_verdict_in_red_is_never_over_no_warnings() -> None:
    """A run that ended for want of memory, with nothing drawn and nothing else to complain of."""
    document = recorded()
    del document["timeline"]
    fine = {"mode": "planned", "stall_s": 0.0, "num_faults": 0, "num_remapped_chunks": 0}
    fine |= {"loaded_nbytes": 0, "evicted_nbytes": 0}
    steps = [{**step, **fine} for step in document["steps"]]
    quiet = {**document, "steps": steps, "unplannable": {}, "not_played": {}, "past_budgets": []}
    quiet["store"] = {**document["store"], "is_direct": True}
    page = make_page([parse_document("run.json", quiet)])
    assert 'class="verdict yes"' in page
    assert "No warnings." in page
    for ended in ("BudgetTooSmall", "ValueError"):
        for some in (steps, steps[:1], []):
            ends = {**quiet, "steps": some, "ended_by": {"type": ended, "message": "no"}}
            page = make_page([parse_document("run.json", ends)])
            assert ('class="verdict no"' in page) == (ended == "BudgetTooSmall")
            assert f"The run was ended by {ended}" in page
            assert "No warnings." not in page
    over = {**quiet, "peak_nbytes": document["budget_nbytes"] + 1}
    page = make_page([parse_document("run.json", over)])
    assert 'class="verdict no"' in page
    assert "No warnings." not in page


# -- comparisons


def changed(document: dict[str, Any], factor: float, **more: Any) -> dict[str, Any]:
    steps = [{**step, "duration_s": step["duration_s"] * factor} for step in document["steps"]]
    return {**document, "steps": steps, **more}


def lines(*documents: Document) -> list[str]:
    return leading_lines(documents, [make_facts(d, d.view(), d.planned_view()) for d in documents])


def test_a_comparison_leads_with_what_changed_and_why() -> None:
    document = recorded()
    one = parse_document("one.json", document)
    found = lines(one, parse_document("two.json", changed(document, 2.0, policy="window")))
    assert re.match(r"two\.json takes \S+ \S+ a step instead of \S+ \S+ \(100% more\)", found[0])
    assert "policy auto, then window" in found[1]
    found = lines(one, parse_document("two.json", changed(document, 1.01)))
    assert found[0].startswith("two.json takes as long as one.json")
    ended = {"type": "BudgetTooSmall", "message": "no"}
    found = lines(one, parse_document("two.json", {**document, "ended_by": ended}))
    assert found[0] == "one.json fits, two.json does not."


def times_of(view: StepView, factor: Callable[[int], int]) -> StepView:
    """The same step with ops of 10 us and more, each times its factor, and nothing between them."""
    starts, stops, now = [], [], 0
    for index in range(len(view.trace.ops)):
        starts.append(now)
        now += (10_000 + index) * factor(index)
        stops.append(now)
    return replace(view, op_start_ns=tuple(starts), op_stop_ns=tuple(stops), duration_ns=now, waits=(), moves=())


def test_slower_ops_are_named_with_their_line(run: Document) -> None:
    """One op takes 5,000 times as long: it is named. All of them take twice as long: the machine is."""
    view = run.view()
    assert view is not None
    even = times_of(view, lambda _: 1)
    largest = 7
    slow = times_of(view, lambda i: 5000 if i == largest else 1)
    (said,) = reasons(even, slow, ["ops"], is_more=True)
    op = view.trace.ops[largest]
    assert said.startswith(f"Ops: {op.name} ({op.where}) ")
    assert " instead of " in said
    assert reasons(slow, even, ["ops"], is_more=False)[0].startswith(f"Ops: {op.name} ({op.where}) ")
    (said,) = reasons(even, times_of(view, lambda _: 2), ["ops"], is_more=True)
    assert said == "All ops alike took 2.00 x as long: the machine was busier or slower."
    ops = view.trace.ops
    fewer = replace(
        even,
        trace=replace(view.trace, ops=ops[:largest] + ops[largest + 1 :]),
        op_start_ns=even.op_start_ns[:largest] + even.op_start_ns[largest + 1 :],
        op_stop_ns=even.op_stop_ns[:largest] + even.op_stop_ns[largest + 1 :],
    )
    (said,) = reasons(fewer, even, ["ops"], is_more=True)
    assert said.startswith(f"Ops: {op.name} ({op.where})")


def test_slower_transfers_are_named_with_their_rate_and_their_variable() -> None:
    """The same plan on a store of a tenth of the speed: the same bytes, at a tenth of the rate."""
    trace, plan = synthetic(num_blocks=6, share=0.4, policy="on_demand")
    machine = replace(
        plan.machine,
        load_bytes_per_s=plan.machine.load_bytes_per_s / 10,
        evict_bytes_per_s=plan.machine.evict_bytes_per_s / 10,
    )
    pair = [
        Document(name=name, kind="plan", trace=trace, plan=own)
        for name, own in (("quick.json", plan), ("slow.json", replace(plan, machine=machine)))
    ]
    views = [document.view() for document in pair]
    assert views[0] is not None and views[1] is not None
    (said,) = reasons(views[0], views[1], ["waiting for transfers"], is_more=True)
    rate = format_rate(machine.load_bytes_per_s)
    assert re.match(rf"Transfers: loads at {re.escape(rate)} instead of .*; most for .+, \S+ \S+ instead of ", said)
    assert " loaded instead of " not in said


def test_without_a_drawn_step_waits_are_told_from_all_steps() -> None:
    document = recorded()
    del document["timeline"]
    steps = [{**s, "duration_s": 1.0, "stall_s": 0.1, "mode": "planned"} for s in document["steps"]]
    one = parse_document("one.json", {**document, "steps": steps})

    def said(duration_s: float, stall_s: float) -> str:
        rows = [{**s, "duration_s": duration_s, "stall_s": stall_s} for s in steps]
        return lines(one, parse_document("two.json", {**document, "steps": rows}))[0]

    assert said(2.0, 1.1).endswith("(100% more): 1.00 s more waiting for transfers.")
    assert said(2.0, 0.5).endswith("(100% more): 400 ms more waiting for transfers; the rest in ops, or between them.")
    assert said(2.0, 0.1).endswith("(100% more): not by waiting for transfers: in ops, or between them.")
    assert said(0.5, 0.2).endswith("(50% less): not by waiting for transfers: in ops, or between them.")


def test_a_plan_that_waits_longer_says_so() -> None:
    plans = []
    for share, name in ((0.6, "roomy.json"), (0.35, "tight.json")):
        trace, plan = synthetic(num_blocks=6, share=share, policy="on_demand")
        plans.append(Document(name=name, kind="plan", trace=trace, plan=plan))
    found = lines(*plans)
    assert found[0].startswith("tight.json takes ") and "more waiting for transfers" in found[0]
    assert found[1].startswith("Transfers: ")
    assert found[2].startswith("Different: budget ")
    page = make_page(plans)
    lead = page.index('<div class="lead">')
    assert lead < page.index('id="compared"') < page.index('class="summary"')
    assert unescape(page[lead:]).startswith(f'<div class="lead"><p>{found[0]}')


def test_each_section_says_whose_it_is(run: Document) -> None:
    other = parse_document("other.json", recorded())
    page = make_page([run, other])
    assert re.findall(r'<section class="summary">\n<h2 class="whose">(.*?)</h2>', page) == ["run.json", "other.json"]
    assert 'class="whose"' not in make_page([run])


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "run.json" for folder in ("a/x", "b/x")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(recorded_text())
    assert [d.name for d in read_documents(paths)] == ["a/x/run.json", "b/x/run.json"]
    assert [d.name for d in read_documents([paths[0], paths[0]])] == ["run.json (1)", "run.json (2)"]
    assert [d.name for d in read_documents(paths[:1])] == ["run.json"]


# -- the page itself


def test_tables_are_cards_on_a_phone(run: Document) -> None:
    """Each cell has its column's name, which the style of narrow screens shows."""
    page = make_page([run])
    assert not re.search(r"<td>", page)
    assert 'data-label="waited for"' in page and 'data-label="planned"' in page
    assert "@media (max-width: 40rem)" in page and "attr(data-label)" in page


def drawn(documents: list[Document], tmp_path: Path) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node found (apt install nodejs)")
    path = tmp_path / "page.html"
    path.write_text(make_page(documents), encoding="utf-8")
    command = [node, str(Path(__file__).parent / "page_in_node.js"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_first_step_of_a_minute_does_not_flatten_the_others(tmp_path: Path) -> None:
    document = recorded()
    seconds = [70.0, 3.0, 1.0, 1.1, 1.0, 0.9, 1.0, 1.0]
    steps = [{**s, "duration_s": t, "stall_s": 0.0} for s, t in zip(document["steps"], seconds, strict=True)]
    found = drawn([parse_document("run.json", {**document, "steps": steps})], tmp_path)
    assert "cut off: step 1, 70.0 s" in found["legends"]["steps"]
    bars = found["heights"]["steps"]
    tallest = max(bars)
    ordinary = sorted(bars[: len(bars) // 2])[len(bars) // 4]
    assert ordinary > tallest / 8  # 1 s beside the bar that is cut off; not 1/70 of it
    same = drawn([parse_document("run.json", document)], tmp_path)
    assert ("cut off" in same["legends"]["steps"]) == (
        max(s["duration_s"] for s in document["steps"]) > 4 * sorted(s["duration_s"] for s in document["steps"])[3]
    )
