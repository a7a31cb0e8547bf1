"""What is done right before and right after an op of a plan (`ooc.replay.acts` does it, or native/acts.h)."""

from __future__ import annotations

from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from ooc.replay.planned_reruns import PlannedRerun


class Before:
    """The actions right before an op, in this order."""

    __slots__ = ("arrivals", "births", "loads", "releases", "rerun")

    def __init__(self) -> None:
        self.releases: list[ExecutableResidency] = []  # written earlier; from now on only in the store
        self.loads: list[ExecutableResidency] = []  # start now
        self.arrivals: list[ExecutableResidency] = []  # loads that the op waits for
        self.rerun: PlannedRerun | None = None  # ops that are run again
        self.births: list[ExecutableResidency] = []  # allocations of the op


class After:
    """The actions right after an op, in this order."""

    __slots__ = ("discards", "drops", "dirties", "writes")

    def __init__(self) -> None:
        self.dirties: list[PlanVariable] = []  # the op made the store's copy stale
        self.writes: list[ExecutableResidency] = []  # start now
        self.drops: list[ExecutableResidency] = []
        self.discards: list[ExecutableResidency] = []
