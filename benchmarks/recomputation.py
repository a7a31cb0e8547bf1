"""Overhead of recomputation on the logs that are published with the simulator of dynamic tensor rematerialisation.

    python -m benchmarks.recomputation LOG [LOG ...] [--shares .9,.8,.7,.6,.5,.4,.3] [--chunks 20000]
        [--threshold NBYTES] [--auto] [--remap-ns N]

A log (`*.log`, lines of JSON) is a step of a real network on a GPU: calls with their times, results with their sizes,
releases. It becomes a trace by the simulator's rules: a constant stays from where it appears and counts, an in-place op
makes a new result, views cost nothing, what nobody released is needed at the end. The budget is a share of the trace's
peak. The overhead is the time of all ops that are run, again or not, over that of the ops once. The columns:
`dtr`'s rule ("-": it alone finds nothing, or is the best), the fewest re-runs found, their processor seconds, and with
`--auto` the whole of `auto` for a store that is no use (plans made, coloured and verified) and its processor seconds.
The simulator knows no addresses, so moving a chunk elsewhere costs nothing here, either, unless `--remap-ns` says so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rows import markdown
from scheduler.budget import BudgetTooSmall
from scheduler.plan import Machine, Residency
from scheduler.planning import make_plan
from scheduler.policies._remat_search import fewest_reruns
from scheduler.reruns import reruns_of
from scheduler.trace import Op, Trace, Use, Variable

_NO_STORE_BYTES_PER_S = 1e3


class _Log:
    """Reads a log into a trace; names refer to storages, which the trace calls variables."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines: Iterator[dict[str, Any]] = (json.loads(line) for line in lines)
        self.tick = 1
        self.names: dict[str, int] = {}
        self.nbytes: list[int] = []
        self.references: list[int] = []
        self.constants: set[int] = set()
        self.births: list[int | None] = []
        self.deaths: dict[int, int] = {}
        self.ops: list[Op] = []

    def read(self) -> Trace:
        """All lines, then an op that needs what was not released."""
        for line in self.lines:
            match line["INSTRUCTION"]:
                case "CONSTANT":
                    self.names[line["NAME"]] = self._constant(int(next(self.lines)["MEMORY"]))
                case "CALL":
                    self._call(line)
                case "MUTATE":
                    self._mutate(line)
                case "COPY":
                    self._refer(line["DST"], self.names[line["SRC"]])
                case "COPY_FROM":
                    old = self.names[line["DST"]]
                    self._refer(line["DST"], self.names[line["SRC"]])
                    self._release(old)
                case "RELEASE":
                    if line["NAME"] in self.names:
                        self._release(self.names[line["NAME"]])
        alive = [v for v, born in enumerate(self.births) if born is not None and v not in self.deaths]
        results = [v for v in alive if v not in self.constants]
        self._op("results", 0, results, [], replayable=False)
        for v in alive:
            self._free(v)
        self.tick += 1
        return self._trace()

    def _storage(self, nbytes: int, birth_tick: int | None) -> int:
        self.nbytes.append(nbytes)
        self.references.append(1)
        self.births.append(birth_tick)
        return len(self.nbytes) - 1

    def _constant(self, nbytes: int) -> int:
        """In memory from the start if no op came before, else from here on."""
        v = self._storage(nbytes, self.tick if self.ops else None)
        self.constants.add(v)
        self.tick += 1
        return v

    def _refer(self, name: str, storage: int) -> None:
        self.names[name] = storage
        self.references[storage] += 1

    def _release(self, storage: int) -> None:
        self.references[storage] -= 1
        if not self.references[storage] and storage not in self.constants:
            self._free(storage)

    def _free(self, storage: int) -> None:
        self.deaths[storage] = self.tick
        self.tick += 1

    def _call(self, line: dict[str, Any]) -> None:
        reads = [self.names[name] for name in line["ARGS"]]
        made = []
        for name in line["RESULT"]:
            nbytes, alias = int(next(self.lines)["MEMORY"]), int(next(self.lines)["ALIAS"])
            if alias == -1:
                made.append((name, nbytes))
            else:
                self._refer(name, reads[alias])
        if made or int(line["TIME"]):
            new = self._op(line["NAME"], int(line["TIME"]), reads, [nbytes for _, nbytes in made])
            self.names.update({name: v for (name, _), v in zip(made, new, strict=True)})

    def _mutate(self, line: dict[str, Any]) -> None:
        changed = [line["ARGS"][position] for position in line["MUTATE"]]
        old = [self.names[name] for name in changed]
        reads = [self.names[name] for name in line["ARGS"]]
        new = self._op(line["NAME"], int(line["TIME"]), reads, [self.nbytes[v] for v in old])
        self.names.update(zip(changed, new, strict=True))
        for v in old:
            self._release(v)

    def _op(
        self, name: str, duration_ns: int, reads: Iterable[int], made: Iterable[int], *, replayable: bool = True
    ) -> list[int]:
        start, self.tick = self.tick, self.tick + 1
        new = []
        for nbytes in made:
            new.append(self._storage(nbytes, self.tick))
            self.tick += 1
        self.tick += 1
        uses = [Use(variable=v, reads=True, writes=False) for v in dict.fromkeys(reads)]
        uses += [Use(variable=v, reads=False, writes=True) for v in new]
        self.ops.append(
            Op(
                name=name,
                start_tick=start,
                stop_tick=self.tick,
                duration_ns=duration_ns,
                uses=tuple(uses),
                replayable=replayable,
            )
        )
        return new

    def _trace(self) -> Trace:
        """Without storages of no bytes, which a trace does not know."""
        place = {v: position for position, v in enumerate(v for v, nbytes in enumerate(self.nbytes) if nbytes)}
        variables = tuple(
            Variable(
                nbytes=self.nbytes[v],
                birth_tick=self.births[v],
                death_tick=self.deaths.get(v),
                becomes=None if self.births[v] is not None else position,
                evictable=v not in self.constants,
                kind="parameter" if v in self.constants else "other",
            )
            for v, position in place.items()
        )
        ops = []
        for op in self.ops:
            uses = (use for use in op.uses if use.variable in place)
            kept = tuple(Use(variable=place[u.variable], reads=u.reads, writes=u.writes) for u in uses)
            ops.append(
                Op(
                    name=op.name,
                    start_tick=op.start_tick,
                    stop_tick=op.stop_tick,
                    duration_ns=op.duration_ns,
                    uses=kept,
                    replayable=op.replayable,
                )
            )
        return Trace(ops=tuple(ops), variables=variables, num_ticks=self.tick)


def overhead(proposal: Iterable[Residency], trace: Trace, machine: Machine) -> float:
    """Time of all ops that are run, over that of each once."""
    return 1 + sum(rerun.duration_ns for rerun in reruns_of(proposal, trace, machine)) / trace.duration_ns


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--shares", default=".9,.8,.7,.6,.5,.4,.3")
    parser.add_argument("--chunks", type=int, default=20_000, help="of so many the peak is made; more round less")
    parser.add_argument(
        "--threshold",
        type=int,
        default=0,
        metavar="NBYTES",
        help="smaller results are not planned, as in a session; all of them are taken off the budget (default: 0)",
    )
    parser.add_argument("--auto", action="store_true", help="plan by auto, too")
    parser.add_argument(
        "--remap-ns", type=int, default=0, help="what a chunk that is mapped elsewhere costs (default: 0)"
    )
    arguments = parser.parse_args()
    rows = []
    for log in arguments.logs:
        with log.open() as lines:
            trace = _Log(lines).read()
        for share in map(float, arguments.shares.split(",")):
            machine = _machine(trace, share, arguments)
            planned = _of_at_least(trace, arguments.threshold)
            rows.append(_row(log.stem.partition("-")[0], planned, share, machine, auto=arguments.auto))
            print("\n".join(markdown(_HEAD, rows[-1:]).splitlines()[-1:]), flush=True)


_HEAD = ("step", "ops", "of the peak", "dtr's rule", "fewest re-runs", "CPU s", "auto", "CPU s of auto")


def _machine(trace: Trace, share: float, arguments: argparse.Namespace) -> Machine:
    """A budget of this share of the trace's peak, which `chunks` chunks make, less what is below the threshold."""
    peak_nbytes = trace.peak_nbytes()
    chunk_nbytes = max(peak_nbytes // arguments.chunks, 1)
    small_nbytes = sum(v.nbytes for v in trace.variables if v.nbytes < arguments.threshold)
    return Machine(
        chunk_nbytes=chunk_nbytes,
        num_chunks=int(peak_nbytes * share - small_nbytes) // chunk_nbytes,
        load_bytes_per_s=_NO_STORE_BYTES_PER_S,
        evict_bytes_per_s=_NO_STORE_BYTES_PER_S,
        remap_ns=arguments.remap_ns,
    )


def _of_at_least(trace: Trace, nbytes: int) -> Trace:
    """The trace without smaller variables: they are there whenever an op wants them."""
    kept = [v for v, variable in enumerate(trace.variables) if variable.nbytes >= nbytes]
    place = {v: position for position, v in enumerate(kept)}
    variables = (trace.variables[v] for v in kept)
    return replace(
        trace,
        variables=tuple(v if v.becomes is None else replace(v, becomes=place[v.becomes]) for v in variables),
        ops=tuple(
            replace(op, uses=tuple(replace(u, variable=place[u.variable]) for u in op.uses if u.variable in place))
            for op in trace.ops
        ),
    )


def _row(name: str, trace: Trace, share: float, machine: Machine, *, auto: bool) -> list[str]:
    start_s = time.process_time()
    found = fewest_reruns(trace, machine, wrap=True)
    overheads = [f"{overhead(proposal, trace, machine):.4f}" for proposal in found]
    cells = [overheads[1] if len(overheads) > 1 else "-", overheads[0] if overheads else "-"]
    cells.append(f"{time.process_time() - start_s:.1f}")
    start_s = time.process_time()
    try:
        plan = make_plan(trace, machine, "auto", recompute=True, exact=False) if auto else None
        cells.append(f"{plan.step_ns / trace.duration_ns:.4f}" if plan is not None else "")
    except BudgetTooSmall:
        cells.append("-")
    return [name, str(len(trace.ops)), f"{share:.0%}", *cells, f"{time.process_time() - start_s:.1f}" if auto else ""]


if __name__ == "__main__":
    main()
