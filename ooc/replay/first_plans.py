"""`FirstPlans`: first plans of sequences, made here, or beside training while a quick one or none stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from ooc.replay.background import PlanRequest
from ooc.replay.elastic import HEADROOM, Envelope, Plannable
from ooc.replay.executable_plan import ExecutablePlan
from ooc.replay.plan_maker import PlanMaker
from scheduler.plan import Machine, Plan, PlanError
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """What the first plan of a sequence, or its first plan for larger sizes or more ops, is asked for.

    Attributes:
        key: The sequence.
        headroom: Of the envelope, over the largest sizes seen.
        envelope, machine: What to plan.
        instead_of: The trace of the narrower plan that it had then, by its fingerprint; None: it had no plan.
    """

    key: str
    headroom: float
    envelope: Envelope
    machine: Machine
    instead_of: str | None = None

    def still_replaces(self, present: ExecutablePlan | None) -> bool:
        """Whether the sequence has no plan, or that which it had when this one was asked for."""
        return present is None or present.trace.fingerprint() == self.instead_of


class FirstPlans:
    """Has first plans made; beside training by another process, which makes one at a time.

    Where a quick plan by another policy stands in for it, nobody would ask again when that process is busy: the
    sequence does not come on demand any more. So such a request waits for its turn here.

    Args:
        maker: Who makes them, and has that process, if there is one.
        applied: A sequence's trace with what is known of its ops (`ProvenOps.applied`).
    """

    def __init__(self, maker: PlanMaker, applied: Callable[[str, Trace], Trace]) -> None:
        self._maker = maker
        self._applied = applied
        self._asked: FirstPlan | None = None
        self._waiting: dict[str, FirstPlan] = {}
        self._without_headroom: set[str] = set()  # sequences for whose headroom there is no room

    def __repr__(self) -> str:
        return f"<FirstPlans: asked {self._asked is not None}, {len(self._waiting)} waiting>"

    def make(
        self, key: str, shape: Plannable, machine: Machine, *, present: ExecutablePlan | None, is_segment: bool
    ) -> tuple[Envelope, Plan, bool] | None:
        """For the largest sizes, with headroom if there is room; is it quick? None: another process makes it.

        Args:
            key: The sequence.
            shape: What was seen of it.
            machine: What to plan for.
            present: The plan that it has.
            is_segment: Whether it is a part of a step.

        Raises:
            PlanError: There is none.
            Stopped: Ctrl-C.
        """
        maker = self._maker
        for headroom in (1.0,) if key in self._without_headroom else (HEADROOM, 1.0):
            envelope = shape.envelope(machine.chunk_nbytes, headroom=headroom, is_segment=is_segment)
            trace = self._applied(key, envelope.trace)
            envelope = replace(envelope, trace=trace)
            try:
                plan = maker.kept(trace, machine)
                if plan is None and not maker.may_hold_up(trace):
                    plan = maker.quickly(trace, machine) if maker.may_hold_up_quickly(trace) else None
                    if plan is None or maker.is_interim(plan):
                        old = present.trace.fingerprint() if present is not None else None
                        self.ask(FirstPlan(key, headroom, envelope, machine, old), waits=plan is not None)
                    return (envelope, plan, True) if plan is not None else None
                return envelope, plan or maker.here(trace, machine), False
            except PlanError:
                if not shape.is_elastic or headroom == 1.0:
                    raise
        return None

    def ask(self, plan: FirstPlan, *, waits: bool) -> None:
        """Have this plan made beside training; with `waits` later, if another one is being made."""
        background = self._maker.background
        assert background is not None
        request = PlanRequest(key=plan.key, trace=plan.envelope.trace, machine=plan.machine)
        if background.ask(request):
            self._asked = plan
        elif waits:
            self._waiting[plan.key] = plan

    def ask_next(self, planned: Container[str]) -> None:
        """Have the plan made that waits longest, if the process is idle and the sequence still has its quick one."""
        background = self._maker.background
        if self._waiting and background is not None and not background.is_busy:
            plan = self._waiting.pop(next(iter(self._waiting)))
            if plan.key in planned:
                self.ask(plan, waits=False)

    def taken(self) -> FirstPlan | None:
        """What was asked for, if what has just been taken is a first plan."""
        asked, self._asked = self._asked, None
        return asked

    def goes_on_without_headroom(self, failed: FirstPlan, shape: Plannable) -> bool:
        """Note that a plan cannot be had. Whether one with less room is to be asked for when its sequence comes."""
        may_go_on = failed.headroom > 1.0 and shape.is_elastic
        if may_go_on:
            self._without_headroom.add(failed.key)
        return may_go_on

    def forget(self) -> None:
        """The budget has changed: nothing that was asked for is of use."""
        self._asked = None
        self._waiting.clear()
        self._without_headroom.clear()
