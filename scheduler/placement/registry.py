"""The planners by name. All have one signature: `(problem, **options) -> Placement`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from scheduler.placement.problem import Placement, Problem

Planner: TypeAlias = Callable[..., Placement]

_PLANNERS: dict[str, Planner] = {}


def planner(name: str) -> Callable[[Planner], Planner]:
    """Register a planner under `name`."""

    def register(function: Planner) -> Planner:
        if name in _PLANNERS:
            raise ValueError(f"two planners are called {name!r}")
        _PLANNERS[name] = function
        return function

    return register


def planner_names() -> tuple[str, ...]:
    """All planners, in order of registration."""
    return tuple(_PLANNERS)


def place(problem: Problem, planner_name: str, **options: Any) -> Placement:
    """Run a planner by name; `options` are its own keyword arguments.

    Raises:
        ValueError: No planner has this name.
    """
    if planner_name not in _PLANNERS:
        raise ValueError(f"no placement planner {planner_name!r}; there are {', '.join(_PLANNERS)}")
    return _PLANNERS[planner_name](problem, **options)
