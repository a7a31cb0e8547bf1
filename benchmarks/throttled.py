"""Training in half and a third of the memory with a slow store: a disk held to a card's rate by a control group.

    python -m benchmarks.throttled [--case NAME]... [--rate MB/S]... [--share 1/N]... [--rounds N] [--out DIR]

Four ways to train take turns of a few steps, each in a process of its own: stock PyTorch, checkpointing by block (both
in all the memory they want), ours by paging alone (`recompute=False`), and ours as it is by default. The budget is a
share of the step's in-core peak, as a session with room for all of it counts. Where parameters and gradients alone are
more than that, something must move whatever runs again, and two more train with the optimizer inside the backward
pass: checkpointing, and ours. What stock and checkpointing need is in the column `needs`. All of ours are in a `blkio`
control group (version 1) that limits the disk to a rate each way; that needs root, and a store that is opened with
O_DIRECT. Where there is none, the rows say why. Losses are compared bit for bit.

`--policy NAME` adds ours by another policy, with re-runs: papers' policies (`melon`, `vdnn`, `sublinear`, `poet`,
`nntrainer`, ...) by the clock, beside what the simulation says of the same plan (`predicted`).

Energy is worked out, not measured: a Raspberry Pi's watts (`rpi4`, POET's figures) for computing and for bytes on their
way, with this machine's times. Waiting costs nothing in that model.

A busy machine computes slower and transfers as fast as ever, which flatters whoever waits for the store. So the load
before and after is printed, and CPU times beside times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import BY_POLICY, CHECKPOINT_IN_BACKWARD, IN_BACKWARD, PAGING_ONLY, needed_nbytes
from benchmarks.rows import Row, markdown, row, write
from benchmarks.updates import TimedContestant
from ooc import models
from ooc.cli.memory_group import ControlGroup
from ooc.cli.trial import TrialOptions, run_trial
from ooc.units import GIB, MIB, format_nbytes
from scheduler.policies import POLICIES
from scheduler.profiles import load_profile

VARIANTS = ("stock", "checkpoint", PAGING_ONLY, "ours", CHECKPOINT_IN_BACKWARD, IN_BACKWARD)
_LEARNING_STEPS = 7
"""Learned, planned, tried, planned anew; what is not so far by then is not so far in the table."""
_TURN_STEPS = 3
_IN_CORE = ("stock", "checkpoint", CHECKPOINT_IN_BACKWARD)
_ORDERED_ANEW = (CHECKPOINT_IN_BACKWARD, IN_BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload that moves enough to wait for a card, and ends in a minute or two."""

    name: str
    workload: str
    sizes: Mapping[str, Any]


CASES = (
    Case(name="conv stack", workload="conv_stack", sizes={"batch_size": 8}),
    Case(name="ResNet-50", workload="resnet50", sizes={"batch_size": 4, "image_side": 128}),
    Case(name="MobileNetV2", workload="mobilenet_v2", sizes={"batch_size": 2}),
    Case(name="encoder", workload="encoder", sizes={"batch_size": 4}),
)


class ThrottleUnavailable(RuntimeError):
    """No disk can be limited here; the message says why."""


class Throttle(ControlGroup):
    """A blkio control group that limits the disk under `folder` to a rate each way. `close()` removes it."""

    def __init__(self, folder: Path, bytes_per_s: int, root: Path = Path("/sys/fs/cgroup/blkio")) -> None:
        if not (root / "cgroup.procs").exists():
            raise ThrottleUnavailable(f"no control groups of version 1 for disks at {root}")
        self.directory = root / f"ooc-throttle-{os.getpid()}-{bytes_per_s}"
        disk = _disk_of(folder)
        try:
            self.directory.mkdir()
            for way in ("read", "write"):
                (self.directory / f"blkio.throttle.{way}_bps_device").write_text(f"{disk} {bytes_per_s}")
        except OSError as error:
            self.close()
            raise ThrottleUnavailable(f"cannot limit disk {disk} by {self.directory}: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"<Throttle {self.directory}>"


def _disk_of(folder: Path) -> str:
    """`major:minor` of the disk that holds `folder`: limits are of whole disks."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = Path("/sys/dev/block", number)
    if not entry.exists():
        raise ThrottleUnavailable(f"{folder} is on no disk ({number} is no block device)")
    return (entry.resolve().parent / "dev").read_text().strip() if (entry / "partition").exists() else number


@contextlib.contextmanager
def _contestants(
    case: Case, budget_nbytes: int, variants: Sequence[str], throttle: Throttle, store: Path
) -> Iterator[list[TimedContestant]]:
    with ExitStack() as stack:
        own = []
        for variant in variants:
            trial = _trial(case, store, None if variant in _IN_CORE else budget_nbytes)
            command = [sys.executable, "-m", "benchmarks.child", variant, json.dumps(asdict(trial))]
            one = TimedContestant(variant, command if variant in _IN_CORE else throttle.command(command))
            own.append(stack.enter_context(closing(one)))
        yield own


def _trial(case: Case, store: Path, budget_nbytes: int | None, num_steps: int = 0) -> TrialOptions:
    return TrialOptions(
        workload=case.workload,
        sizes=case.sizes,
        optimizer="sgd",
        num_steps=num_steps,
        budget_nbytes=budget_nbytes,
        store=str(store),
    )


def peak_nbytes(case: Case, store: Path) -> int:
    """What a step of the case has in memory at once, in core, as a session counts."""
    return int(run_trial(_trial(case, store, 2 * GIB, num_steps=3)).report["peak_nbytes"])


def gradients_nbytes(case: Case) -> int:
    """All gradients together: as many bytes as all parameters."""
    model = models.get(case.workload, "full", **case.sizes).build()
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def measure(
    case: Case, budget_nbytes: int, throttle: Throttle, *, variants: Sequence[str], rounds: int, store: Path
) -> list[TimedContestant]:
    """All variants, stepped by turns."""
    with _contestants(case, budget_nbytes, variants, throttle, store) as own:
        take_turns(own, rounds)
    return own


def take_turns(own: Sequence[TimedContestant], rounds: int) -> None:
    """Let all of them learn, then take a few counted steps each, by turns."""
    for each in own:
        is_in_core = each.inner.variant in _IN_CORE
        each.take_turn(2 if is_in_core else _LEARNING_STEPS, is_counted=False)
    for _ in range(rounds):
        for each in own:
            each.take_turn(_TURN_STEPS, is_counted=True)


def joules(duration_s: float, step: Mapping[str, Any] | None, rate: int) -> float:
    """What a step takes by `rpi4`'s watts. `step`: of a session's report; None: all of it computes. `rate`: MB/s."""
    energy = load_profile("rpi4").require_energy()
    if step is None:
        return duration_s * energy.compute_w
    waiting_s = min(step["stall_s"], duration_s)
    moving_w_s = step["loaded_nbytes"] * energy.load_w + step["evicted_nbytes"] * energy.evict_w
    return (duration_s - waiting_s) * energy.compute_w + waiting_s * energy.idle_w + moving_w_s / (rate * 1e6)


def _steps(each: TimedContestant) -> list[Mapping[str, Any]]:
    """Those after learning."""
    return list(each.inner.report.get("steps", ()))[_LEARNING_STEPS:]


def _settled_at(each: TimedContestant) -> str:
    """The first step, from 1, from which on each ran the same number of ops again, as a plan says."""
    steps = each.inner.report.get("steps", ())
    if not steps:
        return "-"
    last = steps[-1]["num_reruns"]
    first = len(steps)
    while first and steps[first - 1]["mode"] == "planned" and steps[first - 1]["num_reruns"] == last:
        first -= 1
    return str(first + 1)


def _median(steps: Sequence[Mapping[str, Any]], *keys: str) -> float:
    return statistics.median(sum(step[key] for key in keys) for step in steps)


def lines(own: Sequence[TimedContestant], needed: Mapping[str, int], budget_nbytes: int, rate: int) -> list[list[str]]:
    """One for each variant."""
    stock = own[0]
    stock_j = joules(statistics.median(stock.inner.samples), None, rate) if stock.inner.samples else 0.0
    found = []
    for each in own:
        inner, steps = each.inner, _steps(each)
        cells = [inner.variant]
        if not inner.samples or not stock.inner.samples:
            found.append([*cells, *["-"] * 10, (inner.failure or "no step").splitlines()[0]])
            continue
        median_s = statistics.median(inner.samples)
        cells += [f"{median_s:.3f}", f"{median_s / statistics.median(stock.inner.samples):.2f}"]
        cells.append(f"{statistics.median(each.cpu_s) / statistics.median(stock.cpu_s):.2f}")
        of_each = [joules(step["duration_s"], step, rate) for step in steps] or [joules(median_s, None, rate)]
        cells.append(f"{statistics.median(of_each) / stock_j:.2f}")
        cells.append(format_nbytes(needed.get(inner.variant, budget_nbytes)))
        if steps:
            predicted_s = (inner.report.get("plan") or {}).get("predicted", {}).get("duration_ns", 0) / 1e9
            cells += [
                f"{_median(steps, 'stall_s') / _median(steps, 'duration_s'):.0%}",
                format_nbytes(int(_median(steps, "loaded_nbytes", "evicted_nbytes"))),
                f"{_median(steps, 'num_reruns'):.0f}",
                f"{predicted_s:.3f} s, {predicted_s / _median(steps, 'duration_s'):.2f}",
                _settled_at(each),
            ]
        else:
            cells += ["-"] * 5
        is_equal = inner.losses == stock.inner.losses[: len(inner.losses)] or (
            inner.losses[: len(stock.inner.losses)] == stock.inner.losses
        )
        found.append([*cells, "losses equal" if is_equal else "OTHER LOSSES"])
    return found


HEADINGS = (
    "variant",
    "s a step",
    "time / stock",
    "CPU / stock",
    "energy / stock",
    "needs",
    "waiting",
    "moved a step",
    "re-runs",
    "predicted, / actual",
    "settled at step",
    "",
)


def _least_moved(gradients_nbytes: int, excess_nbytes: int, rate: int) -> str:
    """What a step moves at least if all gradients are there before the first update, and none is made twice.

    When the last gradient is there, all others and all parameters are alive, and used by updates to come: what is not
    in memory then comes in after that, while next to nothing computes. All of it changes in each step, so it went out.
    """
    return (
        f"Parameters and gradients are {format_nbytes(2 * gradients_nbytes)}: where updates follow the backward pass, "
        f"at least {format_nbytes(excess_nbytes)} move out and in again, and each step waits for "
        f"{excess_nbytes / rate / 1e6:.2f} s less what its updates take."
    )


def rows_of(name: str, own: Sequence[TimedContestant]) -> list[Row]:
    """Times and bytes of each, for programs."""
    rows = []
    for each in own:
        inner, steps = each.inner, _steps(each)
        rows.append(row(name, inner.variant, "time a step", "s", inner.samples, note=inner.failure))
        rows.append(row(name, inner.variant, "CPU time a step", "s", each.cpu_s))
        for key, unit in (("stall_s", "s"), ("loaded_nbytes", "B"), ("evicted_nbytes", "B"), ("num_reruns", "1")):
            if steps:
                rows.append(row(name, inner.variant, key, unit, [step[key] for step in steps]))
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="TEXT", help="only those whose name holds TEXT")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only these, and stock")
    parser.add_argument("--policy", action="append", default=[], choices=POLICIES, help="ours by this policy, too")
    parser.add_argument("--rate", action="append", type=int, metavar="MB/S", help="each way (default: 100 and 40)")
    parser.add_argument("--share", action="append", type=int, metavar="N", help="1/N of the peak (default: 2 and 3)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant (default: 2)")
    parser.add_argument("--store", type=Path, default=Path("/var/tmp"), help="disk for the store (default: /var/tmp)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where the rows go")
    return parser.parse_args()


def main() -> int:
    """Run the cases, print tables, write rows."""
    options = _parse()
    # So that control groups are removed on `timeout` and `kill`, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["OOC_PLAN_CACHE"] = "off"  # a plan kept from another rate would be the first one
    options.out.mkdir(parents=True, exist_ok=True)
    variants = [v for v in VARIANTS if v == "stock" or not options.variant or v in options.variant]
    variants += [f"{BY_POLICY}{name}" for name in options.policy]
    rows: list[Row] = []
    is_equal = True
    for case in CASES:
        if options.case and not any(text.lower() in case.name.lower() for text in options.case):
            continue
        peak, gradients = peak_nbytes(case, options.store), gradients_nbytes(case)
        needed = {v: needed_nbytes(v, _trial(case, options.store, None)) for v in _IN_CORE if v in variants}
        for rate in options.rate or (100, 40):
            for share in options.share or (2, 3):
                budget_nbytes = peak // share // MIB * MIB
                name = f"{case.name}, {format_nbytes(budget_nbytes)} (1/{share}), {rate} MB/s each way"
                excess_nbytes = max(2 * gradients - budget_nbytes, 0)
                ours = [v for v in variants if excess_nbytes or v not in _ORDERED_ANEW]
                try:
                    with Throttle(options.store, rate * 10**6) as throttle:
                        load = os.getloadavg()[0]
                        own = measure(
                            case, budget_nbytes, throttle, variants=ours, rounds=options.rounds, store=options.store
                        )
                except ThrottleUnavailable as reason:
                    rows.append(row(name, "ours", "time a step", "s", [], note=str(reason)))
                    print(f"## {name}\n\nNot measured: {reason}.\n", flush=True)
                else:
                    found = lines(own, needed, budget_nbytes, rate)
                    rows += rows_of(name, own)
                    is_equal = is_equal and all(line[-1] != "OTHER LOSSES" for line in found)
                    conditions = f"Load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}."
                    if excess_nbytes:
                        conditions += " " + _least_moved(gradients, excess_nbytes, rate)
                    print(f"## {name}\n\n{conditions}\n\n{markdown(HEADINGS, found)}\n", flush=True)
                write(rows, options.out / "throttled.jsonl")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
