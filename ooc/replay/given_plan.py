"""A plan from a file (`ooc run --plan`), replayed instead of planning the step that it was made for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ooc.replay.plan_cache import PlanCache
from ooc.units import format_nbytes
from scheduler.cost.simulate import simulate
from scheduler.plan import Machine, Plan, PlanError
from scheduler.renaming import is_renamed
from scheduler.trace import Trace
from scheduler.verify import verify

_log = logging.getLogger(__name__)


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file.

    Raises:
        ValueError: Not readable, not a plan, or of another version.
    """
    try:
        plan = Plan.from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the plan {path}: {error}") from error
    except PlanError as error:
        raise ValueError(f"{path}: {error}") from error
    return plan


class GivenPlan(PlanCache):
    """A plan cache that returns the given plan for its own step, and what the cache behind it has for every other.

    Attributes:
        plan: The given one.
        refusal: Why it was not used when a step was last planned; empty if it was.
    """

    def __init__(self, plan: Plan, behind: PlanCache | None) -> None:
        self.plan = plan
        self.behind = behind
        self.num_hits = 0
        self.refusal = "no step was planned yet"

    def __repr__(self) -> str:
        return f"<GivenPlan of {self.plan.policy}, {self.refusal or 'played'}>"

    def load(self, trace: Trace, machine: Machine, policy: str, parameters: Mapping[str, Any]) -> Plan | None:
        """The given plan, checked, with predictions for `machine`, if it is for this step; else the cache's."""
        refusal = self._why_not(trace, machine)
        if refusal:
            if self.num_hits == 0:
                self.refusal = refusal
                _log.warning("the given plan is not played: %s", refusal)
            return self.behind.load(trace, machine, policy, parameters) if self.behind is not None else None
        self.refusal = ""
        self.num_hits += 1
        plan = replace(self.plan, machine=machine)
        result = simulate(plan, trace, with_timeline=False)
        predicted = {**plan.predicted, "duration_ns": result.duration_ns, "stall_ns": result.stall_ns}
        return replace(plan, predicted=predicted, bounds={})

    def save(self, plan: Plan, trace: Trace, parameters: Mapping[str, Any]) -> None:
        """Keep a plan of another step."""
        if self.behind is not None:
            self.behind.save(plan, trace, parameters)

    def is_fixed(self, plan: Plan) -> bool:
        """Whether this is the given plan, which is replayed as it is, whatever its chunks are called."""
        return is_renamed(plan, self.plan)

    def _why_not(self, trace: Trace, machine: Machine) -> str:
        """Why the plan is not for this step on this machine; empty if it is."""
        own = self.plan.machine
        if (own.num_chunks, own.chunk_nbytes) != (machine.num_chunks, machine.chunk_nbytes):
            return (
                f"it was made for {own.num_chunks} chunks of {format_nbytes(own.chunk_nbytes)}, and the session has "
                f"{machine.num_chunks} of {format_nbytes(machine.chunk_nbytes)}"
            )
        if self.plan.trace_fingerprint != trace.fingerprint():
            return (
                "this step is another one than it was made for. Options: record the step with 'ooc trace' (not --fake) "
                f"and --budget {own.budget_nbytes}, and plan that"
            )
        try:
            verify(self.plan, trace)
        except PlanError as error:
            return str(error)
        return ""
