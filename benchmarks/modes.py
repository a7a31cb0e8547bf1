"""NNTrainer's modes by the clock: VGG16 for CIFAR (the paper's, section 5) with a store held to a card's rate.

    python -m benchmarks.modes [--rate MB/S]... [--rounds N] [--store DIR] [--out DIR]

A step is recorded here, planned by each mode (`scheduler/policies/nntrainer.py`), and each plan is replayed by a
session whose budget is the least that its chunks fit in: the paper's modes know no budget. Beside them ours by `auto`
within the least of these budgets, and stock PyTorch in all the memory that it wants. `predicted` is the simulator's
time for the plan that was replayed. How turns are taken, and what the columns are: `benchmarks.throttled`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.child import BY_PLAN
from benchmarks.rows import Row, markdown, row, write
from benchmarks.throttled import HEADINGS, Throttle, ThrottleUnavailable, lines, rows_of, take_turns
from benchmarks.updates import TimedContestant
from ooc import Session, models
from ooc.cli.trial import TrialOptions, train
from ooc.errors import BudgetTooSmall
from ooc.units import GIB, KIB
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies.nntrainer import Mode
from scheduler.trace import Trace

_WORKLOAD: Final = "vgg16_cifar"
_MODES: Final[tuple[Mode, ...]] = ("proactive", "reduced", "on_demand")
_CHUNK_NBYTES: Final = 256 * KIB
_NUM_STEPS: Final = 6


@cache
def record(budget_nbytes: int) -> Trace:
    """A step, on demand. The budget says into how many parts large ops are split."""
    workload = models.get(_WORKLOAD, "full")
    with Session(budget_nbytes, policy="on_demand", chunk_nbytes=_CHUNK_NBYTES, plan_cache=False) as session:
        for _ in train(workload, num_steps=_NUM_STEPS, optimizer="sgd", seed=0, step_context=session.step):
            pass
        trace = session.trace()
    if trace is None:
        raise RuntimeError(f"{_WORKLOAD}: no two of {_NUM_STEPS} successive steps were the same")
    return trace


def plan_within_least(in_core: Trace, machine: Machine, mode: Mode) -> Plan:
    """A mode's plan, for the least budget that its chunks fit in, and the step as it is within that budget.

    Raises:
        PlanError, ooc.errors.BudgetTooSmall: Half of the machine's memory is not enough for it.
    """
    best = None
    peak = make_plan(in_core, machine, "nntrainer", mode=mode, lookahead=1).predicted["peak_nbytes"]
    num_chunks = machine.chunks_of(peak)
    while best is None or num_chunks < best.machine.num_chunks:
        own = replace(machine, num_chunks=num_chunks)
        try:
            best = make_plan(record(own.budget_nbytes), own, "nntrainer", mode=mode, lookahead=1)
        except (PlanError, BudgetTooSmall):
            if best is not None:
                break
            num_chunks += max(num_chunks // 50, 1)
            if num_chunks > machine.num_chunks // 2:
                raise
        else:
            num_chunks = machine.chunks_of(best.predicted["peak_nbytes"])
    return best


def measure(plans: Mapping[Mode, Plan], throttle: Throttle, *, rounds: int, store: Path) -> list[TimedContestant]:
    """Stock, each mode, and ours within the least budget among theirs, stepped by turns."""
    least = min(plan.machine.budget_nbytes for plan in plans.values())
    trial = TrialOptions(workload=_WORKLOAD, optimizer="sgd", num_steps=0, budget_nbytes=least, store=str(store))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def contestant(name: str, variant: str, is_limited: bool = True) -> TimedContestant:
            command = [sys.executable, "-m", "benchmarks.child", variant, json.dumps(asdict(trial))]
            own = TimedContestant(name, throttle.command(command) if is_limited else command)
            return stack.enter_context(closing(own))

        own = [contestant("stock", "stock", is_limited=False)]
        for mode, plan in plans.items():
            path = folder / f"{mode}.json"
            path.write_text(plan.to_json())
            own.append(contestant(mode, f"{BY_PLAN}{path}"))
        own.append(contestant("ours", "ours"))
        take_turns(own, rounds)
    return own


def main() -> int:
    """Run the modes at each rate, print a table, write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", action="append", type=int, metavar="MB/S", help="each way (default: 100)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each mode (default: 2)")
    parser.add_argument("--store", type=Path, default=Path("/var/tmp"), help="disk for the store (default: /var/tmp)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where the rows go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # control groups are removed then, too
    os.environ["OOC_PLAN_CACHE"] = "off"
    options.out.mkdir(parents=True, exist_ok=True)
    trace = record(2 * GIB)
    plenty = 2 * -(-trace.peak_nbytes() // _CHUNK_NBYTES)
    rows: list[Row] = []
    is_good = True
    for rate in options.rate or (100,):
        rates = {"load_bytes_per_s": rate * 1e6, "evict_bytes_per_s": rate * 1e6}
        machine = Machine(chunk_nbytes=_CHUNK_NBYTES, num_chunks=plenty, **rates)
        plans = {mode: plan_within_least(trace, machine, mode) for mode in _MODES}
        name = f"VGG16 by NNTrainer's modes, {rate} MB/s each way"
        try:
            with Throttle(options.store, rate * 10**6) as throttle:
                load = os.getloadavg()[0]
                own = measure(plans, throttle, rounds=options.rounds, store=options.store)
        except ThrottleUnavailable as reason:
            rows.append(row(name, "ours", "time a step", "s", [], note=str(reason)))
            print(f"## {name}\n\nNot measured: {reason}.\n", flush=True)
        else:
            needed = {mode: plan.machine.budget_nbytes for mode, plan in plans.items()}
            needed["stock"] = trace.peak_nbytes()
            found = lines(own, needed, min(needed.values()), rate)
            rows += rows_of(name, own)
            failures = [f"{each.inner.variant}: {each.inner.failure}" for each in own if each.inner.failure]
            is_good = is_good and not failures and all(line[-1] != "OTHER LOSSES" for line in found)
            print(f"## {name}\n\nLoad before and after: {load:.1f}, {os.getloadavg()[0]:.1f}.\n", flush=True)
            print(f"{markdown(HEADINGS, found)}\n", *failures, sep="\n", flush=True)
        write(rows, options.out / "modes.jsonl")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
