"""How long planning takes: processor seconds of `auto`, as a training run asks for it, and of `window`, on long steps.

    python -m benchmarks.planning_time [--ops N] [--shapes transformer,conv] [--shares 1,.5,0] [--searched] [--python]

The steps are made up (see `SHAPES`), of about so many ops each, in the shape of real ones. Budgets are shares of what
a step needs in core, and never below the least that works. Every plan is checked by `scheduler.verify`.

The table has, for each shape and budget: the chunks; processor seconds of `make_plan` with `auto`, without bounds; the
time of the planned step over its bound; its remaps; and processor seconds of `window` with a given length, its schedule
alone. With `--searched` also those of `make_plan` with `window`, which searches for the length. With `--python` plans
are coloured without native code, as where it cannot be compiled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from benchmarks.rows import markdown
from ooc.replay.native_colouring import colour_natively
from scheduler.cost.bounds import lower_bounds
from scheduler.garbage import without_collections
from scheduler.plan import Machine
from scheduler.planning import make_plan
from scheduler.policies import window
from scheduler.trace import Op, Trace, Use, Variable

MIB = 1 << 20
CHUNK_NBYTES = 2 * MIB
_WINDOW_SHARE = 0.25
_REPEATS = 3
"""Of a schedule alone; the least time counts."""


class _Step:
    """Writes a step op by op: what each op reads and changes, what it makes, what is freed after it."""

    def __init__(self) -> None:
        self._tick = 0
        self._ops: list[Op] = []
        self._nbytes: list[int] = []
        self._births: dict[int, int] = {}
        self._deaths: dict[int, int] = {}

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    def carried(self, nbytes: int) -> int:
        """A variable that lives from step to step."""
        self._nbytes.append(nbytes)
        return len(self._nbytes) - 1

    def op(
        self, duration_ns: int, reads: tuple[int, ...], *made_nbytes: int, changes: tuple[int, ...] = ()
    ) -> list[int]:
        """Run an op; returns what it makes."""
        start, self._tick = self._tick, self._tick + 1
        uses = [Use(variable=v, reads=True, writes=v in changes) for v in reads]
        made = []
        for nbytes in made_nbytes:
            v = self.carried(nbytes)
            self._births[v] = self._tick
            self._tick += 1
            uses.append(Use(variable=v, reads=False, writes=True))
            made.append(v)
        self._tick += 1
        name = f"op{len(self._ops)}"
        op = Op(name=name, start_tick=start, stop_tick=self._tick, duration_ns=max(duration_ns, 1), uses=tuple(uses))
        self._ops.append(op)
        return made

    def free(self, *variables: int) -> None:
        for v in variables:
            self._deaths[v] = self._tick
            self._tick += 1

    def trace(self) -> Trace:
        variables = tuple(
            Variable(
                nbytes=nbytes,
                birth_tick=self._births.get(v),
                death_tick=self._deaths.get(v),
                becomes=None if v in self._deaths else v,
            )
            for v, nbytes in enumerate(self._nbytes)
        )
        return Trace(ops=tuple(self._ops), variables=variables, num_ticks=self._tick + 1)


_Tape = list[tuple[int, int, int | None, int]]
"""For each op of the forward pass: what it reads, what it makes, its weight, and its nanoseconds."""


def _forward(s: _Step, input_nbytes: int, ops: Iterable[tuple[int | None, int, int]]) -> _Tape:
    """A chain of ops, each with its weight, its nanoseconds, and the size of what it makes."""
    (x,) = s.op(1_000_000, (), input_nbytes)
    tape: _Tape = []
    for weight, ns, nbytes in ops:
        (y,) = s.op(ns, (x,) if weight is None else (x, weight), nbytes)
        tape.append((x, y, weight, ns))
        x = y
    return tape


def transformer(num_ops: int) -> Trace:
    """Layers of nine ops with four weights, of width 512, and AdamW."""
    layers, rows, width = num_ops // 22, 4096, 512
    act, scores = rows * width * 4, 16 * 8 * 256 * 256 * 4
    weight_nbytes = [width * width * 4 * factor for factor in (3, 1, 4, 4)]
    s = _Step()
    weights = [[s.carried(nbytes) for nbytes in weight_nbytes] for _ in range(layers)]
    states = {w: (s.carried(n), s.carried(n)) for own in weights for w, n in zip(own, weight_nbytes, strict=True)}
    # What each op of a layer makes, in activations of the width, and its weight.
    shape = (
        (act, None),
        (3 * act, 0),
        (scores, None),
        (act, None),
        (act, 1),
        (act, None),
        (4 * act, 2),
        (4 * act, None),
    )
    shape = (*shape, (act, 3))
    ops = [
        (None, nbytes // 5, nbytes) if which is None else (own[which], rows * weight_nbytes[which] // 400, nbytes)
        for own in weights
        for nbytes, which in shape
    ]
    return _backward(s, _forward(s, act, ops), states)


def convolutions(num_ops: int) -> Trace:
    """Convolution, batch norm and ReLU, over and over: large activations, small weights, SGD with momentum."""
    blocks, act, weight_nbytes = num_ops // 7, 32 * MIB, 2 * MIB
    s = _Step()
    weights = [s.carried(weight_nbytes) for _ in range(blocks)]
    states = {w: (s.carried(weight_nbytes),) for w in weights}
    ops = [(weight, ns, act) for w in weights for weight, ns in ((w, 40_000_000), (None, 3_000_000), (None, 3_000_000))]
    return _backward(s, _forward(s, act, ops), states)


def recurrent(num_ops: int) -> Trace:
    """One cell unrolled: the same two weights at every op of both passes, small activations kept to the end."""
    cells, act, weight_nbytes = num_ops // 4, 3 * MIB, 64 * MIB
    s = _Step()
    weights = [s.carried(weight_nbytes) for _ in range(2)]
    states = {w: (s.carried(weight_nbytes),) for w in weights}
    tape = _forward(s, act, [(weights[index % 2], 2_000_000, act) for index in range(2 * cells)])
    return _backward(s, tape, states)


def tiny_ops(num_ops: int) -> Trace:
    """Very many short ops on two hundred variables, which take turns."""
    s = _Step()
    carried = [s.carried((1 + index % 7) * 4 * MIB) for index in range(200)]
    for index in range(num_ops):
        read, changed = carried[index * 7 % 200], carried[(index * 13 + 5) % 200]
        s.op(200_000, (read, changed) if read != changed else (read,), changes=(changed,))
    return s.trace()


def _backward(s: _Step, tape: _Tape, states: Mapping[int, tuple[int, ...]]) -> Trace:
    """The backward ops of what is on the tape, in reverse, then the optimizer's."""
    made_nbytes = s._nbytes
    (gradient,) = s.op(1_000_000, (tape[-1][1],), made_nbytes[tape[-1][1]])
    gradients: dict[int, int] = {}
    for x, y, w, ns in reversed(tape):
        new_nbytes = [made_nbytes[x]] + ([made_nbytes[w]] if w is not None and w not in gradients else [])
        changes = (gradients[w],) if w in gradients else ()
        reads = (gradient, x, y) if w is None else (gradient, x, y, w, *changes)
        new, *of_weight = s.op(2 * ns, reads, *new_nbytes, changes=changes)
        if w is not None and of_weight:
            gradients[w] = of_weight[0]
        s.free(gradient, y)
        gradient = new
    s.free(gradient, tape[0][0])
    for w, g in gradients.items():
        s.op(made_nbytes[w] // 5, (w, g, *states[w]), changes=(w, *states[w]))
    s.free(*gradients.values())
    return s.trace()


SHAPES: dict[str, Callable[[int], Trace]] = {
    "transformer": transformer,
    "convolutions": convolutions,
    "recurrent": recurrent,
    "tiny_ops": tiny_ops,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=10_000, metavar="N", help="of each step, about (default: 10000)")
    parser.add_argument("--shapes", default=",".join(SHAPES), metavar="NAMES", help="with commas")
    parser.add_argument("--shares", default="1,.7,.5,.4,.3,.2,.1,0", metavar="SHARES", help="of the peak, with commas")
    parser.add_argument("--searched", action="store_true", help="also search the length of the window")
    parser.add_argument("--python", action="store_true", help="colour without native code")
    options = parser.parse_args()
    if not options.python and colour_natively() is None:
        raise SystemExit("the colouring cannot be compiled. Options: --python; a C++ compiler.")
    titles = ["step", "of the peak", "chunks", "auto, CPU s", "over the bound", "remaps", "window's schedule, CPU s"]
    print(markdown([*titles, *(["window, searched, CPU s"] if options.searched else [])], []))
    for shape in options.shapes.split(","):
        trace = SHAPES[shape](options.ops)
        machine = Machine(chunk_nbytes=CHUNK_NBYTES, num_chunks=1)
        bounds = lower_bounds(trace, machine)
        for share in map(float, options.shares.split(",")):
            nbytes = max(int(bounds["in_core_nbytes"] * share), bounds["smallest_budget_nbytes"])
            there = replace(machine, num_chunks=nbytes // CHUNK_NBYTES)
            cells = [f"{shape} ({len(trace.ops)} ops)", f"{share:.0%}", *_measured(trace, there, options.searched)]
            print("| " + " | ".join(cells) + " |", flush=True)


def _measured(trace: Trace, machine: Machine, searched: bool) -> list[str]:
    start = time.process_time()
    plan = make_plan(trace, machine, "auto", thorough=False, with_bounds=False)
    auto_s = time.process_time() - start
    bound_ns = lower_bounds(trace, machine)["duration_ns"]
    schedule_s = []
    with without_collections():
        for _ in range(_REPEATS):
            start = time.process_time()
            window.schedule(trace, machine, window_nbytes=int(machine.budget_nbytes * _WINDOW_SHARE))
            schedule_s.append(time.process_time() - start)
    cells = [f"{machine.num_chunks}", f"{auto_s:.1f}", f"{plan.step_ns / bound_ns - 1:+.2%}"]
    cells += [f"{plan.predicted['num_remapped_chunks']}", f"{min(schedule_s):.3f}"]
    if searched:
        start = time.process_time()
        make_plan(trace, machine, "window")
        cells.append(f"{time.process_time() - start:.1f}")
    return cells


if __name__ == "__main__":
    main()
