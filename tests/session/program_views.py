"""Random programs that hold arrays over the memory of tensors, and read and write through them, and through addresses.

python -m tests.session.program_views --count 500
"""

from __future__ import annotations

import argparse
import ctypes
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.session.program_reruns import counted_reruns, forced_reruns, recomputing, slow_store
from tests.session.program_runs import run_many
from tests.session.program_statements import State, Statement
from tests.session.program_variations import VARIATIONS
from tests.session.programs import Program, generate, run_in_core, run_in_session

_NUM_VIEWS = 4
_MOST_INSERTED = 6
_RESIZING = {"resize", "out_resized"}
"""torch refuses to resize what an array was made of, and has set the tensor's size by then: beyond its memory."""


def _take(state: State, s: Statement) -> None:
    tensor = _tensor(state, s)
    if tensor is not None:
        state.views[s.dst % _NUM_VIEWS] = tensor.numpy()


def _read(state: State, s: Statement) -> None:
    view = state.views.get(s.dst % _NUM_VIEWS)
    if view is not None:
        state.numbers.append(float(np.nan_to_num(view, posinf=1, neginf=1).astype(np.float64).sum()))


def _write(state: State, s: Statement) -> None:
    view = state.views.get(s.dst % _NUM_VIEWS)
    if view is not None and view.size:
        view.flat[s.p % view.size] = s.q / 16 + state.step
        view.flat[view.size // 2 :] = s.q / 32


def _drop(state: State, s: Statement) -> None:
    state.views.pop(s.dst % _NUM_VIEWS, None)


def _pointer(state: State, s: Statement) -> None:
    """Read through an address at once, and write if the statement says so."""
    tensor = _tensor(state, s)
    if tensor is None or not tensor.is_contiguous() or not tensor.numel():
        return
    address = tensor.data_ptr()
    state.numbers.append(float(sum(ctypes.string_at(address, 4 * min(tensor.numel(), 512)))))
    if s.q % 2:
        ctypes.memset(address, s.q % 64, 4 * tensor.numel())


def _tensor(state: State, s: Statement) -> torch.Tensor | None:
    """Of those that the program can name; large ones in three of four cases."""
    found = [
        t for t in state.tensors() if t.dtype is torch.float32 and t.layout is torch.strided and t.device.type == "cpu"
    ]
    large = [t for t in found if t.numel() >= 1024]
    found = large if s.q % 4 and large else found
    return found[s.p % len(found)].detach() if found else None


for _function in (_take, _read, _write, _drop, _pointer):
    VARIATIONS[f"view{_function.__name__}"] = _function


def with_views(program: Program) -> Program:
    """The program, with statements about views at random places of its bodies."""
    r = random.Random(program.seed * 31 + 7)
    kinds = ["view_take", "view_take", "view_read", "view_write", "view_write", "view_drop", "view_pointer"]
    bodies, num_inside = [], []
    for body, inside in zip(program.bodies, program.num_inside, strict=True):
        inside -= sum(s.kind in _RESIZING for s in body[:inside])
        statements = [s for s in body if s.kind not in _RESIZING]
        for _ in range(r.randint(1, _MOST_INSERTED)):
            a, b, dst = (r.randrange(program.num_registers) for _ in range(3))
            place, mask = r.randint(0, len(statements)), 0xFFFF if r.random() < 0.7 else r.getrandbits(16)
            new = Statement(r.choice(kinds), dst, a, b, r.randrange(1 << 12), r.randrange(1 << 8), mask)
            statements.insert(place, new)
            inside += place < inside
        bodies.append(tuple(statements))
        num_inside.append(inside)
    return replace(program, bodies=tuple(bodies), num_inside=tuple(num_inside), fail_call=0)


def run_seed(seed: int) -> dict[str, Any]:
    """Run one seed in this process."""
    program = with_views(generate(seed))
    outcome = run_in_session(program, run_in_core(program))
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks}


def run_recomputing(seed: int) -> dict[str, Any]:
    """Run one seed whose plans run again whatever they may."""
    program = with_views(recomputing(seed))
    with slow_store(), forced_reruns(seed), counted_reruns() as counts:
        outcome = run_in_session(program, run_in_core(program))
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks, "counts": counts}


def main() -> None:
    """Run many, and print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--runner", default="run_seed", help="run_seed, run_recomputing")
    options = parser.parse_args()
    if options.verbose:
        program = with_views(generate(options.seed))
        print(program)
        print(run_in_session(program, run_in_core(program), verbose=True))
        return
    tally = run_many(
        range(options.seed, options.seed + options.count), runner=f"tests.session.program_views:{options.runner}"
    )
    print(tally.num_run, dict(tally.modes), *tally.failures.items(), sep="\n")


if __name__ == "__main__":
    main()
