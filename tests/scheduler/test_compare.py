"""Policies side by side: what a comparison, a choice and a sweep promise, also on recorded steps."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.compare import (
    DeadlineTooShort,
    Outcome,
    budgets_between,
    choose,
    compare,
    knee,
    least_budgets,
    sweep,
)
from scheduler.plan import Machine, PlanError
from scheduler.policies import POLICIES, auto
from scheduler.profiles import ProfileError, load_profile
from scheduler.trace import Trace
from scheduler.verify import verify
from tests.scheduler.model_traces import conv_net
from tests.scheduler.random_traces import random_machine, random_trace, replayable

STEPS = sorted((Path(__file__).parent.parent / "data" / "steps").glob("*.json.gz"))
MIB = 1 << 20


def recorded(path: Path) -> Trace:
    return Trace.from_json(gzip.decompress(path.read_bytes()).decode())


def machine(num_chunks: int) -> Machine:
    return Machine(chunk_nbytes=MIB, num_chunks=num_chunks, load_bytes_per_s=3e9, evict_bytes_per_s=3e9)


def test_the_steps_of_eight_models_are_there() -> None:
    assert {path.name.split(".")[0] for path in STEPS} == {
        "vgg16",
        "resnet18",
        "resnet50",
        "mobilenet_v2",
        "unet",
        "bert",
        "gpt",
        "lstm",
    }


@pytest.mark.parametrize(
    ("name", "points"),
    [
        pytest.param("lstm", (1,), id="lstm"),
        pytest.param("lstm", (2,), id="lstm, more", marks=pytest.mark.slow),
        pytest.param("lstm", (0,), id="lstm, least", marks=pytest.mark.slow),
        pytest.param("unet", (0,), id="unet, least", marks=pytest.mark.slow),
    ],
)
def test_on_recorded_steps_plans_are_legal_above_the_bounds_and_auto_leads(name: str, points: tuple[int, ...]) -> None:
    trace = recorded(next(path for path in STEPS if path.name == f"{name}.json.gz"))
    device = replace(load_profile("desktop").machine(chunk_nbytes=1 << 14, num_chunks=0), latency_ns=1000)
    counts = budgets_between(trace, device, 5)
    for count in (counts[point] for point in points):
        outcomes = compare(trace, replace(device, num_chunks=count), sorted(POLICIES))
        (auto,) = (o for o in outcomes if o.policy == "auto")
        for outcome in outcomes:
            if outcome.plan is None:
                assert outcome.smallest_budget_nbytes is not None
                assert outcome.smallest_budget_nbytes > count * device.chunk_nbytes
                continue
            verify(outcome.plan, trace)
            assert outcome.plan.predicted["peak_nbytes"] <= outcome.plan.machine.budget_nbytes
            for bounded in ("duration_ns", "loaded_nbytes", "evicted_nbytes"):
                assert outcome.plan.predicted[bounded] >= outcome.plan.bounds[bounded]
            assert auto.duration_ns <= outcome.duration_ns * 1.0001


def test_without_recomputation_only_moves_are_proposed_by_who_can_do_both() -> None:
    trace = replayable(conv_net(num_blocks=4))
    slow = replace(machine(200), load_bytes_per_s=2e8, evict_bytes_per_s=2e8)
    both = {o.policy: o for o in compare(trace, slow, ("auto", "capuchin", "dtr"))}
    moves = {o.policy: o for o in compare(trace, slow, ("auto", "capuchin", "dtr"), recompute=False)}
    assert [both[name].plan.recomputes for name in both] == [True, True, True]  # type: ignore[union-attr]
    assert [moves[name].plan.recomputes for name in moves] == [False, False, True]  # type: ignore[union-attr]
    assert both["auto"].duration_ns < moves["auto"].duration_ns


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweeps_auto_is_never_slower_with_more_memory(seed: int) -> None:
    trace = random_trace(seed, num_ops=14)
    device = random_machine(seed, 0)
    points = sweep(trace, device, budgets_between(trace, device, 5), ("auto", "window"))
    times = [outcomes[0].duration_ns for _, outcomes in points]
    assert times == sorted(times, reverse=True)
    for count, outcomes in points:
        assert outcomes[0].plan is not None
        assert outcomes[0].plan.machine.num_chunks == count
        verify(outcomes[0].plan, trace)


def test_budgets_reach_from_the_least_that_works_to_where_nothing_moves() -> None:
    trace = conv_net(num_blocks=4)
    counts = budgets_between(trace, machine(0), 5)
    assert len(counts) == 5
    (least,) = compare(trace, machine(counts[0]), ("auto",))
    (below,) = compare(trace, machine(counts[0] - 1), ("auto",))
    (most,) = compare(trace, machine(counts[-1]), ("auto",))
    assert least.plan is not None
    assert below.plan is None
    assert below.smallest_budget_nbytes == counts[0] * MIB
    assert most.plan is not None
    assert most.moved_nbytes == 0


def test_choose_takes_the_fastest_or_the_thriftiest_in_time() -> None:
    trace = conv_net(num_blocks=4)
    outcomes = list(compare(trace, machine(140), ("auto", "on_demand")))
    fast, slow = outcomes[0].duration_ns, outcomes[1].duration_ns
    assert fast < slow
    assert choose(outcomes).policy == "auto"
    priced = [replace(outcomes[0], energy_j=5.0), replace(outcomes[1], energy_j=4.0)]
    assert choose(priced, objective="energy").policy == "on_demand"
    assert choose(priced, objective="energy", deadline_ns=fast).policy == "auto"
    with pytest.raises(ValueError, match="no profile with energy figures"):
        choose(outcomes, objective="energy")


def test_an_impossible_deadline_says_the_fastest_possible() -> None:
    trace = conv_net(num_blocks=4)
    outcomes = compare(trace, machine(140), ("on_demand", "window"))
    with pytest.raises(DeadlineTooShort) as caught:
        choose(outcomes, deadline_ns=1000)
    fastest = min(o.duration_ns for o in outcomes)
    assert caught.value.fastest_ns == fastest
    assert caught.value.bound_ns <= fastest
    assert f"{fastest / 1e6:.3f} ms" in str(caught.value)
    assert choose(outcomes, deadline_ns=fastest).duration_ns == fastest


def test_where_nobody_finds_a_plan_the_error_is_that_of_the_least_demanding() -> None:
    outcomes = compare(conv_net(num_blocks=4), machine(3), ("vdnn", "auto", "lms"))
    assert all(o.plan is None for o in outcomes)
    least = min(o.smallest_budget_nbytes or 0 for o in outcomes)
    with pytest.raises(PlanError, match=r"none of vdnn, auto, lms finds a plan. auto: op \d+ ") as caught:
        choose(outcomes)
    assert f"({least} bytes)" in str(caught.value)


def test_energy_comes_with_a_profile_that_has_it() -> None:
    trace = conv_net(num_blocks=2)
    with_it = compare(trace, machine(5000), ("auto",), profile=load_profile("rpi4"))
    without = compare(trace, machine(5000), ("auto",), profile=load_profile("desktop"))
    assert with_it[0].energy_j == pytest.approx(trace.duration_ns / 1e9 * 3.0)  # rpi4's 3 W; nothing moves
    assert without == (Outcome(policy="auto", plan=without[0].plan),)


def test_a_policy_that_knows_objectives_is_told_them() -> None:
    trace = replayable(conv_net(num_blocks=2))
    machine = Machine(chunk_nbytes=MIB, num_chunks=150, load_bytes_per_s=2e8, evict_bytes_per_s=2e8)
    profile = load_profile("jetson_tx2")
    told, capuchin = compare(
        trace, machine, ("poet", "capuchin"), profile=profile, objective="energy", deadline_ns=10**12
    )
    assert told.plan is not None
    assert told.plan.parameters["objective"] == "energy"
    assert told.plan.parameters["deadline_s"] == 1000.0
    assert told.plan.parameters["compute_w"] == pytest.approx(profile.require_energy().compute_w)
    assert capuchin.plan is not None
    assert "objective" not in capuchin.plan.parameters
    assert told.energy_j is not None
    assert capuchin.energy_j is not None
    assert told.energy_j <= capuchin.energy_j
    for outcome in (told, capuchin):
        assert outcome.energy_bound_j is not None
        assert outcome.energy_j is not None
        assert 0 < outcome.energy_bound_j <= outcome.energy_j
    (timed,) = compare(trace, machine, ("poet",), profile=profile)
    assert timed.plan is not None
    assert "objective" not in timed.plan.parameters
    with pytest.raises(ProfileError, match="energy"):
        compare(trace, machine, ("poet",), profile=load_profile("desktop"), objective="energy")


def points_of(durations: list[int | None]) -> list[tuple[int, tuple[Outcome, ...]]]:
    """A sweep over 10, 20, ... chunks, with one policy's times; None: no plan."""
    trace = conv_net(num_blocks=2)
    plan = compare(trace, machine(trace.peak_nbytes() // MIB + 8), ("on_demand",))[0].plan
    assert plan is not None
    found = []
    for i, duration in enumerate(durations, start=1):
        own = None if duration is None else replace(plan, predicted={**plan.predicted, "duration_ns": duration})
        found.append((10 * i, (Outcome(policy="auto", plan=own),)))
    return found


def test_the_knee_is_where_more_memory_buys_little() -> None:
    assert knee(points_of([None, 1000, 400, 200, 190, 180, 170])) == 40
    assert knee(points_of([1000, 990, 985, 980])) is None  # nothing to buy
    assert knee(points_of([None, None, 500])) is None
    assert knee(points_of([1000, 100])) is None  # two points have no bend
    assert knee([]) is None


def test_the_least_budget_of_each_policy_is_narrowed_down() -> None:
    """Below what is said no plan, at what is said one; `auto` plans within the least that works at all."""
    trace = conv_net(num_blocks=4)
    device = machine(trace.peak_nbytes() // MIB + 8)
    budgets = budgets_between(trace, device, 4)
    policies = ("auto", "window", "vdnn")
    points = sweep(trace, device, budgets, policies)
    least = least_budgets(trace, device, points, num_tries=12)
    assert least.keys() == set(policies)
    assert least["auto"] == budgets[0]
    for policy, count in least.items():
        assert count is not None
        assert compare(trace, replace(device, num_chunks=count), (policy,))[0].plan is not None
        if count > budgets[0]:
            assert compare(trace, replace(device, num_chunks=count - 1), (policy,))[0].plan is None
    assert least["vdnn"] is not None and least["vdnn"] > budgets[0]  # it knows no budget: some are out of its reach


def test_auto_takes_the_best_plan_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long step it asks few others itself. Here it asks none, and is made to find a slow plan."""
    trace = conv_net(num_blocks=5)
    device = machine(trace.peak_nbytes() // MIB // 2)
    slow = POLICIES["on_demand"].schedule
    monkeypatch.setattr(auto, "schedule", lambda trace, machine, **_: slow(trace, machine))
    monkeypatch.setitem(POLICIES, "auto", replace(POLICIES["auto"], schedule=auto.schedule))
    alone = compare(trace, device, ("auto",))[0]
    found = {o.policy: o for o in compare(trace, device, ("auto", "capuchin", "window"))}
    best = min(found["capuchin"].duration_ns, found["window"].duration_ns)
    assert alone.duration_ns > best == found["auto"].duration_ns
    plan = found["auto"].plan
    assert plan is not None
    verify(plan, trace)
    assert plan.policy == "auto" and any(note.startswith("this is the plan of ") for note in plan.notes)
