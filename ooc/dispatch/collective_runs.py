"""Protocol of what becomes of ops that go on after they have returned: collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class CollectiveRuns(Protocol):
    """What becomes of ops that go on after they have returned: `ooc.interop.collectives.Collectives`."""

    @property
    def launches(self) -> list[list[int]]:
        """Of each op that is being launched: ops whose acts come when it is. One list for good."""

    def run(
        self,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run such an op, by `run`."""

    def postpones(self, index: int) -> bool:
        """Whether a planned op's acts after it are not to be done yet."""

    def take_landed(self, op_index: int) -> Sequence[int]:
        """Addresses that the program has waited for since the op before this one."""

    def is_apart(self, nbytes: int) -> bool:
        """Whether an allocation on this thread is none of the session's."""

    def open(self) -> None:
        """From now on the program's own waits are seen."""

    def close(self) -> None:
        """They are seen no more. Idempotent."""

    def settle(self, act: str, *, is_last: bool = False) -> None:
        """Wait for all that is under way, before `act`. Raises `SessionError` if that cannot be waited for."""

    def document(self) -> dict[str, int]:
        """For the report."""
