"""`FirstPlans`: first plans that are made beside training, and those that a quick plan stands in for meanwhile."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from ooc.replay.background import BackgroundPlanner, PlanRequest
from ooc.replay.elastic import Envelope
from scheduler.plan import Machine


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """What the first plan of a sequence is asked for.

    Attributes:
        key: The sequence.
        headroom: Of the envelope, over the largest sizes seen.
        envelope, machine: What to plan.
    """

    key: str
    headroom: float
    envelope: Envelope
    machine: Machine


class FirstPlans:
    """Asks another process for first plans, one at a time.

    Where a quick plan by another policy stands in for it, nobody would ask again when that process is busy: the
    sequence does not come on demand any more. So such a request waits for its turn here.

    Args:
        background: The process; None: plans are made while training waits, and nothing is asked.
    """

    def __init__(self, background: BackgroundPlanner | None) -> None:
        self._background = background
        self._asked: FirstPlan | None = None
        self._waiting: dict[str, FirstPlan] = {}

    def __repr__(self) -> str:
        return f"<FirstPlans: asked {self._asked is not None}, {len(self._waiting)} waiting>"

    def ask(self, plan: FirstPlan, *, waits: bool) -> None:
        """Have this plan made; with `waits` later, if another one is being made."""
        assert self._background is not None
        request = PlanRequest(key=plan.key, trace=plan.envelope.trace, machine=plan.machine)
        if self._background.ask(request):
            self._asked = plan
        elif waits:
            self._waiting[plan.key] = plan

    def ask_next(self, planned: Container[str]) -> None:
        """Have the plan made that waits longest, if the process is idle and the sequence still has its quick one."""
        if self._waiting and self._background is not None and not self._background.is_busy:
            plan = self._waiting.pop(next(iter(self._waiting)))
            if plan.key in planned:
                self.ask(plan, waits=False)

    def taken(self) -> FirstPlan | None:
        """What was asked for, if what has just been taken is a first plan."""
        asked, self._asked = self._asked, None
        return asked

    def forget(self) -> None:
        """The budget has changed: nothing that was asked for is of use."""
        self._asked = None
        self._waiting.clear()
