"""The log of a session's earlier budgets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_NUM_CHANGES_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PastBudget:
    """An earlier budget, and how the steps within it went.

    Attributes:
        num_steps: Steps finished by then.
        budget_nbytes, peak_nbytes: The budget, and the most chunks that held variables under it, in bytes.
    """

    num_steps: int
    budget_nbytes: int
    peak_nbytes: int


class PastBudgets:
    """The newest 1,000 earlier budgets, in order."""

    def __init__(self) -> None:
        self._rows: list[PastBudget] = []

    def __repr__(self) -> str:
        return f"<PastBudgets {len(self._rows)}>"

    def note(self, row: PastBudget) -> None:
        """Append a budget that was just replaced."""
        self._rows.append(row)
        del self._rows[:-_NUM_CHANGES_KEPT]

    def document(self) -> list[dict[str, Any]]:
        """As plain data, for the report."""
        return [asdict(row) for row in self._rows]
