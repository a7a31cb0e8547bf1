"""Where one sequence of ops ends and another begins, as the op runner asks for it."""

from __future__ import annotations

from typing import Any, Protocol


class Borders(Protocol):
    """Told of each op that Python sees, before it runs: what begins with it may have a plan."""

    def op_comes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """May end what is recorded or replayed, and enter another plan."""

    def op_differs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A plan was left since this op came instead of another. Whether the step goes on with another plan now."""
