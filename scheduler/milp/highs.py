"""A linear or mixed-integer program put together column by column, and solved by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Columns:
    """Variables of the program. All lie in [0, 1] unless said otherwise."""

    count: int = 0
    constant: float = 0.0
    upper: list[npt.NDArray[np.float64]] = field(default_factory=list)
    whole: list[npt.NDArray[np.int64]] = field(default_factory=list)
    fixed: list[tuple[npt.NDArray[np.int64], float]] = field(default_factory=list)
    floors: list[tuple[int, float]] = field(default_factory=list)
    costs: list[tuple[npt.NDArray[np.int64], float]] = field(default_factory=list)

    def add(self, count: int, *, upper: float = 1.0, whole: bool = False) -> npt.NDArray[np.int64]:
        self.upper.append(np.full(count, upper))
        self.whole.append(np.full(count, int(whole), dtype=np.int64))
        self.count += count
        return np.arange(self.count - count, self.count, dtype=np.int64)

    def fix(self, columns: npt.NDArray[np.int64], upper: float) -> None:
        self.fixed.append((columns, upper))

    def floor(self, column: int, lower: float) -> None:
        """Raise a column's lower bound from 0."""
        self.floors.append((column, lower))

    def set_cost(self, columns: npt.NDArray[np.int64], cost: float) -> None:
        self.costs.append((columns, cost))

    def assemble(self) -> tuple[Any, Any, Any, Any]:
        """Cost, lower and upper bound, and integrality of each column; the last is the constant."""
        cost, upper = np.zeros(self.count + 1), np.concatenate([*self.upper, [1.0]])
        for columns, limit in self.fixed:
            upper[columns] = limit
        for columns, value in self.costs:
            cost[columns] = value
        lower = np.zeros(self.count + 1)
        for column, limit in self.floors:
            lower[column] = limit
        lower[-1], cost[-1] = 1.0, self.constant
        return cost, lower, upper, np.concatenate([*self.whole, [0]])


@dataclass
class Rows:
    """Constraints of the program: `lower <= sum of coefficient times column <= upper`."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[Any, float]], *, lower: float = -np.inf, upper: float = np.inf) -> None:
        for column, value in terms:
            self.row.append(len(self.lower))
            self.column.append(int(column))
            self.value.append(value)
        self.lower.append(lower)
        self.upper.append(upper)

    def assemble(self, num_columns: int) -> tuple[Any, Any, Any]:
        from scipy.sparse import csr_matrix

        shape = (len(self.lower), num_columns + 1)
        matrix = csr_matrix((self.value, (self.row, self.column)), shape=shape)
        return matrix, np.array(self.lower), np.array(self.upper)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What HiGHS made of columns and rows, in the columns' units.

    Attributes:
        is_optimal: To the gap that was asked for; `is_infeasible`: proven. Neither: a limit struck.
        was_cut_off: The limit that struck was the one in seconds.
        values: Of the columns; None where it found none.
        objective, bound: With the constant part.
    """

    is_optimal: bool
    is_infeasible: bool
    was_cut_off: bool
    values: npt.NDArray[np.float64] | None
    objective: float | None
    bound: float | None


def run_highs(
    columns: Columns,
    rows: Rows,
    *,
    relative_gap: float,
    node_limit: int | None,
    time_limit_s: float | None,
    relaxed: bool = False,
) -> Answer:
    """HiGHS's answer; `relaxed` lets every column be a fraction.

    Raises:
        RuntimeError: The solver failed for a reason other than infeasibility or a limit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    matrix, lower, upper = rows.assemble(columns.count)
    cost, low, high, whole = columns.assemble()
    options: dict[str, float] = {"mip_rel_gap": relative_gap}
    if time_limit_s is not None:
        options["time_limit"] = time_limit_s
    if node_limit is not None:
        options["node_limit"] = node_limit
    result = milp(
        c=cost,
        constraints=LinearConstraint(matrix, lower, upper),
        bounds=Bounds(low, high),
        integrality=np.zeros_like(whole) if relaxed else whole,
        options=options,
    )
    # scipy knows no status for a limit in nodes, which HiGHS calls a solution limit.
    if result.status not in (0, 1, 2) and "solution limit" not in str(result.message).lower():
        raise RuntimeError(f"HiGHS gave up with status {result.status}: {result.message}")
    bound = result.fun if relaxed else getattr(result, "mip_dual_bound", None)
    return Answer(
        is_optimal=result.status == 0,
        is_infeasible=result.status == 2,
        was_cut_off=result.status == 1,
        values=result.x,
        objective=None if result.x is None else float(result.fun),
        bound=None if bound is None or not np.isfinite(bound) else float(bound),
    )
