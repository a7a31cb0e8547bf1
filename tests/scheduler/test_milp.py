"""The mixed-integer programs: POET's published cases, brute force on tiny graphs, rounding, transfers."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.milp.graph import Graph, Node, read_poet_csv
from scheduler.milp.program import Request, Schedule, Status, peak_of, solve
from scheduler.milp.rounding import schedule_keeping, solve_by_rounding
from scheduler.milp.transfers import execution_plan, without_contention

INSTANCES = Path(__file__).parent / "instances" / "poet"
CHIPS = json.loads((INSTANCES / "chipsets.json").read_text())
REFERENCE = json.loads((INSTANCES / "reference_optima.json").read_text())
RELATIVE_GAP = 1e-6


def poet_graph(model: str, chip: str) -> Graph:
    with (INSTANCES / f"{model}.{chip}.csv").open() as lines:
        return read_poet_csv(lines, CHIPS[chip])


def request_of(case: dict[str, Any], graph: Graph) -> Request:
    return Request(
        budget_nbytes=case["ram_budget"],
        deadline_s=case["runtime_mult"] * graph.compute_s,
        paging=bool(case["paging"]),
        recompute=bool(case["remat"]),
        time_limit_s=None,
        relative_gap=RELATIVE_GAP,
    )


def check_against(case: dict[str, Any]) -> None:
    graph = poet_graph(case["model"], case["chip"])
    solution = solve(graph, request_of(case, graph))
    if case["status"] == "Infeasible":
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.status is Status.OPTIMAL
    assert solution.objective is not None
    assert solution.peak_nbytes is not None
    assert case["bound_J"] * (1 - RELATIVE_GAP) <= solution.objective <= case["obj_J"] * (1 + RELATIVE_GAP)
    assert solution.peak_nbytes <= case["ram_budget"]


@pytest.mark.parametrize("is_thinned", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["thinned", "rest"])
@pytest.mark.parametrize(("first", "chip"), enumerate(["m0", "m4", "a72"]))
def test_reproduces_poets_optima_of_the_linear_network(first: int, chip: str, is_thinned: bool) -> None:
    """Budgets, deadlines and what is allowed; every fifth case meets each value of each of them."""
    cases = [case for case in REFERENCE if (case["model"], case["chip"]) == ("linear", chip)]
    assert len(cases) == 36
    for index, case in enumerate(cases):
        if (index % 5 == first) == is_thinned:
            check_against(case)


@pytest.mark.slow
def test_reproduces_poets_optimum_of_resnet18_on_a_raspberry_pi() -> None:
    (case,) = (case for case in REFERENCE if (case["model"], case["chip"]) == ("resnet18_cifar", "a72"))
    check_against(case)


# -- tiny graphs, all schedules ----------------------------------------------------------------


def tiny_graph(seed: int, size: int) -> Graph:
    rng = random.Random(seed)
    nodes = []
    for index in range(size):
        earlier = range(index)
        deps = set(rng.sample(earlier, min(index, rng.choice([0, 0, 0, 1]))))
        if index:
            deps.add(index - 1)
        if 2 * index >= size and rng.random() < 0.8:  # a backward pass reads what the forward pass made
            deps.add(size - 1 - index)
            deps.discard(index)
        nodes.append(
            Node(
                name=f"n{index}",
                deps=tuple(sorted(deps)),
                nbytes=rng.randint(1, 9),
                compute_s=rng.randint(1, 9),
                compute_j=rng.randint(1, 9),
                load_s=rng.randint(1, 9),
                load_j=rng.randint(1, 9),
                evict_s=rng.randint(1, 9),
                evict_j=rng.randint(1, 9),
                may_recompute=rng.random() < 0.8,
                may_page=rng.random() < 0.8,
            )
        )
    return Graph(nodes=tuple(nodes))


def some_budget(graph: Graph, rng: random.Random) -> int:
    """Mostly a tight one."""
    least = int(graph.least_nbytes)
    return rng.choice([least, least + 1, least + 2, rng.randint(least, int(graph.most_nbytes))])


def stage_fits(t: int, now: frozenset[int], next_kept: frozenset[int], again: frozenset[int], case: Any) -> bool:
    """Whether stage t can compute node t and `again` from `now` within the budget."""
    graph, request = case
    held, runs = set(now), sorted({t, *again})
    for position, k in enumerate(runs):
        node = graph.nodes[k]
        if any(dep not in now and dep not in runs[:position] for dep in node.deps):
            return False
        stays_twice = k in held
        nbytes = sum(graph.nodes[i].nbytes for i in held) + node.nbytes
        if stays_twice:  # kept and computed again: a spurious copy, never of use
            return False
        if nbytes > request.budget_nbytes:
            return False
        held.add(k)
        later = {dep for other in runs[position + 1 :] for dep in graph.nodes[other].deps}
        held -= {dep for dep in node.deps if dep not in later and dep not in next_kept}
    return True


def brute_force(graph: Graph, request: Request) -> float | None:
    """The least energy over all schedules, by dynamic programming over (stage, in memory, on flash)."""
    size = len(graph.nodes)
    may_again = {i for i in range(size) if request.recompute and graph.nodes[i].may_recompute}
    may_page = {i for i in range(size) if request.paging and graph.nodes[i].may_page}
    best: dict[tuple[frozenset[int], frozenset[int]], float] = {(frozenset(), frozenset()): 0.0}
    for t in range(size):
        following: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        done = set(range(t + 1))
        for (now, flash), joules in best.items():
            for again in subsets((done - {t}) & may_again - now):
                base = joules + sum(graph.nodes[i].compute_j for i in {t, *again})
                for nxt in subsets(done) if t + 1 < size else [frozenset()]:
                    loads = nxt - now - again - {t}
                    if not loads <= flash & may_page or not stage_fits(t, now, nxt, again, (graph, request)):
                        continue
                    cost = base + sum(graph.nodes[i].load_j for i in loads)
                    for out in subsets(now & may_page - flash):
                        key = nxt, flash | out
                        total = cost + sum(graph.nodes[i].evict_j for i in out)
                        following[key] = min(total, following.get(key, float("inf")))
        best = following
    return min(best.values(), default=None)


def subsets(of: Any) -> list[frozenset[int]]:
    items = sorted(of)
    return [frozenset(c) for n in range(len(items) + 1) for c in itertools.combinations(items, n)]


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), paging=st.booleans(), recompute=st.booleans())
def test_is_as_good_as_trying_everything(seed: int, paging: bool, recompute: bool) -> None:
    rng = random.Random(seed)
    graph = tiny_graph(seed, rng.randint(1, 6))
    budget = some_budget(graph, rng)
    request = Request(budget_nbytes=budget, paging=paging, recompute=recompute, relative_gap=0.0)
    wanted, solution = brute_force(graph, request), solve(graph, request)
    if wanted is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.objective == pytest.approx(wanted)
    assert solution.schedule is not None
    check_rules(solution.schedule, graph, request)


def check_rules(schedule: Schedule, graph: Graph, request: Request) -> None:
    """The paper's rules, one by one."""
    size = len(graph.nodes)
    assert peak_of(schedule, graph) <= request.budget_nbytes * (1 + 1e-9)
    for t, i in itertools.product(range(size), range(size)):
        node = graph.nodes[i]
        if i == t:
            assert schedule.computed[t, i]
        if schedule.computed[t, i]:
            assert i <= t and (i == t or (node.may_recompute and request.recompute))
            assert all(schedule.computed[t, dep] or schedule.kept[t, dep] for dep in node.deps)
        if schedule.kept[t, i]:
            assert i < t
            assert schedule.kept[t - 1, i] or schedule.computed[t - 1, i] or schedule.load[t - 1, i]
        if schedule.stored[t, i]:
            assert schedule.stored[t - 1, i] or schedule.evict[t - 1, i]
        if schedule.load[t, i]:
            assert schedule.stored[t, i] and node.may_page and request.paging
        if schedule.evict[t, i]:
            assert schedule.kept[t, i]


@settings(max_examples=100, deadline=None)
@example(seed=10)  # something was to be loaded that had never been kept, and so never written out
@example(seed=238)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_kept_rounding_makes_a_schedule_that_follows_the_rules(seed: int) -> None:
    size = random.Random(seed).randint(3, 7)
    graph = tiny_graph(seed, size)
    request = Request(budget_nbytes=1 << 40, objective="time", charge_paging=True)
    kept = np.random.default_rng(seed).random((size, size)) < 0.5
    check_rules(schedule_keeping(kept, graph, request), graph, request)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_charging_transfers_is_never_faster_and_keeps_the_deadline(seed: int) -> None:
    rng = random.Random(seed)
    graph = tiny_graph(seed, rng.randint(2, 6))
    budget = some_budget(graph, rng)
    free = solve(graph, Request(budget_nbytes=budget, objective="time", relative_gap=0.0))
    charged = solve(graph, Request(budget_nbytes=budget, objective="time", charge_paging=True, relative_gap=0.0))
    assert (free.status is Status.INFEASIBLE) == (charged.status is Status.INFEASIBLE)
    if free.objective is None or charged.objective is None or charged.schedule is None:
        return
    assert charged.objective >= free.objective * (1 - 1e-9)
    check_rules(charged.schedule, graph, Request(budget_nbytes=budget))
    late = Request(
        budget_nbytes=budget, deadline_s=charged.objective * 0.99 - 0.01, charge_paging=True, relative_gap=0.0
    )
    assert solve(graph, late).status is Status.INFEASIBLE
    in_time = Request(budget_nbytes=budget, deadline_s=charged.objective * (1 + 1e-6), charge_paging=True)
    assert solve(graph, in_time).status is Status.OPTIMAL


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), paging=st.booleans(), recompute=st.booleans())
def test_rounded_schedules_keep_the_rules_and_the_bound_holds(seed: int, paging: bool, recompute: bool) -> None:
    rng = random.Random(seed)
    graph = tiny_graph(seed, rng.randint(1, 8))
    budget = some_budget(graph, rng)
    request = Request(budget_nbytes=budget, paging=paging, recompute=recompute)
    rounded = solve_by_rounding(graph, request)
    if rounded.schedule is None or rounded.objective is None or rounded.bound is None:
        assert rounded.status in (Status.INFEASIBLE, Status.NONE)
        return
    check_rules(rounded.schedule, graph, request)
    best = solve(graph, request)
    assert best.objective is not None
    assert rounded.bound <= best.objective * (1 + 1e-6)
    assert rounded.objective >= best.objective * (1 - 1e-3)


def test_programs_end_where_every_schedule_takes_as_long_as_what_is_known() -> None:
    """`auto` knows a plan already when it asks the programs, which took most of its time and lost."""
    graph = poet_graph("linear", "m4")
    request = Request(budget_nbytes=4065.6, objective="time", charge_paging=True)
    plain = solve_by_rounding(graph, request)
    assert plain.bound is not None
    beyond = solve_by_rounding(graph, replace(request, limit_s=plain.bound * (1 - 1e-9)))
    assert beyond.status is Status.TOO_LONG
    assert beyond.schedule is None
    within = solve_by_rounding(graph, replace(request, limit_s=plain.bound * 1.01))
    assert (within.status, within.objective) == (plain.status, plain.objective)
    best = solve(graph, request)
    assert best.objective is not None
    assert solve(graph, replace(request, limit_s=best.objective * 0.99)).status is Status.TOO_LONG
    below = solve(graph, replace(request, limit_s=best.objective * 1.01))
    assert below.objective == pytest.approx(best.objective, rel=2 * request.relative_gap)
    energy = replace(request, objective="energy")
    assert solve_by_rounding(graph, replace(energy, limit_s=0.0)).status is solve_by_rounding(graph, energy).status


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_fewer_stages_are_never_cheaper_and_keep_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    graph = tiny_graph(seed, rng.randint(1, 7))
    stage, stages = 0, []
    for _ in graph.nodes:
        stages.append(stage)
        stage += rng.random() < 0.6
    request = Request(budget_nbytes=some_budget(graph, rng), relative_gap=0.0)
    every, few = solve(graph, request), solve(Graph(nodes=graph.nodes, stage_of=tuple(stages)), request)
    if few.objective is not None:
        assert every.objective is not None
        assert few.objective >= every.objective * (1 - 1e-9)
        assert few.peak_nbytes is not None
        assert few.peak_nbytes <= request.budget_nbytes * (1 + 1e-9)


def test_refuses_stages_that_do_not_ascend() -> None:
    node = Node(name="n", deps=(), nbytes=1, compute_s=1, compute_j=1)
    with pytest.raises(ValueError, match="do not ascend from 0"):
        Graph(nodes=(node, node), stage_of=(0, 2))
    with pytest.raises(ValueError, match="negative size or cost"):
        Node(name="n", deps=(), nbytes=-1, compute_s=1, compute_j=1)
    with pytest.raises(ValueError, match="not only on earlier nodes"):
        Graph(nodes=(Node(name="n", deps=(0,), nbytes=1, compute_s=1, compute_j=1),))


def test_rounds_a_network_on_a_board() -> None:
    graph = poet_graph("linear", "m4")
    rounded = solve_by_rounding(graph, Request(budget_nbytes=4065.6))
    assert rounded.status is Status.ROUNDED
    assert rounded.gap is not None
    assert rounded.gap < 1


def test_a_solver_without_time_says_so() -> None:
    graph = poet_graph("resnet18_cifar", "a72")
    solution = solve(graph, Request(budget_nbytes=1.3e6, time_limit_s=0.01))
    assert solution.status is Status.NONE
    assert solution.schedule is None
    assert solution.gap is None


# -- the transfer planner --------------------------------------------------------------------------


def check_acts(schedule: Schedule, graph: Graph) -> float:
    """Play an execution plan act by act: everything read is there, the bus and the processor do one thing at a time."""
    plan = execution_plan(schedule, graph)
    there_s: dict[int, float] = {}
    flash_s: dict[int, float] = {}
    clocks = {"bus": 0.0, "compute": 0.0}
    for act in plan.acts:
        node = graph.nodes[act.node]
        if act.kind == "free":
            assert act.start_s >= there_s.pop(act.node)
            continue
        clock = "compute" if act.kind == "compute" else "bus"
        assert act.start_s >= clocks[clock] - 1e-9
        clocks[clock] = act.stop_s
        if act.kind == "compute":
            assert all(there_s[dep] <= act.start_s + 1e-9 for dep in node.deps)
            there_s[act.node] = act.stop_s
        elif act.kind == "evict":
            assert there_s[act.node] <= act.start_s + 1e-9
            flash_s[act.node] = act.stop_s
        else:
            assert flash_s[act.node] <= act.start_s + 1e-9
            there_s[act.node] = act.stop_s
    assert plan.duration_s == pytest.approx(max(clocks.values()))
    assert plan.stall_s >= -1e-9
    return plan.duration_s


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_execution_plans_can_be_executed_and_moving_loads_keeps_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    graph = tiny_graph(seed, rng.randint(2, 8))
    request = Request(budget_nbytes=some_budget(graph, rng), recompute=rng.random() < 0.5, relative_gap=0.0)
    schedule = solve(graph, request).schedule
    if schedule is None:
        return
    check_acts(schedule, graph)
    moved = without_contention(schedule, graph, budget_nbytes=request.budget_nbytes)
    check_rules(moved, graph, request)
    check_acts(moved, graph)
    assert moved.load.sum() == schedule.load.sum()


def test_a_load_moves_out_of_a_crowded_stage() -> None:
    """Two outputs are paged; both are needed at the end, and both loads are asked for in one short stage."""
    costs: dict[str, Any] = {"nbytes": 1, "compute_j": 1, "load_j": 1, "evict_j": 1, "evict_s": 1, "load_s": 2}
    deps = [(), (), (), (), (), (0, 1, 4)]
    graph = Graph(nodes=tuple(Node(name=f"n{i}", deps=d, compute_s=2, **costs) for i, d in enumerate(deps)))
    kept = np.zeros((6, 6), dtype=bool)
    kept[1:3, 0] = kept[2, 1] = kept[5, (0, 1, 4)] = True
    load = np.zeros((6, 6), dtype=bool)
    load[4, (0, 1)] = True
    evict = np.zeros((6, 6), dtype=bool)
    evict[1, 0] = evict[2, 1] = True
    stored = np.zeros((6, 6), dtype=bool)
    stored[2:, 0] = stored[3:, 1] = True
    crowded = Schedule(computed=np.eye(6, dtype=bool), kept=kept, stored=stored, load=load, evict=evict)
    assert check_acts(crowded, graph) == pytest.approx(14.0)  # 4 seconds of loads beside 2 of compute
    eased = without_contention(crowded, graph, budget_nbytes=4)
    assert [tuple(np.flatnonzero(row)) for row in eased.load] == [(), (), (), (0,), (1,), ()]
    assert check_acts(eased, graph) == pytest.approx(12.0)
    tight = without_contention(crowded, graph, budget_nbytes=1)
    assert (tight.load == crowded.load).all()


def test_plans_of_a_network_on_a_board_can_be_executed() -> None:
    graph = poet_graph("linear", "m4")
    schedule = solve(graph, Request(budget_nbytes=3388.0, recompute=False)).schedule
    assert schedule is not None
    eased = without_contention(schedule, graph, budget_nbytes=3388.0)
    assert check_acts(eased, graph) <= check_acts(schedule, graph) * (1 + 1e-9)
