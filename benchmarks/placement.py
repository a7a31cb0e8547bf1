"""Contiguous placement: height over the bound and seconds, for every planner on every public instance.

Prints tables, and with --json writes one row per figure. Every placement is checked. The figures
in scheduler/placement/README.md come from here:

    python -m benchmarks.placement [--limit SECONDS] [--json FILE] [FILE ...]

FILE is a problem (`.csv`: id,lower,upper,size) or a recorded step (`.json`); default: all public instances.
Seconds are processor time, so that a busy machine counts little; `exact` and `search` stop by it too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.rows import Row, markdown, row, write
from scheduler.placement import (
    Placement,
    Problem,
    in_chunks,
    lower_bound,
    place,
    planner_names,
    problem_from_trace,
    read_problem,
    require_valid,
    rounding_cost,
)
from scheduler.trace import Trace

INSTANCES = Path(__file__).parent.parent / "tests" / "scheduler" / "instances"
PLANNERS = tuple(name for name in planner_names() if name != "chunked")
CHUNKS_PER_PEAK = (1 << 14, 1 << 10, 1 << 7)  # about how many chunks make up the peak; their sizes are powers of two


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="problems or recorded steps")
    parser.add_argument("--limit", type=float, default=30.0, metavar="SECONDS", help="for `exact`, an instance")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows here")
    options = parser.parse_args()
    files = options.files or [*sorted(INSTANCES.glob("minimalloc/[A-Z].*.csv")), *sorted(INSTANCES.glob("somas/*.csv"))]
    rows: list[Row] = []
    heights, seconds, chunks = [], [], []
    for file in files:
        problem = read(file)
        name = f"{file.parent.name}/{file.name.split('.')[0]}"
        results = {planner: measure(problem, planner, options.limit) for planner in PLANNERS}
        bound = lower_bound(problem)
        heights.append([name, len(problem.buffers), bound, *(ratio(results[p][0], bound) for p in PLANNERS)])
        seconds.append([name, *(f"{results[p][1]:.3f}" for p in PLANNERS)])
        for planner, (placement, cpu_s) in results.items():
            note = f"bound proven: {placement.bound} bytes" if planner == "exact" else ""
            rows.append(row(name, planner, "height", "bytes", [placement.height], note=note))
            rows.append(row(name, planner, "height_per_peak_live", "1", [placement.height / bound]))
            rows.append(row(name, planner, "cpu_time", "s", [cpu_s]))
        chunks.append(
            [name, *(rounding(name, problem, power_of_two(bound // count), rows) for count in CHUNKS_PER_PEAK)]
        )
    print("Height / most bytes alive (* proven to be the least)\n")
    print(markdown(("instance", "buffers", "most bytes alive", *PLANNERS), heights))
    print("\nProcessor seconds\n")
    print(markdown(("instance", *PLANNERS), seconds))
    print("\nChunks in any order: what rounding costs at the peak, at about so many chunks to the peak (chunk bytes)\n")
    print(markdown(("instance", *(f"{count:,}" for count in CHUNKS_PER_PEAK)), chunks))
    if options.json is not None:
        write(rows, options.json)


def read(file: Path) -> Problem:
    """A problem file, or a recorded step's variables."""
    return (
        problem_from_trace(Trace.from_json(file.read_text())).problem if file.suffix == ".json" else read_problem(file)
    )


def measure(problem: Problem, planner: str, limit_s: float) -> tuple[Placement, float]:
    """One run, checked, with its processor seconds. The planners are deterministic, so one is enough."""
    limits = {"time_limit_s": limit_s, "clock": time.process_time} if planner == "exact" else {}
    start = time.process_time()
    placement = place(problem, planner, **limits)
    cpu_s = time.process_time() - start
    require_valid(problem, placement)
    return placement, cpu_s


def ratio(placement: Placement, bound: int) -> str:
    return f"{placement.height / bound:.4f}{'*' if placement.is_optimal else ''}"


def power_of_two(nbytes: int) -> int:
    """The largest power of two that is not above `nbytes`, or 1."""
    return 1 << max(nbytes.bit_length() - 1, 0)


def rounding(name: str, problem: Problem, chunk_nbytes: int, rows: list[Row]) -> str:
    """The cost of chunks of this size, with the colouring checked."""
    require_valid(in_chunks(problem, chunk_nbytes), place(problem, "chunked", chunk_nbytes=chunk_nbytes))
    cost = rounding_cost(problem, chunk_nbytes)
    rows.append(row(name, f"chunks of {chunk_nbytes} bytes", "rounding_cost", "1", [cost]))
    return f"{cost:+.2%} ({chunk_nbytes:,})"


if __name__ == "__main__":
    main()
