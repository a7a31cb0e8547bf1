"""The policies by name: functions `schedule(trace, machine, **parameters) -> residencies`.

A policy decides when each variable is in memory, not where; `scheduler.planning.make_plan` adds
chunks, checks and predictions. To add one, write its module and name it in `POLICIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from scheduler.plan import Machine, Residency
from scheduler.policies import (
    auto,
    capuchin,
    checkmate,
    dtr,
    lms,
    melon,
    nntrainer,
    on_demand,
    poet,
    sublinear,
    vdnn,
    window,
)
from scheduler.trace import Trace

Schedule: TypeAlias = Callable[..., tuple[Residency, ...]]
Tune: TypeAlias = Callable[[Trace, Machine, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy's function, and what it says about itself.

    Attributes:
        name: What users and plans call it.
        schedule: The function: `schedule(trace, machine, **parameters) -> residencies`.
        tune: Completes the parameters that the user left open; None if there is nothing to complete.
    """

    name: str
    schedule: Schedule
    tune: Tune | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the keyword parameters that `schedule` takes."""
        kinds = inspect.signature(self.schedule).parameters.values()
        return tuple(p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(name="auto", schedule=auto.schedule),
        Policy(name="capuchin", schedule=capuchin.schedule),
        Policy(name="checkmate", schedule=checkmate.schedule),
        Policy(name="dtr", schedule=dtr.schedule),
        Policy(name="lms", schedule=lms.schedule, tune=lms.tune),
        Policy(name="melon", schedule=melon.schedule),
        Policy(name="nntrainer", schedule=nntrainer.schedule, tune=nntrainer.tune),
        Policy(name="on_demand", schedule=on_demand.schedule),
        Policy(name="poet", schedule=poet.schedule),
        Policy(name="sublinear", schedule=sublinear.schedule, tune=sublinear.tune),
        Policy(name="vdnn", schedule=vdnn.schedule, tune=vdnn.tune),
        Policy(name="window", schedule=window.schedule, tune=window.tune),
    )
}
