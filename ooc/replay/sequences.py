"""Op sequences that were observed, their plans, and the plan to replay in the next step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from ooc.memory.protocols import Store
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_cache import PlanCache
from ooc.replay.predictor import SequencePredictor
from ooc.replay.stoppable import Stopped, stoppable
from ooc.tracing.recorder import Observed, close_cycle, need_nbytes
from ooc.units import format_nbytes
from scheduler.cost.simulate import simulate
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace

_log = logging.getLogger(__name__)

_MAX_SEQUENCES = 64
"""Sequences without a plan that are remembered: a step that is never the same twice must not fill memory."""
_REFINE_AFTER = (3, 8)
"""Steps replayed from a plan after which it is made anew: early, and once more with a better minimum."""
_WORTHWHILE = 0.995
"""A new plan must be predicted to take at most this part of the old one's time: a change is not free."""
_WORTHWHILE_STALL = 0.005
"""Below this part of the step, a stall is no reason to plan anew."""


class Sequences:
    """Learns op sequences, and plans each that was observed twice.

    A sequence's key is its trace's fingerprint. The next one is predicted (`ooc.replay.predictor`), so shapes that take
    turns, and an evaluation every few steps, are all replayed from their plans.

    Args:
        planning: Told the number of ops, is entered while a plan is made.
    """

    def __init__(
        self,
        *,
        policy: str,
        parameters: Mapping[str, Any],
        intercepts: Container[Any],
        view_address: int,
        cache: PlanCache | None = None,
        planning: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._planning = planning
        self._parameters = dict(parameters)
        if "thorough" in POLICIES[policy].parameters:
            self._parameters.setdefault("thorough", False)  # training waits for the plan
        self._intercepts = intercepts
        self._view_address = view_address
        self._seen: dict[str, Observed] = {}
        self._plans: dict[str, ExecutablePlan] = {}
        self._asked: dict[str, Machine] = {}  # what the first plan of each sequence was made for
        self._unplannable: dict[str, str] = {}
        self._predictor = SequencePredictor()
        self._last_played = ""
        self.active_key: str | None = None
        self.last_trace: Trace | None = None
        self.last_plan: Plan | None = None
        self.planning_s = 0.0
        self.last_num_ops: int | None = None
        self.retired: list[ExecutablePlan] = []
        """Plans that will not be replayed again; whoever empties the list gives back what they keep."""

    def __repr__(self) -> str:
        return f"<Sequences: {len(self._seen)} seen, {len(self._plans)} planned, {len(self._unplannable)} unplannable>"

    @property
    def num_plans(self) -> int:
        """Sequences that have a plan."""
        return len(self._plans)

    def largest_need_nbytes(self) -> int:
        """What the worst op seen so far needed at once, in granules (of the sequences that are remembered)."""
        return max((need_nbytes(observed.trace) for observed in self._seen.values()), default=0)

    @property
    def unplannable(self) -> Mapping[str, str]:
        """Sequences that cannot be planned, with the reason."""
        return self._unplannable

    def learn(self, observed: Observed, machine: Machine) -> str:
        """Note a step that ran on demand; plan its sequence if it was seen before. Returns its key."""
        key = observed.trace.fingerprint()
        self.last_num_ops = len(observed.trace.ops)
        earlier = self._seen.pop(key, None)
        self._seen[key] = observed  # last in order: the one seen most recently
        for old in list(self._seen)[:-_MAX_SEQUENCES]:
            if old not in self._plans:
                del self._seen[old]
                self._unplannable.pop(old, None)
        if key in self._plans and not _can_be_bound(self._plans[key], observed):
            # Its parameters were replaced (a load_state_dict by assignment, a new optimizer): the
            # plan waits for variables that will not come back.
            self.retired.append(self._plans.pop(key))
        if earlier is None or key in self._plans or key in self._unplannable or not observed.trace.ops:
            return key
        if not _same_persistent(earlier, observed):
            return key
        started = time.monotonic()
        trace = close_cycle(earlier, observed)
        self._asked[key] = machine
        try:
            with self._planning(len(trace.ops)):
                plan = self._plan(trace, machine)
            executable = self._make_executable(trace, plan, observed)
        except Stopped:
            _log.info("planning was interrupted; it is tried again when this sequence comes again")
            return key
        except PlanError as error:
            self._unplannable[key] = str(error)
            _log.warning("this sequence stays on demand: %s", error)
            return key
        except Exception as error:  # noqa: BLE001 - a fault of the planner's must not end the user's training
            self._unplannable[key] = f"a fault in the planner: {error!r}"
            _log.exception("a fault in the planner; this sequence stays on demand. Please report it")
            return key
        self._plans[key] = executable
        self.last_trace, self.last_plan = trace, plan
        self.planning_s += time.monotonic() - started
        _log.info("planned %d ops in %.2f s: %s", len(trace.ops), time.monotonic() - started, dict(plan.predicted))
        return key

    def _plan(self, trace: Trace, machine: Machine) -> Plan:
        """The plan kept from an earlier run, or a new one, which is kept."""
        _check_unseen(trace)
        if self._cache is not None:
            kept = self._cache.load(trace, machine, self._policy, self._parameters)
            if kept is not None:
                _log.info("this step was planned in an earlier run")
                return kept
        plan = self._make_plan(trace, machine)
        if self._cache is not None:
            self._cache.save(plan, trace, self._parameters)
        return plan

    def _make_plan(self, trace: Trace, machine: Machine) -> Plan:
        return stoppable(lambda: make_plan(trace, machine, policy=self._policy, **self._parameters))

    def _make_executable(self, trace: Trace, plan: Plan, observed: Observed) -> ExecutablePlan:
        return ExecutablePlan(
            trace=trace,
            plan=plan,
            observed=observed,
            view_address=self._view_address,
            intercepts=self._intercepts,
        )

    def forget_plans(self) -> None:
        """The budget has changed: no plan made so far is of use. Each sequence is planned anew when it is next seen."""
        self.retired += self._plans.values()
        self._plans.clear()
        self._asked.clear()
        self._unplannable.clear()
        self.active_key = None

    def refine(self, executable: ExecutablePlan, store: Store) -> ExecutablePlan:
        """Plan anew with the measured times and rates, after a step was replayed whole from this plan.

        The first plan rests on steps that ran on demand and on a store measured while nothing
        computed. So plan again after some steps, and keep the better of the two as simulated with
        what was measured. Returns the plan to go on with; the other is `retired`, once it is left.
        """
        log = executable.timings
        log.note(executable.op_stop_ns - executable.op_start_ns, store)
        if log.num_played not in _REFINE_AFTER or not executable.plan.predicted.get("loaded_nbytes"):
            return executable
        if self._cache is not None and self._cache.is_fixed(executable.plan):
            return executable
        key = next(key for key, plan in self._plans.items() if plan is executable)
        started = time.monotonic()
        machine = log.machine(executable.plan.machine, store)
        trace = log.timed(executable.trace)
        old = simulate(replace(executable.plan, machine=machine), trace, with_timeline=False)
        if old.stall_ns < _WORTHWHILE_STALL * old.duration_ns and not executable.plan.predicted["num_remapped_chunks"]:
            return executable
        try:
            with self._planning(len(trace.ops)):
                plan = self._make_plan(trace, machine)
            old_ns = old.duration_ns + executable.plan.predicted.get("remap_ns", 0)
            _log.info("planned anew: %.4f s a step instead of %.4f s", plan.step_ns / 1e9, old_ns / 1e9)
            if plan.step_ns > old_ns * _WORTHWHILE:
                return executable
            better = self._make_executable(trace, plan, self._seen[key])
        except Stopped:
            return executable
        except PlanError as error:
            _log.warning("cannot plan anew: %s", error)
            return executable
        except Exception:  # noqa: BLE001 - as in learn()
            _log.exception("a fault in the planner; the plan so far stays. Please report it")
            return executable
        finally:
            self.planning_s += time.monotonic() - started
        if self._cache is not None:
            # For the next run to find: it will ask with what it measures when it begins.
            self._cache.save(replace(plan, machine=self._asked[key]), trace, self._parameters)
        better.timings = log
        self._plans[key] = better
        self.retired.append(executable)
        self.last_trace, self.last_plan = trace, plan
        return better

    def others(self, executable: ExecutablePlan) -> list[ExecutablePlan]:
        """All plans but this one."""
        return [plan for plan in self._plans.values() if plan is not executable]

    def next_after(self, key: str | None) -> ExecutablePlan | None:
        """Note that sequence `key` was the last to run; the plan for what should come now, if there is one."""
        if key is None:
            self._predictor.interrupt()
            self.active_key = None
            return None
        self._predictor.note(key)
        # A plan that turns out wrong costs little: the step bails out where it differs, and is
        # recorded whole. So any plan is better than none, the one replayed last above all others.
        for expected in (self._predictor.next(), key, self._last_played):
            if expected is not None and expected in self._plans:
                self.active_key = self._last_played = expected
                return self._plans[expected]
        self.active_key = None
        return None


def _can_be_bound(executable: ExecutablePlan, observed: Observed) -> bool:
    """Whether the variables that live across steps are still those that the plan was made for."""
    return all(
        variable.serial == observed.start_serials[variable.index]
        for variable in executable.variables
        if variable.is_persistent
    )


def _same_persistent(first: Observed, second: Observed) -> bool:
    """Whether what exists throughout a step was the same in both, or changes from step to step anyway.

    If parameters were replaced between the two observations, a third one is needed to know them
    from batches that are new in each step.
    """
    throughout = [
        index
        for index, variable in enumerate(second.trace.variables)
        if variable.birth_tick is None and variable.death_tick is None
    ]
    changed = [index for index in throughout if first.start_serials[index] != second.start_serials[index]]
    return len(changed) * 2 <= len(throughout)


def _check_unseen(trace: Trace) -> None:
    """Raise `PlanError` if what can never be away crosses the cycle's boundary: nobody could take it over."""
    successors = {v.becomes for v in trace.variables}
    for index, v in enumerate(trace.variables):
        comes = trace.cyclic and v.birth_tick is None and index not in successors
        if not v.evictable and (comes or (v.death_tick is None and v.becomes is None)):
            raise PlanError(
                f"variable {index} ({format_nbytes(v.nbytes)}) can never be away, but it "
                f"{'enters' if comes else 'outlives'} the cycle: no op has named it yet, so it may be in use unseen "
                "(memory from another thread, say)."
            )
