"""Planners side by side: every policy on recorded steps of eight models, over a sweep of budgets.

    python -m benchmarks.planners [--models vgg16,gpt] [--points N] [--profile NAME] [--preset full] [--json FILE]

Steps are recorded on fake tensors when the benchmark runs, so they are the same everywhere: nothing here
is measured but planning time (processor seconds). Times are simulated, with the device's profile; every plan is
checked by `scheduler.verify`. Budgets go evenly from the least that works to what the step needs in core.

A time includes that of remaps. `auto` may run ops again, as the policies can that do nothing else.

After the tables come the claims, each with the cases that break it: no plan is below a bound; `auto` is at no
budget slower than any other policy; its time never grows with the budget; it is within 5 % of the bound at half of
the in-core peak, or at the least budget that works where that is more.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.rows import Row, markdown, row, write
from ooc import models
from ooc.cli.arguments import machine_for
from ooc.tracing.fake_tensors import FakeRecording
from scheduler.compare import Outcome, budgets_between, compare, sweep
from scheduler.plan import Machine
from scheduler.policies import POLICIES
from scheduler.profiles import Profile, load_profile
from scheduler.trace import Trace

MODELS = ("vgg16", "resnet18", "resnet50", "mobilenet_v2", "unet", "bert", "gpt", "lstm")
SMALL_THRESHOLD_NBYTES = 4096
"""For the small presets, most of whose tensors are below a session's 64 KiB."""
_MOST_STEPS = 8
_SAME = 1.0001
"""Times that differ by less are the same: 0.01 %."""
_CLOSE = 0.05
"""What `auto` must be within, of the bound at half of the in-core peak."""

Points = tuple[tuple[int, tuple[Outcome, ...]], ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAMES", help="with commas")
    parser.add_argument("--policies", default=",".join(sorted(POLICIES)), metavar="NAMES", help="with commas")
    parser.add_argument("--points", type=int, default=5, metavar="N", help="budgets (default: 5)")
    parser.add_argument("--profile", default="desktop", metavar="NAME", help="device (default: desktop)")
    parser.add_argument("--preset", default="full", choices=models.PRESETS)
    parser.add_argument("--cache", type=Path, default=None, metavar="DIR", help="where recorded steps are kept")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows here")
    options = parser.parse_args()
    profile, policies = load_profile(options.profile), tuple(options.policies.split(","))
    cache = options.cache or Path(tempfile.gettempdir()) / "ooc-recorded-steps"
    cache.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    broken: list[str] = []
    halves = []
    for name in options.models.split(","):
        trace = recorded(name, options.preset, profile, cache)
        machine = machine_for(profile, max(trace.peak_nbytes(), 1), None)
        points = sweep(trace, machine, budgets_between(trace, machine, options.points), policies, profile=profile)
        scenario = f"{name} {options.preset} on {profile.name}"
        print(f"\n{scenario}: {len(trace.ops)} ops, {len(trace.variables)} variables; ms a step (over the bound)\n")
        print(time_table(points, machine, policies), flush=True)
        rows += rows_of(scenario, points, machine)
        broken += broken_claims(scenario, points)
        half, over = half_of_peak(name, trace, machine, rows)
        halves.append(half)
        if over > _CLOSE:
            broken.append(f"{scenario}, half of the peak: auto is {over:.2%} above the bound")
    print("\n`auto` at half of the in-core peak\n")
    print(markdown(("model", "ops", "of the peak", "ms a step", "over the bound", "planned in, CPU s"), halves))
    print("\nClaims that do not hold:" if broken else "\nEvery claim holds.")
    for line in broken:
        print(f"- {line}")
    if options.json is not None:
        write(rows, options.json)
    return 1 if broken else 0


def recorded(name: str, preset: models.Preset, profile: Profile, cache: Path) -> Trace:
    """A step of the workload, from the cache if it was recorded before with this torch."""
    file = cache / f"{name}-{preset}-{profile.name}-torch{torch.__version__}.json.gz"
    if file.exists():
        return Trace.from_json(gzip.decompress(file.read_bytes()).decode())
    trace = record(name, preset, profile)
    file.write_bytes(gzip.compress(trace.to_json().encode(), mtime=0))
    return trace


def record(name: str, preset: models.Preset, profile: Profile) -> Trace:
    """Record a step of the workload on fake tensors."""
    return record_workload(models.get(name, preset), profile)


def record_workload(workload: models.Workload, profile: Profile) -> Trace:
    """Record a step of any workload on fake tensors."""
    small = {"threshold_nbytes": SMALL_THRESHOLD_NBYTES} if workload.preset == "small" else {}
    recording = FakeRecording(profile, **small)
    with recording:
        torch.manual_seed(0)
        model = workload.build()
        optimizer = workload.make_optimizer(model)
        for index in range(_MOST_STEPS):
            loss = workload.loss(model, workload.make_batch(index))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss
            if recording.boundary(optimizer, model):
                break
    if recording.trace is None:
        raise RuntimeError(f"{workload.name}: no two of {_MOST_STEPS} successive steps were the same")
    return recording.trace


def time_table(points: Points, machine: Machine, policies: Sequence[str]) -> str:
    """A row a budget, a column a policy."""
    body = []
    for count, outcomes in points:
        bound = next((o.plan.bounds["duration_ns"] for o in outcomes if o.plan is not None), None)
        cells = [
            "x" if o.plan is None else f"{o.duration_ns / 1e6:.1f} (+{o.duration_ns / (bound or 1) - 1:.1%})"
            for o in outcomes
        ]
        body.append([f"{count * machine.chunk_nbytes / 2**20:.0f} MiB", *cells])
    return markdown(("budget", *policies), body)


def rows_of(scenario: str, points: Points, machine: Machine) -> Iterator[Row]:
    """The figures of one sweep."""
    for count, outcomes in points:
        for o in outcomes:
            where = f"{scenario}, {count * machine.chunk_nbytes} bytes"
            if o.plan is None:
                yield row(where, o.policy, "step_time", "s", [], note=o.reason.splitlines()[0])
                continue
            note = f"plan of {o.carried_from_nbytes} bytes" if o.carried_from_nbytes is not None else ""
            yield row(where, o.policy, "step_time", "s", [o.duration_ns / 1e9], note=note)
            yield row(where, o.policy, "bound", "s", [o.plan.bounds["duration_ns"] / 1e9])
            yield row(where, o.policy, "moved", "bytes", [o.moved_nbytes])
            yield row(where, o.policy, "remapped", "chunks", [o.plan.predicted["num_remapped_chunks"]])


def broken_claims(scenario: str, points: Points) -> Iterator[str]:
    """What should hold and does not, one line each."""
    before: Outcome | None = None
    for count, outcomes in points:
        planned = [o for o in outcomes if o.plan is not None]
        for o in planned:
            assert o.plan is not None
            for bounded in ("duration_ns", "loaded_nbytes", "evicted_nbytes"):
                if o.plan.predicted[bounded] < o.plan.bounds[bounded]:
                    yield f"{scenario}, {count} chunks: {o.policy} is below the bound of {bounded}"
        auto = next((o for o in planned if o.policy == "auto"), None)
        if auto is None:
            continue
        for o in planned:
            assert o.plan is not None
            if o.duration_ns * _SAME < auto.duration_ns:
                by = auto.duration_ns / o.duration_ns - 1
                yield f"{scenario}, {count} chunks: auto is {by:.2%} slower than {o.policy}"
        if before is not None and before.duration_ns * _SAME < auto.duration_ns:
            yield f"{scenario}, {count} chunks: auto is slower than with less memory"
        before = auto


def half_of_peak(name: str, trace: Trace, machine: Machine, rows: list[Row]) -> tuple[list[str], float]:
    """`auto` at half of what the step needs in core: the table's row, and how far it is above the bound."""
    most = budgets_between(trace, machine, 2)
    half = replace(machine, num_chunks=max(most[-1] // 2, most[0]))
    started = time.process_time()
    (outcome,) = compare(trace, half, ("auto",))
    cpu_s = time.process_time() - started
    assert outcome.plan is not None, outcome.reason
    over = outcome.duration_ns / outcome.plan.bounds["duration_ns"] - 1
    share = half.num_chunks / most[-1]
    rows.append(row(f"{name}, half of peak", "auto", "over_bound", "1", [over]))
    rows.append(row(f"{name}, half of peak", "auto", "planning_time", "s", [cpu_s], note=f"{len(trace.ops)} ops"))
    cells = [
        name,
        str(len(trace.ops)),
        f"{share:.0%}",
        f"{outcome.duration_ns / 1e6:.1f}",
        f"{over:+.2%}",
        f"{cpu_s:.1f}",
    ]
    return cells, over


if __name__ == "__main__":
    raise SystemExit(main())
