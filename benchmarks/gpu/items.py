"""What the gate measures, in order of importance, each an item with a limit of its own.

An item starts processes (`Shell`) and turns their answers into figures. A figure that could not be had is a
`Figure` without a value and with the reason.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from benchmarks.gpu.child import Order

MIB, GIB = 1 << 20, 1 << 30
_SHARES = (("half", 0.5), ("quarter", 0.25))
_SMALLER = 0.7
"""From one try for the smallest budget to the next."""
_NUM_TRIES = 4
_CHUNK_NBYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table. `is_good` is None where it is neither right nor wrong: a time."""

    variant: str
    metric: str
    unit: str
    value: float | None
    is_good: bool | None = None
    note: str = ""


class Shell(Protocol):
    """Runs processes for an item."""

    def train(self, order: Order) -> dict[str, Any]:
        """What `benchmarks.gpu.child` tells, or `{"error": ...}`."""

    def command(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Exit code and output. Raises FileNotFoundError."""


Measure = Callable[[Shell], Iterable[Figure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something to measure. `limit_s` counts against the shard, whether it is needed or not."""

    name: str
    limit_s: int
    measure: Measure


def bitwise(
    workload: str, *, preset: Any = "full", optimizer: str | None = None, chunk_nbytes: int = _CHUNK_NBYTES
) -> Measure:
    """In core against budgets down to the smallest that works: every bit of every step; peak by the driver's count."""

    def measure(shell: Shell) -> Iterable[Figure]:
        order = Order(workload=workload, preset=preset, optimizer=optimizer, digests=True)
        expected = shell.train(order)
        if "error" in expected:
            yield _failed("in core", expected)
            return

        def budget(share: float) -> int:
            return max(int(expected["peak_nbytes"] * share) // chunk_nbytes, 2) * chunk_nbytes

        for name, share in (("peak", 1.1), *_SHARES):
            yield from _compared(shell, order, expected, name, budget(share))
        yield from _compared(shell, replace(order, debug=True), expected, "half, debug", budget(0.5))
        yield from _smallest(shell, order, expected, budget)

    return measure


def _compared(shell: Shell, order: Order, expected: dict[str, Any], name: str, budget_nbytes: int) -> Iterable[Figure]:
    answer = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes))
    if "error" in answer:
        yield _failed(name, answer)
        return
    yield from _same_bits(name, expected, answer)
    yield from _held(name, expected, answer, budget_nbytes)
    yield from _quiet(name, answer, debug=order.debug)


def _smallest(shell: Shell, order: Order, expected: dict[str, Any], budget: Callable[[float], int]) -> Iterable[Figure]:
    share, last = _SHARES[-1][1], None
    for _ in range(_NUM_TRIES):
        share *= _SMALLER
        answer = shell.train(replace(order, variant="ours", budget_nbytes=budget(share)))
        if answer.get("is_too_small"):
            break
        if "error" in answer:
            yield _failed(f"{share:.2f} of the peak", answer)
            return
        last = (share, answer)
    if last is None:
        yield Figure(variant="smallest", metric="share of the in-core peak", unit="", value=_SHARES[-1][1])
        return
    yield Figure(variant="smallest", metric="share of the in-core peak", unit="", value=last[0])
    yield from _same_bits("smallest", expected, last[1])


def _same_bits(name: str, expected: dict[str, Any], answer: dict[str, Any]) -> Iterable[Figure]:
    pairs = list(zip(expected["steps"], answer["steps"], strict=True))
    num_equal = sum(a["digest"] == b["digest"] for a, b in pairs)
    first = next((i for i, (a, b) in enumerate(pairs) if a["digest"] != b["digest"]), None)
    note = "" if first is None else f"first other bits in step {first}, which ran {answer['steps'][first]['mode']}"
    yield Figure(
        variant=name,
        metric=f"steps bit for bit equal, of {len(pairs)}",
        unit="",
        value=num_equal,
        is_good=num_equal == len(pairs),
        note=note,
    )
    num_planned = sum(step["mode"] == "planned" for step in answer["steps"])
    yield Figure(variant=name, metric="steps that were planned", unit="", value=num_planned, is_good=num_planned > 1)


def _held(name: str, expected: dict[str, Any], answer: dict[str, Any], budget_nbytes: int) -> Iterable[Figure]:
    """By the driver's free memory, less what the context takes in core, where all of it is known."""
    if "context_nbytes" not in expected:
        yield Figure(
            variant=name,
            metric="peak by our own count",
            unit="MiB",
            value=answer["peak_nbytes"] / MIB,
            is_good=answer["peak_nbytes"] <= budget_nbytes,
        )
        return
    used_nbytes = max(step["device_used_nbytes"] for step in answer["steps"]) - expected["context_nbytes"]
    yield Figure(
        variant=name,
        metric="peak by the driver's count, less the context",
        unit="MiB",
        value=used_nbytes / MIB,
        is_good=used_nbytes <= budget_nbytes,
        note=f"budget {budget_nbytes // MIB} MiB, context {expected['context_nbytes'] // MIB} MiB",
    )


def _quiet(name: str, answer: dict[str, Any], *, debug: bool) -> Iterable[Figure]:
    last = answer["steps"][-1]
    if last["mode"] != "planned" or debug:
        return
    num_calls = sum(last["stopping_calls"].values()) + sum(last["mapping_calls"].values())
    yield Figure(
        variant=name,
        metric="calls that stop the host or map, in the last planned step",
        unit="",
        value=num_calls,
        is_good=num_calls == 0 or last["num_remapped_chunks"] > 0,
        note=f"{last['num_remapped_chunks']} chunks remapped" if num_calls else "",
    )


def throughput(
    workload: str, batch_sizes: Sequence[int], budget_nbytes: int, policies: Sequence[str], *, preset: Any = "full"
) -> Measure:
    """Samples a second by batch: in core as far as it fits, rivals, and each policy at one budget."""

    def measure(shell: Shell) -> Iterable[Figure]:
        for batch_size in batch_sizes:
            order = Order(workload=workload, preset=preset, batch_size=batch_size, num_steps=8)
            variants = [replace(order, variant=name) for name in ("in_core", "save_on_cpu", "checkpoint")]
            variants.append(replace(order, variant="expandable_segments"))
            variants += [
                replace(order, variant="ours", policy=policy, budget_nbytes=budget_nbytes) for policy in policies
            ]
            for variant in variants:
                name = f"batch {batch_size}, {variant.policy if variant.variant == 'ours' else variant.variant}"
                yield _samples_per_s(name, shell.train(variant))

    return measure


def _samples_per_s(name: str, answer: dict[str, Any]) -> Figure:
    if "error" in answer:
        return Figure(variant=name, metric="samples", unit="1/s", value=None, note=answer["error"].splitlines()[0])
    times = [step["s"] for step in answer["steps"][-3:]]
    modes = {step["mode"] for step in answer["steps"][-3:]}
    return Figure(
        variant=name,
        metric="samples",
        unit="1/s",
        value=answer["batch_size"] / statistics.median(times),
        note=f"peak {answer['peak_nbytes'] // MIB} MiB; last steps {', '.join(sorted(modes))}",
    )


def tests(*paths: str) -> Measure:
    """The suite that needs a GPU, none of it skipped."""

    def measure(shell: Shell) -> Iterable[Figure]:
        code, output = shell.command(["-m", "pytest", "-q", "--require-gpu", "-p", "no:cacheprovider", *paths])
        lines = [line for line in output.splitlines() if line.strip()]
        yield Figure(
            variant="pytest",
            metric="exit code",
            unit="",
            value=code,
            is_good=code == 0,
            note=lines[-1] if lines else "no output",
        )

    return measure


def driver_calls(shell: Shell) -> Iterable[Figure]:
    """Microseconds of each call, the device idle and with work queued."""
    code, output = shell.command(["-m", "benchmarks.gpu.calls"])
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        yield Figure(variant="calls", metric="time", unit="us", value=None, note=f"exit code {code}: {output[-200:]}")
        return
    for load, times in found.items():
        for name, us in times.items():
            yield Figure(variant=load, metric=name, unit="us", value=us)


def sanitizer(workload: str) -> Measure:
    """A small run under compute-sanitizer, where that is installed."""

    def measure(shell: Shell) -> Iterable[Figure]:
        order = Order(workload=workload, preset="small", variant="ours", budget_nbytes=64 * MIB, num_steps=4)
        try:
            code, output = shell.command(["compute-sanitizer", "--error-exitcode=9", "child", order_text(order)])
        except FileNotFoundError:
            yield Figure(variant="memcheck", metric="errors", unit="", value=None, note="compute-sanitizer is not here")
            return
        found = [line.strip("= ") for line in output.splitlines() if "ERROR SUMMARY" in line]
        yield Figure(
            variant="memcheck",
            metric="exit code",
            unit="",
            value=code,
            is_good=code == 0,
            note=found[-1] if found else "no summary",
        )

    return measure


def order_text(order: Order) -> str:
    """As `benchmarks.gpu.child` reads it."""
    return json.dumps(asdict(order))


def _failed(name: str, answer: dict[str, Any]) -> Figure:
    return Figure(variant=name, metric="trains", unit="", value=None, is_good=False, note=answer["error"])


_POLICIES = ("auto", "window", "vdnn", "lms", "on_demand")

ITEMS: tuple[Item, ...] = (
    Item(name="tests", limit_s=240, measure=tests("tests/gpu")),
    Item(name="bitwise gpt", limit_s=240, measure=bitwise("gpt")),
    Item(name="bitwise conv_stack", limit_s=150, measure=bitwise("conv_stack")),
    Item(name="bitwise resnet50", limit_s=270, measure=bitwise("resnet50")),
    Item(name="bitwise unet", limit_s=150, measure=bitwise("unet")),
    Item(name="bitwise encoder", limit_s=150, measure=bitwise("encoder")),
    Item(name="bitwise lstm", limit_s=150, measure=bitwise("lstm")),
    Item(name="bitwise tied_frozen", limit_s=150, measure=bitwise("tied_frozen")),
    Item(name="bitwise gpt, adamw_fused", limit_s=240, measure=bitwise("gpt", optimizer="adamw_fused")),
    Item(name="bitwise gpt, adamw_foreach", limit_s=240, measure=bitwise("gpt", optimizer="adamw_foreach")),
    Item(name="sanitizer", limit_s=240, measure=sanitizer("conv_stack")),
    Item(name="driver calls", limit_s=60, measure=driver_calls),
    Item(
        name="resnet50 16GiB, small batches",
        limit_s=540,
        measure=throughput("resnet50", (64, 190), 16 * GIB, _POLICIES),
    ),
    Item(name="resnet50 16GiB, batch 480", limit_s=540, measure=throughput("resnet50", (480,), 16 * GIB, _POLICIES)),
    Item(
        name="resnet50 16GiB, batch 960",
        limit_s=540,
        measure=throughput("resnet50", (960,), 16 * GIB, ("auto", "window")),
    ),
    Item(
        name="resnet50 16GiB, batch 1440",
        limit_s=540,
        measure=throughput("resnet50", (1440,), 16 * GIB, ("auto", "window")),
    ),
    Item(
        name="resnet50 8GiB, batch 960",
        limit_s=540,
        measure=throughput("resnet50", (960,), 8 * GIB, ("auto", "window")),
    ),
)
"""In order of importance. The same items run over the fake with small models (`gate.fake_items`)."""

FAKE_ITEMS: tuple[Item, ...] = (
    Item(name="driver calls", limit_s=60, measure=driver_calls),
    Item(name="bitwise conv_stack", limit_s=120, measure=bitwise("conv_stack", preset="small", chunk_nbytes=64 << 10)),
    Item(name="sanitizer", limit_s=120, measure=sanitizer("conv_stack")),
    Item(
        name="throughput conv_stack",
        limit_s=120,
        measure=throughput("conv_stack", (4,), 4 * MIB, ("auto",), preset="small"),
    ),
)
"""For trying the gate itself."""

NOT_THERE: tuple[str, ...] = (
    "fraction of the limit max(compute, bytes / link rate), compute measured with all variables on one piece of memory",
    "best-fit caching allocator and remapping each time, beside standing aliases",
    "internal fragmentation by chunk size",
    "DenseNet-121, Pix2PixHD, DeepLabv3, GPT of 1.3 B parameters",
)
"""Figures that issue 3 asks for and that no item measures yet; the table names them."""
