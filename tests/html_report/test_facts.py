"""What is said of a run, a plan or a trace in figures and warnings."""

from __future__ import annotations

import json

import pytest

from ooc.html_report.facts import make_facts
from ooc.html_report.metrics import metrics_of
from ooc.html_report.page import make_page
from ooc.reporting.documents import Document, parse_document
from tests.html_report.cases import MIB, recorded, recorded_text, synthetic


@pytest.fixture(scope="module")
def run() -> Document:
    return parse_document("run.json", json.loads(recorded_text()))


def test_facts_of_a_run(run: Document) -> None:
    facts = make_facts(run, run.view(), run.planned_view())
    assert facts.verdict == "yes"
    m = facts.metrics
    assert m.budget_nbytes == 6 * MIB
    assert m.peak_nbytes is not None
    assert m.peak_nbytes <= 6 * MIB < (m.in_core_peak_nbytes or 0)
    assert m.bound_s is not None
    assert run.measured is not None
    assert m.compute_s is not None
    assert 0 < m.compute_s <= m.bound_s  # at the store's rates of before: the step itself may beat it
    assert run.measured.duration_ns > 0
    assert m.moved_nbytes == (m.loaded_nbytes or 0) + (m.evicted_nbytes or 0) > 0
    assert len(facts.variables) == len(facts.ops) == 10
    costs = [op.duration_ns + op.wait_ns for op in facts.ops]
    assert costs == sorted(costs, reverse=True)


def test_wear_is_bytes_a_day_against_the_endurance(run: Document) -> None:
    assert run.run is not None
    step = {**run.run["steps"][-1], "mode": "planned", "duration_s": 2.0, "evicted_nbytes": 1000 * MIB}
    steady = parse_document("run.json", {**run.run, "steps": [step] * 4})
    figures = {f.name: f for f in make_facts(steady, None, None, endurance_nbytes=1000 * MIB * 43_200 * 30).figures}
    assert figures["Written a day"].value == "41.2 TiB"  # 1000 MiB x 43,200 steps
    assert "30 days" in figures["Written a day"].remark


@pytest.mark.parametrize(("share", "says_why"), [(0.5, True), (2.0, False)])
def test_a_step_that_beats_its_bound_says_of_what_the_bound_is(run: Document, share: float, says_why: bool) -> None:
    bound_s = make_facts(run, run.view(), None).metrics.bound_s
    assert bound_s is not None
    steps = [{**step, "duration_s": bound_s * share} for step in recorded()["steps"]]
    quick = parse_document("run.json", recorded(steps=steps))
    figures = {f.name: f for f in make_facts(quick, quick.view(), None).figures}
    assert ("as when planned" in figures["Time a step"].remark) is says_why


def test_a_run_that_ran_out_of_memory_does_not_fit() -> None:
    ended = {"type": "BudgetTooSmall", "message": "op 214 needs 96.0 MiB at once; the budget is 64.0 MiB."}
    document = parse_document("run.json", recorded(ended_by=ended))
    facts = make_facts(document, None, None)
    assert facts.verdict == "no"
    assert "op 214 needs 96.0 MiB" in facts.headline
    assert 'data-fits="no"' in make_page([document])


def test_warnings_name_what_is_wrong() -> None:
    slow = [{**step, "stall_s": step["duration_s"] * 0.4, "num_faults": 3} for step in recorded()["steps"]]
    document = parse_document("run.json", recorded(steps=slow, unplannable={"abc": "variable 3 can never be away"}))
    warnings = "\n".join(make_facts(document, None, None).warnings)
    assert "40.0% of the time" in warnings
    assert "variable 3 can never be away" in warnings
    assert "24 touches" in warnings
    assert "budget was changed" not in warnings


def test_a_changed_budget_is_told() -> None:
    past = [{"num_steps": 3, "budget_nbytes": 8 * MIB, "peak_nbytes": 7 * MIB}]
    document = parse_document("run.json", recorded(past_budgets=past))
    assert any("budget was changed once" in warning for warning in make_facts(document, None, None).warnings)


def test_figures_of_a_plan_for_a_round_are_told_for_each_step() -> None:
    run = recorded()
    run["timeline"]["plan"]["predicted"]["relocated_nbytes"] = 3 * MIB
    alone = metrics_of(parse_document("run.json", run), None)
    shared = metrics_of(parse_document("run.json", {**run, "plan": {**run["plan"], "num_steps": 3}}), None)
    assert (alone.relocated_nbytes, shared.relocated_nbytes) == (3 * MIB, MIB)
    assert alone.planned_s is not None
    assert shared.planned_s == pytest.approx(alone.planned_s / 3)


def test_waits_of_the_simulation_are_its_stalls() -> None:
    """One way of telling waits serves real and simulated steps; on the latter it can be checked."""
    trace, plan = synthetic(share=0.3)
    document = parse_document("plan.json", json.loads(plan.to_json()))
    view = Document(name="x", kind="plan", trace=trace, plan=document.plan).view()
    assert view is not None
    assert plan.predicted["stall_ns"] > 0
    assert view.stall_ns == sum(
        view.op_start_ns[i] - (view.op_stop_ns[i - 1] if i else 0) for i in range(len(trace.ops))
    )
    assert max(nbytes for _, nbytes in view.resident_curve()) == plan.predicted["peak_nbytes"]
    assert max(nbytes for _, nbytes in view.live_curve()) == trace.peak_nbytes()


def test_what_is_computed_again_is_drawn_and_counted() -> None:
    trace, plan = synthetic(num_blocks=8, share=0.5, policy="sublinear", replayable=True)
    assert plan.predicted["recompute_ns"] > 0
    document = Document(name="plan.json", kind="plan", trace=trace, plan=plan)
    view = document.view()
    assert view is not None
    again_ns = sum(rerun.stop_ns - rerun.start_ns for rerun in view.reruns)
    assert again_ns == plan.predicted["recompute_ns"]
    facts = make_facts(document, view, view)
    assert any(f.name == "Computed again a step" for f in facts.figures)
    gaps_ns = sum(view.op_start_ns[i] - (view.op_stop_ns[i - 1] if i else 0) for i in range(len(trace.ops)))
    assert view.stall_ns + again_ns == gaps_ns
    assert max(nbytes for _, nbytes in view.resident_curve()) == plan.predicted["peak_nbytes"]
