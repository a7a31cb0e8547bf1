"""The papers' claims, made again in simulation: one command, a table each, and which of them hold here.

    python -m benchmarks.claims [--only NAMES] [--json FILE]

Steps are recorded on fake tensors with a device profile's times, so nothing here is measured. A claim is an order
("A before B") that a paper reports; what does not hold is printed as such, with the figures that say so, and the
exit code is then 1. Batch norm may run again in the tables of recomputation, as the papers assume; a recorded step
forbids it, because it changes the running statistics.

| name | claim |
|---|---|
| batch | at growing batch `window` trains what `lms` and `vdnn` cannot, or faster (the paper's ResNet-50 table) |
| addressing | chunks of any order need less memory than a best-fit caching allocator; the smaller, the less |
| modes | NNTrainer, VGG16: memory on_demand ~ reduced < proactive < none; time none < proactive < reduced, on_demand |
| pool | Melon's lifetime-aware pool wastes less than a layout on demand |
| melon | Melon is faster than vDNN and Sublinear on MobileNetV2 and SqueezeNet where the store is slow |
| poet | paging with recomputation uses at most the energy of paging only, recomputing only, Capuchin and DTR, in time |
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.planners import record_workload
from benchmarks.rows import Row, markdown, row, write
from benchmarks.squeezenet import squeezenet
from ooc import models
from ooc.cli.arguments import machine_for
from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.planned import replay_chunked
from ooc.fragmentation.read_trace import read_trace as read_stream
from ooc.fragmentation.settings import CachingSettings
from ooc.units import KIB, MIB
from scheduler.compare import Outcome, compare
from scheduler.placement import lower_bound, place, problem_from_trace
from scheduler.plan import Machine, PlanError
from scheduler.planning import make_plan
from scheduler.profiles import energy_j, load_profile
from scheduler.trace import Trace

_SAME = 1.0001
"""Times and energies that differ by less are the same."""
_DEADLINES_AT = 0.75
"""The share of the in-core peak at which POET's claim is looked at within deadlines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One claim's figures, and what of it does not hold."""

    title: str
    head: tuple[str, ...]
    body: Sequence[Sequence[object]]
    broken: Sequence[str]
    rows: Sequence[Row] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CLAIMS), metavar="NAMES", help="with commas")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows here")
    options = parser.parse_args()
    rows: list[Row] = []
    broken: list[str] = []
    for name in options.only.split(","):
        for table in CLAIMS[name]():
            print(f"\n{name}: {table.title}\n")
            print(markdown(table.head, table.body), flush=True)
            broken += [f"{name}: {line}" for line in table.broken]
            rows += table.rows
    print("\nDoes not hold:" if broken else "\nEvery claim holds.")
    for line in broken:
        print(f"- {line}")
    if options.json is not None:
        write(rows, options.json)
    return 1 if broken else 0


@cache
def step(name: str, preset: models.Preset, device: str, batch_size: int | None = None, free: bool = False) -> Trace:
    """A recorded step; with `free`, every op may run again."""
    sizes = {} if batch_size is None else {"batch_size": batch_size}
    workload = squeezenet(preset) if name == "squeezenet" else models.get(name, preset, **sizes)
    trace = record_workload(workload, load_profile(device))
    return replace(trace, ops=tuple(replace(op, replayable=True) for op in trace.ops)) if free else trace


def machine_at(trace: Trace, device: str, share: float) -> Machine:
    """The device with a share of what the step needs in core."""
    machine = machine_for(load_profile(device), max(trace.peak_nbytes(), 1), None)
    return replace(machine, num_chunks=int(machine.num_chunks * share))


def batch() -> Iterator[Table]:
    """Images a second at growing batch, under the budget that the smallest batch needs in core."""
    policies = ("lms", "vdnn", "window", "auto")
    base = 16
    budget = step("resnet50", "full", "pcie3", base).peak_nbytes()
    body, rows = [], []
    for size in (base, 2 * base, 4 * base, 6 * base, 8 * base):
        trace = step("resnet50", "full", "pcie3", size)
        machine = machine_for(load_profile("pcie3"), budget, None)
        outcomes = compare(trace, machine, policies, recompute=False)
        body.append([size, *(_per_s(o, size) for o in outcomes)])
        for o in outcomes:
            rate = [] if o.plan is None else [size / (o.duration_ns / 1e9)]
            rows.append(row(f"resnet50, batch {size}, {budget} bytes", o.policy, "images", "1/s", rate))
    last = {o.policy: o for o in outcomes}
    broken = [*_slower(f"batch {size}", last, "window", ("lms", "vdnn")), *_slower("", last, "auto", policies)]
    title = f"ResNet-50 on pcie3, images/s by batch, within the {budget / MIB:.0f} MiB of batch {base} in core"
    yield Table(title=title, head=("batch", *policies), body=body, broken=broken, rows=rows)


def _per_s(o: Outcome, size: int) -> str:
    return "x" if o.plan is None else f"{size / (o.duration_ns / 1e9):.1f}"


def addressing() -> Iterator[Table]:
    """What an allocator reserves over what is alive at the peak, by chunk size."""
    sizes = (64 * KIB, 2 * MIB, 20 * MIB)
    body, rows, broken = [], [], []
    for name in ("resnet50", "mobilenet_v2", "unet", "bert"):
        (stream,) = read_stream(step(name, "full", "pcie3").to_json())
        alive = int(stream.live_nbytes.max())
        found = {"best fit": replay_caching(stream, None, CachingSettings(), name="best_fit")}
        for nbytes in sizes:
            found[f"{nbytes // KIB} KiB"] = replay_chunked(stream, None, nbytes, name="chunked")
        shares = {key: int(replay.reserved_nbytes.max()) / alive - 1 for key, replay in found.items()}
        body.append([name, f"{alive / MIB:.0f} MiB", *(f"{share:+.1%}" for share in shares.values())])
        rows += [row(name, key, "reserved_over_alive", "1", [share]) for key, share in shares.items()]
        chunked = list(shares.values())[1:]
        if chunked != sorted(chunked):
            broken.append(f"{name}: a larger chunk reserves less")
        if shares["best fit"] < chunked[1]:
            broken.append(f"{name}: best fit reserves {shares['best fit']:+.1%}, chunks of 2 MiB {chunked[1]:+.1%}")
    head = ("model", "alive at the peak", "best-fit caching", *(f"chunks of {n // KIB} KiB" for n in sizes))
    yield Table(title="reserved beyond what is alive at the peak", head=head, body=body, broken=broken, rows=rows)


def modes() -> Iterator[Table]:
    """NNTrainer's modes on its VGG16, where the store is a board's flash card."""
    trace = step("vgg16_cifar", "full", "rpi4")
    machine = machine_at(trace, "rpi4", 2.0)  # the modes know no budget
    found = {"none": make_plan(trace, machine, "on_demand")}
    for mode in ("proactive", "reduced", "on_demand"):
        found[mode] = make_plan(trace, machine, "nntrainer", mode=mode, lookahead=1)
    peak = {name: plan.predicted["peak_nbytes"] for name, plan in found.items()}
    time = {name: plan.step_ns for name, plan in found.items()}
    body = [[n, f"{peak[n] / MIB:.0f} MiB", f"{time[n] / 1e9:.2f} s"] for n in found]
    broken = []
    if not max(peak["on_demand"], peak["reduced"]) <= peak["proactive"] <= peak["none"]:
        broken.append("memory is not on_demand, reduced <= proactive <= none")
    if not time["none"] <= time["proactive"] <= min(time["reduced"], time["on_demand"]) * _SAME:
        broken.append("time is not none <= proactive <= reduced, on_demand")
    rows = [row("vgg16_cifar on rpi4", n, "peak", "bytes", [peak[n]]) for n in found]
    rows += [row("vgg16_cifar on rpi4", n, "step_time", "s", [time[n] / 1e9]) for n in found]
    yield Table(title="VGG16 on rpi4", head=("mode", "peak", "a step"), body=body, broken=broken, rows=rows)


def pool() -> Iterator[Table]:
    """Height of contiguous layouts over the most bytes alive."""
    body, rows, broken = [], [], []
    for name in ("mobilenet_v2", "squeezenet", "resnet50", "vgg16"):
        problem = problem_from_trace(step(name, "full", "rpi4")).problem
        bound = lower_bound(problem)
        heights = {planner: place(problem, planner).height / bound for planner in ("melon", "best_fit", "search")}
        body.append([name, *(f"{height:.4f}" for height in heights.values())])
        rows += [row(name, planner, "height_per_peak_live", "1", [height]) for planner, height in heights.items()]
        if heights["melon"] > heights["best_fit"] * _SAME:
            broken.append(f"{name}: melon's pool {heights['melon']:.4f}, on demand {heights['best_fit']:.4f}")
    head = ("model", "melon's pool", "best fit on demand", "our search")
    yield Table(title="height over the most bytes alive", head=head, body=body, broken=broken, rows=rows)


def melon() -> Iterator[Table]:
    """Time of a step against the policies that Melon compares with."""
    policies = ("melon", "vdnn", "sublinear", "capuchin", "dtr", "auto")
    body, rows, broken = [], [], []
    for name in ("mobilenet_v2", "squeezenet"):
        trace = step(name, "full", "rpi4", free=True)
        for share in (0.9, 0.75, 0.6):
            outcomes = {o.policy: o for o in compare(trace, machine_at(trace, "rpi4", share), policies)}
            body.append([name, f"{share:.0%}", *(_times(outcomes[p], trace) for p in policies)])
            for p, o in outcomes.items():
                value = [] if o.plan is None else [o.duration_ns / trace.duration_ns]
                rows.append(row(f"{name} on rpi4 at {share:.0%}", p, "time_over_ops", "1", value))
            broken += _slower(f"{name} at {share:.0%}", outcomes, "melon", ("vdnn", "sublinear"))
            broken += _slower(f"{name} at {share:.0%}", outcomes, "auto", policies)
    title = "time of a step over that of its ops, on rpi4, by share of the in-core peak"
    yield Table(title=title, head=("model", "memory", *policies), body=body, broken=broken, rows=rows)


def _times(o: Outcome, trace: Trace) -> str:
    return "x" if o.plan is None else f"{o.duration_ns / trace.duration_ns:.3f}"


def _slower(where: str, outcomes: dict[str, Outcome], one: str, others: Sequence[str]) -> Iterator[str]:
    """Those of `others` that beat `one`."""
    own = outcomes[one]
    for name in others:
        other = outcomes[name]
        if other.plan is None or name == one:
            continue
        if own.plan is None:
            yield f"{where}: {one} finds no plan, {name} does"
        elif own.duration_ns > other.duration_ns * _SAME:
            yield f"{where}: {one} is {own.duration_ns / other.duration_ns - 1:.1%} slower than {name}"


def poet() -> Iterator[Table]:
    """Energy of a step over budgets, and within deadlines."""
    device = "jetson_tx2"
    profile = load_profile(device)
    energy = profile.require_energy()
    power = {"compute_w": energy.compute_w, "load_w": energy.load_w, "evict_w": energy.evict_w}
    own: dict[str, object] = {**power, "objective": "energy"}
    variants: dict[str, tuple[str, dict[str, object]]] = {
        "poet": ("poet", own),
        "paging only": ("capuchin", {"recompute": False}),
        "remat only": ("checkmate", {}),
        "capuchin": ("capuchin", {}),
        "dtr": ("dtr", {}),
        "auto": ("auto", {"recompute": True, "exact": False}),
    }

    def planned(trace: Trace, machine: Machine, policy: str, parameters: dict[str, object]) -> tuple[float, int] | None:
        try:
            plan = make_plan(trace, machine, policy, **parameters)
        except PlanError:
            return None
        return energy_j(trace, plan.predicted, profile), plan.step_ns

    for name in ("resnet18", "vgg16", "bert"):
        trace = step(name, "full", device, free=True)
        body, in_time = [], []
        rows: list[Row] = []
        broken: list[str] = []
        late: list[str] = []
        for share in (0.9, 0.75, 0.6):
            machine = machine_at(trace, device, share)
            found = {v: planned(trace, machine, *how) for v, how in variants.items()}
            body.append([f"{share:.0%}", *(_joules(found[v], trace) for v in variants)])
            where = f"{name} on {device} at {share:.0%}"
            rows += [row(where, v, "energy", "J", [] if (f := found[v]) is None else [f[0]]) for v in variants]
            broken += _dearer(where, found)
            if share != _DEADLINES_AT:
                continue
            fastest_ns = min(f[1] for v, f in found.items() if f is not None and v not in ("poet", "auto"))
            for times in (1.0, 1.25, 2.0):
                limit_ns = int(fastest_ns * times)
                told = planned(trace, machine, "poet", {**own, "deadline_s": limit_ns / 1e9})
                within = {v: f if f is not None and f[1] <= limit_ns else None for v, f in found.items()}
                within["poet"] = told if told is not None and told[1] <= limit_ns else None
                in_time.append([f"{times}x", f"{limit_ns / 1e9:.3g} s", *(_joules(within[v], trace) for v in variants)])
                rows += [
                    row(f"{where}, {times}x", v, "energy", "J", [] if f is None else [f[0]]) for v, f in within.items()
                ]
                late += _dearer(f"{where} within {times}x the fastest rival", within)
        title = f"{name} on {device}: energy of a step (time over that of its ops), by share of the in-core peak"
        yield Table(title=title, head=("memory", *variants), body=body, broken=broken, rows=rows)
        head = ("deadline", "", *variants)
        title = (
            f"{name} on {device} at {_DEADLINES_AT:.0%}: energy within a deadline, in times of the fastest rival's step"
        )
        yield Table(title=title, head=head, body=in_time, broken=late)


def _dearer(where: str, found: dict[str, tuple[float, int] | None]) -> Iterator[str]:
    """Rivals that use less energy than `poet`, or have a plan where it has none."""
    own = found["poet"]
    for rival in ("paging only", "remat only", "capuchin", "dtr"):
        other = found[rival]
        if other is not None and own is None:
            yield f"{where}: poet finds no plan, {rival} does"
        elif other is not None and own is not None and own[0] > other[0] * _SAME:
            yield f"{where}: poet uses {own[0] / other[0] - 1:.1%} more energy than {rival}"


def _joules(found: tuple[float, int] | None, trace: Trace) -> str:
    return "x" if found is None else f"{found[0]:.4g} J ({found[1] / trace.duration_ns:.2f}x)"


CLAIMS: dict[str, Callable[[], Iterator[Table]]] = {
    "batch": batch,
    "addressing": addressing,
    "modes": modes,
    "pool": pool,
    "melon": melon,
    "poet": poet,
}

if __name__ == "__main__":
    raise SystemExit(main())
