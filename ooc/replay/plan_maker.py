"""`PlanMaker`: gets a session's plans: kept from an earlier run, made while training waits, or beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ooc.replay.background import BackgroundPlanner
from ooc.replay.executable_plan import check_unseen
from ooc.replay.native_colouring import colour_natively
from ooc.replay.plan_cache import PlanCache
from ooc.replay.stoppable import Stopped, stoppable
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.trace import Trace

_log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

_QUICK: dict[str, Any] = {"policy": "capuchin", "recompute": False, "search_smallest": False}
"""The plan with which training begins where the policy's own takes too long: a third of the time of the quick `auto`.
Of recorded steps of GPT-2, a Lightning loop and timm's ResNet, 355 to 1,580 ops, two came out as `auto`'s, two at 1.01
and 1.17 of its time."""
_NOT_STOOD_IN_FOR = frozenset({_QUICK["policy"], "on_demand"})
"""It is asked for to do without a plan, or is as quick."""
_FOR_THE_REST: dict[str, Any] = {"policy": "auto", "recompute": True, "exact": False, "thorough": False}


class PlanMaker:
    """Makes plans by the session's policy, without lower bounds: who reports a plan adds them.

    Args:
        policy, parameters: As for `make_plan`.
        cache: Plans of earlier runs, and where new ones are kept.
        planning: Told the number of ops, is entered while a plan is made here.
        in_background: Make plans in another process where training would be held up by them.
        moves_first: Whether a step's first plan runs no op again.

    Attributes:
        background: That process.
        planning_s: How long training has waited for plans.
    """

    def __init__(
        self,
        *,
        policy: str,
        parameters: Mapping[str, Any],
        cache: PlanCache | None,
        planning: Callable[[int], AbstractContextManager[None]],
        in_background: bool,
        moves_first: bool,
    ) -> None:
        self._policy = policy
        self._parameters = dict(parameters)
        if "thorough" in POLICIES[policy].parameters:
            self._parameters.setdefault("thorough", False)  # training waits for the plan
        self._planning = planning
        self._has_interim = policy != "auto" and policy not in _NOT_STOOD_IN_FOR
        self._has_quick = self._has_interim or (policy == "auto" and moves_first)
        self.cache = cache
        self.background: BackgroundPlanner | None = None
        colouring = colour_natively()
        if in_background:
            self.background = BackgroundPlanner(
                policy=policy, parameters=self._parameters, has_quick=self._has_quick, colouring=colouring
            )
        self.planning_s = 0.0

    def __repr__(self) -> str:
        return f"<PlanMaker by {self._policy}, {self.planning_s:.2f} s waited for>"

    def may_hold_up(self, trace: Trace) -> bool:
        """Whether training may wait for this step's plan."""
        return self.background is None or self.background.may_hold_up(trace)

    def may_hold_up_quickly(self, trace: Trace) -> bool:
        """Whether training may wait for the quick plan of this step."""
        return self._has_quick and self.background is not None and self.background.may_hold_up(trace, is_quick=True)

    def must_wait(self, trace: Trace) -> bool:
        """Whether no plan of this step can be begun now: another one is being made beside training."""
        if self.background is None or not self.background.is_busy:
            return False
        return not (self.may_hold_up(trace) or self.may_hold_up_quickly(trace))

    def kept(self, trace: Trace, machine: Machine) -> Plan | None:
        """The plan kept from an earlier run, if there is one. Raises `PlanError` if the step cannot be planned."""
        check_unseen(trace)
        kept = self.cache.load(trace, machine, self._policy, self._parameters) if self.cache is not None else None
        if kept is not None:
            _log.info("this step was planned in an earlier run")
        return kept

    def keep(self, plan: Plan, trace: Trace) -> None:
        """Keep a plan for later runs."""
        if self.cache is not None:
            self.cache.save(plan, trace, self._parameters)

    def is_interim(self, plan: Plan) -> bool:
        """Whether a plan stands in for one by the policy that was asked for, and gives way to that whatever it takes.

        Not for one by `auto`: that is asked for the best plan there is.
        """
        return self._has_interim and plan.policy == _QUICK["policy"]

    def is_fixed(self, plan: Plan) -> bool:
        """Whether the plan must not be replaced by a better one: the user has given it, or it stands in for another."""
        return (self.cache is not None and self.cache.is_fixed(plan)) or self.is_interim(plan)

    def here(self, trace: Trace, machine: Machine) -> Plan:
        """A plan for which training waits. Raises `PlanError`, `Stopped`."""
        return self._timed(trace, lambda: self._make(trace, machine), is_quick=False)

    def quickly(self, trace: Trace, machine: Machine) -> Plan | None:
        """A plan for the time until there is a better one, for which training waits shortly; None: there is none.

        Raises:
            Stopped: Ctrl-C.
        """

        def make() -> Plan:
            return stoppable(lambda: make_plan(trace, machine, with_bounds=False, **_QUICK))

        try:
            return self._timed(trace, make, is_quick=True)
        except PlanError:
            return None

    def for_the_rest(self, trace: Trace, machine: Machine) -> Plan:
        """A plan for the rest of a step whose budget has changed. Raises `PlanError`, `Stopped`."""
        started = time.monotonic()
        try:
            return self._make(trace, machine)
        except PlanError:  # by a policy that moves nothing
            return stoppable(lambda: make_plan(trace, machine, with_bounds=False, **_FOR_THE_REST))
        finally:
            self.planning_s += time.monotonic() - started

    def _make(self, trace: Trace, machine: Machine) -> Plan:
        return stoppable(lambda: make_plan(trace, machine, policy=self._policy, with_bounds=False, **self._parameters))

    def _timed(self, trace: Trace, make: Callable[[], Plan], *, is_quick: bool) -> Plan:
        started = time.monotonic()
        try:
            with self._planning(len(trace.ops)):
                return make()
        finally:
            taken_s = time.monotonic() - started
            self.planning_s += taken_s
            if self.background is not None:
                self.background.note_held_up(len(trace.ops), taken_s, is_quick=is_quick)


def attempt(make: Callable[[], _Made]) -> _Made | None:
    """What `make` returns. None where that cannot be, or was interrupted: the plan so far stays."""
    try:
        return make()
    except Stopped:
        pass
    except PlanError as error:
        _log.warning("cannot plan anew: %s", error)
    except Exception:  # noqa: BLE001 - a fault of the planner's must not end the user's training
        _log.exception("a fault in the planner; the plan so far stays. Please report it")
    return None
