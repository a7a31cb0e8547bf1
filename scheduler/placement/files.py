"""Problems and placements as CSV in minimalloc's form: `id,lower,upper,size`, with `offset` in a solution.

`upper` is exclusive. (Files that call it `end` and count it in are another dialect and are refused by name.)
"""

from __future__ import annotations

import csv
from pathlib import Path

from scheduler.placement.problem import Buffer, Placement, Problem

_COLUMNS = ("id", "lower", "upper", "size")


class PlacementFileError(ValueError):
    """A file that is not a placement problem; says which line and why."""


def read_problem(path: Path, *, alignment: int = 1, capacity: int | None = None) -> Problem:
    """Read a problem.

    Raises:
        PlacementFileError: A column is missing, or a line is not a buffer.
    """
    buffers = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise PlacementFileError(f"{path}: no column {missing}; needed are {list(_COLUMNS)}, upper exclusive")
        for row in rows:
            try:
                buffer = Buffer(
                    nbytes=int(row["size"]), start=int(row["lower"]), stop=int(row["upper"]), name=row["id"]
                )
            except (TypeError, ValueError) as error:
                raise PlacementFileError(f"{path}, line {rows.line_num}: {error}") from error
            buffers.append(buffer)
    return Problem(buffers=tuple(buffers), alignment=alignment, capacity=capacity)


def write_problem(path: Path, problem: Problem, placement: Placement | None = None) -> None:
    """Write a problem, with an `offset` column if there is a placement in one piece each.

    A buffer without a name is written under its index.

    Raises:
        ValueError: The placement has buffers in several pieces, which the form cannot say.
    """
    if placement is not None and placement.runs is not None:
        raise ValueError(f"a placement by {placement.planner!r} lies in pieces; this form has one offset a buffer")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*_COLUMNS, "offset") if placement is not None else _COLUMNS)
        for index, b in enumerate(problem.buffers):
            row = (b.name or str(index), b.start, b.stop, b.nbytes)
            writer.writerow((*row, placement.offsets[index]) if placement is not None else row)
