"""Which sequences of ops were seen, which have a plan, and which one to expect next."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping
from typing import Any

from ooc.compiled import Compiled
from ooc.recorder import Observed, close_cycle
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Trace

_log = logging.getLogger(__name__)


class Sequences:
    """Learns sequences and plans each that was seen twice.

    A sequence's key is its trace's fingerprint. What follows a sequence is expected to be what
    followed it last time, so shapes that take turns are all played from their plans.
    """

    def __init__(
        self,
        *,
        policy: str,
        parameters: Mapping[str, Any],
        intercepts: Container[Any],
        view_address: int,
    ) -> None:
        self._policy = policy
        self._parameters = dict(parameters)
        self._intercepts = intercepts
        self._view_address = view_address
        self._seen: dict[str, Observed] = {}
        self._plans: dict[str, Compiled] = {}
        self._unplannable: dict[str, str] = {}
        self._followers: dict[str, str] = {}
        self._last_key: str | None = None
        self._last_played = ""
        self.active_key: str | None = None
        self.last_trace: Trace | None = None
        self.last_plan: Plan | None = None
        self.planning_s = 0.0

    def __repr__(self) -> str:
        return f"<Sequences: {len(self._seen)} seen, {len(self._plans)} planned, {len(self._unplannable)} unplannable>"

    @property
    def num_plans(self) -> int:
        """Sequences that have a plan."""
        return len(self._plans)

    @property
    def unplannable(self) -> Mapping[str, str]:
        """Sequences that cannot be planned, with the reason."""
        return self._unplannable

    def learn(self, observed: Observed, machine: Machine) -> str:
        """Note a step that ran on demand; plan its sequence if it was seen before. Returns its key."""
        key = observed.trace.fingerprint()
        earlier = self._seen.get(key)
        self._seen[key] = observed
        if earlier is None or key in self._plans or key in self._unplannable or not observed.trace.ops:
            return key
        started = time.monotonic()
        trace = close_cycle(earlier, observed)
        try:
            plan = make_plan(trace, machine, policy=self._policy, **self._parameters)
        except PlanError as error:
            self._unplannable[key] = str(error)
            _log.warning("this sequence stays on demand: %s", error)
            return key
        self._plans[key] = Compiled(
            trace=trace,
            plan=plan,
            observed=observed,
            view_address=self._view_address,
            intercepts=self._intercepts,
        )
        self.last_trace, self.last_plan = trace, plan
        self.planning_s += time.monotonic() - started
        _log.info("planned %d ops in %.2f s: %s", len(trace.ops), time.monotonic() - started, dict(plan.predicted))
        return key

    def others(self, compiled: Compiled) -> list[Compiled]:
        """All plans but this one."""
        return [plan for plan in self._plans.values() if plan is not compiled]

    def next_after(self, key: str | None) -> Compiled | None:
        """Note that sequence `key` was the last to run; the plan for what should come now, if there is one."""
        if key is None:
            self._last_key = None
            self.active_key = None
            return None
        if self._last_key is not None:
            self._followers[self._last_key] = key
        self._last_key = key
        # A plan that turns out wrong costs little: the step leaves it where it differs, and is
        # recorded whole. So any plan is better than none, the one played last above all others.
        for expected in (self._followers.get(key, key), key, self._last_played):
            if expected in self._plans:
                self.active_key = self._last_played = expected
                return self._plans[expected]
        self.active_key = None
        return None
