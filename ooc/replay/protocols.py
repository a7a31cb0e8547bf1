"""Protocol of what the executor needs of the native dispatcher, which matches a step's ops against the plan's."""

from __future__ import annotations

from typing import Any, Protocol


class PlanDispatcher(Protocol):
    """Runs the ops of the installed plan; `ooc.dispatch.extension` builds it, from C++."""

    @property
    def cursor(self) -> int:
        """Index of the planned op that comes next."""

    def install(self, *arguments: Any) -> None:
        """Match ops against a plan from now on. Takes `ExecutablePlan.install_arguments`: torch ops, and addresses."""

    def start(self, index: int) -> None:
        """Op `index` comes next."""

    def leave(self) -> None:
        """Match ops against no plan any more."""
