"""Plans made in another process: the same plans, taken at a step boundary, and never a process left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ooc
from ooc.replay.background import BackgroundPlanner, PlanRequest
from ooc.replay.elastic import Envelope, Shape
from ooc.replay.first_plans import FirstPlan, FirstPlans
from ooc.replay.sequences import Sequences
from scheduler.plan import Machine, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Trace
from tests.scheduler.random_traces import random_trace

BUDGET = "1536KiB"


@pytest.fixture
def planner() -> Iterator[BackgroundPlanner]:
    planner = BackgroundPlanner(policy="auto", parameters={"thorough": False})
    yield planner
    planner.close()


def _request(num_chunks: int = 64) -> PlanRequest:
    machine = Machine(chunk_nbytes=1 << 16, num_chunks=num_chunks, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    return PlanRequest(key="k", trace=_trace(), machine=machine)


def _trace() -> Trace:
    return random_trace(3)


def _pid(planner: BackgroundPlanner) -> int:
    assert planner._process is not None
    return planner._process.pid


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_the_plan_that_is_made_here(planner: BackgroundPlanner) -> None:
    request = _request()
    assert planner.ask(request)
    assert not planner.ask(request), "one at a time"
    planner.wait()
    taken = planner.take()
    assert taken is not None
    assert taken[0] is request
    expected = make_plan(request.trace, request.machine, policy="auto", with_bounds=False, thorough=False)
    assert taken[1].to_json() == expected.to_json()
    assert planner.take() is None
    assert not planner.is_busy


def test_a_plan_that_cannot_be_had(planner: BackgroundPlanner) -> None:
    planner.ask(_request(num_chunks=1))
    planner.wait()
    with pytest.raises(PlanError, match="budget"):
        planner.take()
    assert planner.ask(_request())


def test_a_process_that_dies(planner: BackgroundPlanner) -> None:
    planner.ask(_request())
    os.kill(_pid(planner), 9)
    planner.wait()
    with pytest.raises(PlanError, match="its process ended with -9"):
        planner.take()


def test_it_is_in_our_session_and_no_key_interrupts_it(planner: BackgroundPlanner) -> None:
    """Where the kernel groups processes by session, its low priority counts only within that."""
    assert planner.ask(_request())
    assert os.getsid(_pid(planner)) == os.getsid(0)
    assert os.getpgid(_pid(planner)) != os.getpgid(0)


def test_closing_leaves_no_process(planner: BackgroundPlanner) -> None:
    planner.ask(_request())
    pid = _pid(planner)
    planner.close()
    assert not _is_running(pid)
    assert not planner.ask(_request())


def test_a_forked_child_leaves_the_parents_process_alone(planner: BackgroundPlanner) -> None:
    planner.ask(_request())
    pid = os.fork()
    if pid == 0:
        planner.become_inherited()
        planner.close()
        os._exit(0)
    os.waitpid(pid, 0)
    planner.wait()
    assert planner.take() is not None


def test_it_ends_with_the_process_that_started_it() -> None:
    """Stopped when its priority is low, before which it has asked the kernel for that: it cannot end by itself."""
    code = (
        "import os, time, tests.replay.test_background as t\n"
        "from scheduler.worker import NICENESS\n"
        "p = t.BackgroundPlanner(policy='auto', parameters={})\n"
        "p.ask(t._request())\n"
        "pid = t._pid(p)\n"
        "while os.getpriority(os.PRIO_PROCESS, pid) < min(19, os.nice(0) + NICENESS): time.sleep(0.001)\n"
        "os.kill(pid, 19)\n"
        "print(pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    for _ in range(2400):
        if not _is_running(pid) or _is_zombie(pid):
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    raise AssertionError("it outlived the process that had started it")


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("has_quick", [False, True])
def test_one_long_plan_leaves_time_for_quick_ones(has_quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 100 s, 5 s may have been waited for plans, half of them for long ones where there are quick ones."""
    clock = [0.0]
    monkeypatch.setattr("ooc.replay.background.time", SimpleNamespace(monotonic=lambda: clock[0]))
    planner = BackgroundPlanner(policy="auto", parameters={}, has_quick=has_quick)
    clock[0], trace = 100.0, _trace()
    planner.note_held_up(len(trace.ops), 2.0)
    assert planner.may_hold_up(trace) is not has_quick
    assert planner.may_hold_up(trace, is_quick=True)
    planner.note_held_up(len(trace.ops), 3.0)
    assert not planner.may_hold_up(trace, is_quick=True)


# -- in a session


def _steps(num_steps: int, session: ooc.Session | None = None) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for number in range(num_steps):
        model(torch.full((256, 192), 0.01 * number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters()))
        background = session.engine.sequences.background if session is not None else None
        if background is not None:
            background.wait()  # so that the same steps are planned wherever this runs
    return found


def test_training_goes_on_on_demand_until_the_plan_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, **__: False)
    expected = _steps(14)
    with ooc.Session(
        BUDGET, debug=True, plan_cache=False, step_boundary="optimizer", background_planning=True
    ) as session:
        assert _steps(14, session) == expected
        modes = [row.mode for row in session.steps.rows]
    assert "planned" in modes[4:7]
    assert modes[-1] == "planned"


def test_the_first_plan_is_a_quick_one_and_a_better_one_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the policy's own plan would hold training up: no step waits for the other process."""
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, is_quick=False: is_quick)
    take = BackgroundPlanner.take
    monkeypatch.setattr(BackgroundPlanner, "take", lambda self: take(self) if session.steps.num_steps > 5 else None)
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE", float("inf"))  # whatever was measured
    monkeypatch.setattr("ooc.replay.sequences._WORTHWHILE_STALL", -1.0)
    expected = _steps(10)
    with ooc.Session(
        BUDGET, debug=True, plan_cache=False, step_boundary="optimizer", background_planning=True
    ) as session:
        assert _steps(10, session) == expected
        modes = [row.mode for row in session.steps.rows]
        plan = session.engine.sequences.last_plan
    assert plan is not None
    assert plan.policy == "auto"
    assert plan.bounds
    assert modes[4:] == ["planned"] * 6


def test_a_wider_plan_that_is_made_beside_training_takes_the_place_of_the_narrower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches that grow beyond what the first plan has room for."""
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, **__: False)

    def steps(session: ooc.Session | None = None) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(192, 192), nn.Tanh())))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for length in [96, 100, 104, 98, 97, 102, *range(200, 220)]:
            model(torch.full((length, 192), 0.01)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session is not None and (background := session.engine.sequences.background) is not None:
                background.wait()
        return [p.detach().clone().numpy().tobytes() for p in model.parameters()]

    expected = steps()
    with ooc.Session(
        BUDGET, debug=True, plan_cache=False, step_boundary="optimizer", background_planning=True
    ) as session:
        assert steps(session) == expected
        rows = list(session.steps.rows)
    assert rows[5].mode == "planned"
    assert [row.mode for row in rows[-12:]] == ["planned"] * 12, [row.why for row in rows]


def test_what_was_planned_wider_here_is_not_given_up_for_what_was_asked_for_before() -> None:
    """A plan that another process makes for fewer sizes than are known when it comes."""
    trace, wider = _trace(), random_trace(4)
    machine = _request().machine
    asked = FirstPlan("k", 1.0, Envelope(trace=trace, elastic=frozenset()), machine, instead_of=None)
    assert asked.still_replaces(None)
    present = SimpleNamespace(trace=wider)
    assert not asked.still_replaces(present)  # type: ignore[arg-type]
    again = FirstPlan("k", 1.0, Envelope(trace=trace, elastic=frozenset()), machine, instead_of=wider.fingerprint())
    assert again.still_replaces(present)  # type: ignore[arg-type]


def test_what_waits_for_its_turn_is_not_learned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one sequence is planned, another that came three times costs nothing but its recording."""
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, **__: False)
    monkeypatch.setattr(BackgroundPlanner, "take", lambda _: None)
    asked: list[int] = []
    envelope, learn = Shape.envelope, Sequences.learn
    learned: list[int] = []
    monkeypatch.setattr(Shape, "envelope", lambda self, *a, **k: asked.append(1) or envelope(self, *a, **k))
    monkeypatch.setattr(Sequences, "learn", lambda self, *a: learned.append(1) or learn(self, *a))
    with ooc.Session(BUDGET, plan_cache=False, background_planning=True) as session:
        weight = torch.zeros(256, 192, requires_grad=True)
        for number in range(24):
            with session.step():
                functions = (torch.tanh, torch.sigmoid, torch.sin)[: 1 + number % 3]
                x = weight * 1.0
                for function in functions:
                    x = function(x)
                x.sum().backward()
                weight.grad = None
    assert len(asked) == 1
    assert len(learned) <= 3 * 3  # of each of three sequences: the first two, and one that asked in vain


def test_a_session_that_closes_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, **__: False)
    with ooc.Session(BUDGET, plan_cache=False, step_boundary="optimizer", background_planning=True) as session:
        _steps(3)
        background = session.engine.sequences.background
        assert background is not None
        assert background.is_busy
        pid = _pid(background)
    assert not _is_running(pid)


def test_a_new_budget_gives_up_the_plan_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, **__: False)
    with ooc.Session(BUDGET, plan_cache=False, step_boundary="optimizer", background_planning=True) as session:
        _steps(3)
        background = session.engine.sequences.background
        assert background is not None
        session.set_budget("3MiB")
        assert not background.is_busy


@pytest.mark.parametrize("policy", ["poet", "window"])
def test_a_quick_plan_stands_in_until_that_of_the_policy_asked_for_is_there(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever that one takes: the user asked for it. Reports and explanations name the one that is played."""
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, is_quick=False: is_quick)
    take = BackgroundPlanner.take
    monkeypatch.setattr(BackgroundPlanner, "take", lambda self: take(self) if session.steps.num_steps > 7 else None)
    expected = _steps(12)
    with ooc.Session(
        BUDGET, debug=True, plan_cache=False, step_boundary="optimizer", background_planning=True, policy=policy
    ) as session:
        assert _steps(12, session) == expected
        rows, report = list(session.steps.rows), session.report()
    assert [row.mode for row in rows[4:]] == ["planned"] * 8
    assert [row.policy for row in rows[4:8]] == ["capuchin"] * 4
    assert [row.policy for row in rows[9:]] == [policy] * 3
    assert report["plan"]["policy"] == policy


def test_a_plan_that_cannot_be_had_is_stood_in_for_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where training waits for it: the sequence stays on demand, and its steps say why."""
    monkeypatch.setattr(BackgroundPlanner, "may_hold_up", lambda *_, is_quick=False: is_quick)

    def take(self: BackgroundPlanner) -> None:
        if self.is_busy and session.steps.num_steps > 6:
            self.cancel()
            raise PlanError("no plan of that policy")

    monkeypatch.setattr(BackgroundPlanner, "take", take)
    expected = _steps(12)
    with ooc.Session(
        BUDGET, debug=True, plan_cache=False, step_boundary="optimizer", background_planning=True, policy="dtr"
    ) as session:
        assert _steps(12, session) == expected
        rows = list(session.steps.rows)
    assert rows[6].policy == "capuchin"
    assert [row.policy for row in rows[9:]] == [""] * 3
    assert "no plan of that policy" in rows[-1].why


def test_a_first_plan_waits_for_its_turn_while_another_stands_in_for_it() -> None:
    asked: list[str] = []

    class Planner:
        is_busy = False

        def ask(self, request: PlanRequest) -> bool:
            if not self.is_busy:
                asked.append(request.key)
                self.is_busy = True
                return True
            return False

    planner = Planner()
    first = FirstPlans(SimpleNamespace(background=planner), lambda _, trace: trace)  # type: ignore[arg-type]
    envelope = Envelope(trace=_trace(), elastic=frozenset(), standing=frozenset())
    plans = {key: FirstPlan(key, 1.0, envelope, _request().machine) for key in "abcd"}
    for key in "abc":
        first.ask(plans[key], waits=True)
    first.ask(plans["d"], waits=False)  # it comes again on demand
    assert asked == ["a"]
    first.ask_next("abc")
    assert asked == ["a"]
    for expected in (["a"], ["a", "c"], ["a", "c"]):  # b has lost its quick plan meanwhile
        planner.is_busy = False
        taken = first.taken()
        assert taken is None or taken.key == asked[-1]
        first.ask_next("ac")
        assert asked == expected


@pytest.mark.parametrize(("policy", "is_slow"), [("poet", True), ("checkmate", True), ("auto", False)])
def test_training_waits_for_no_solver(policy: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: its time is not taken to be that of other policies' plans."""
    clock = [0.0]
    monkeypatch.setattr("ooc.replay.background.time", SimpleNamespace(monotonic=lambda: clock[0]))
    planner = BackgroundPlanner(policy=policy, parameters={}, has_quick=True)
    clock[0] = 3600.0
    assert planner.may_hold_up(_trace()) is not is_slow
    assert planner.may_hold_up(_trace(), is_quick=True)


@pytest.mark.parametrize(("text", "has_planner"), [(None, True), ("1", True), ("0", False), ("off", False)])
def test_where_plans_are_made_if_nobody_says(
    text: str | None, has_planner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv("OOC_BACKGROUND_PLANNING", raising=False)
    else:
        monkeypatch.setenv("OOC_BACKGROUND_PLANNING", text)
    for given, expected in ((None, has_planner), (True, True), (False, False)):
        with ooc.Session(BUDGET, background_planning=given) as session:
            assert (session.engine.sequences.background is not None) == expected
