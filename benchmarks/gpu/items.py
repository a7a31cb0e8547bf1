"""What the gate measures, in order of importance, each an item with a limit of its own.

An item starts processes (`Shell`) and turns their answers into figures. A figure that could not be had is a
`Figure` without a value and with the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu import side_by_side
from benchmarks.gpu.budget_items import budget_changes
from benchmarks.gpu.child import Order
from benchmarks.gpu.figures import Figure, Item, Measure, Shell, equal_steps, failed, share_nbytes, train_in_core
from benchmarks.gpu.machine_items import demo, doctor, driver_calls, preflight, sanitizer, tests
from benchmarks.gpu.programs import PROGRAMS
from benchmarks.gpu.recompute_items import recomputation
from scheduler.cost.links import least_busy_ns
from scheduler.plan import Machine

MIB, GIB = 1 << 20, 1 << 30
_SMALLER = 0.7
"""From one try for the smallest budget to the next."""
_NUM_TRIES = 2
_CHUNK_NBYTES = 2 << 20
_SMALL_HOST_NBYTES = 2 << 30
"""Host memory of a session whose variables are small: pinning takes about a second for each few GiB."""
_LARGE_HOST_NBYTES = 8 << 30
"""Of one that trains a model of images, where bits are compared."""
_CONTEXT_SLACK_NBYTES = 64 << 20
"""A process's context is not to the byte that of another one, where kernels are loaded when they are first used."""
_NUM_STEPS, _NUM_TIMED = 10, 3
"""A session plans in its third step or fourth, and where its plan waits for the link much, once more after the next, in
which ops are tried; the last steps are timed."""


def bitwise(
    workload: str,
    *,
    preset: Any = "full",
    optimizer: str | None = None,
    chunk_nbytes: int = _CHUNK_NBYTES,
    host_nbytes: int = _SMALL_HOST_NBYTES,
) -> Measure:
    """In core against budgets down to the smallest that works: every bit of every step; peak by the driver's count."""

    def measure(shell: Shell) -> Iterable[Figure]:
        order = Order(
            workload=workload,
            preset=preset,
            optimizer=optimizer,
            digests=True,
            host_budget_nbytes=host_nbytes,
        )
        order, expected = train_in_core(shell, order)
        if "error" in expected:
            yield failed("in core", expected)
            return
        if order.warns:
            again = shell.train(order)
            yield from _same_bits("in core once more", expected, again, is_planned=False)

        def budget(share: float) -> int:
            return share_nbytes(expected, share, chunk_nbytes)

        for name, share in (("peak", 1.1), ("half", 0.5)):
            yield from _compared(shell, order, expected, name, budget(share))
        yield from _compared(shell, replace(order, debug=True), expected, "half, debug", budget(0.5))
        yield from _smallest(shell, order, expected, budget)

    return measure


def _compared(shell: Shell, order: Order, expected: dict[str, Any], name: str, budget_nbytes: int) -> Iterable[Figure]:
    answer = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes))
    yield from _judged(name, order, expected, answer, budget_nbytes)


def _judged(
    name: str, order: Order, expected: dict[str, Any], answer: dict[str, Any], budget_nbytes: int
) -> Iterable[Figure]:
    if "error" in answer:
        yield failed(name, answer, may_be_too_small=True)
        return
    yield from _same_bits(name, expected, answer)
    yield from _held(name, expected, answer, budget_nbytes)
    yield from _quiet(name, answer, debug=order.debug)


def _smallest(shell: Shell, order: Order, expected: dict[str, Any], budget: Callable[[float], int]) -> Iterable[Figure]:
    """A quarter, and ever less, until an op does not fit any more."""
    share, smallest = 0.25, 0.5
    for _ in range(_NUM_TRIES):
        name = "quarter" if share == 0.25 else f"{share:.2f} of the peak"
        answer = shell.train(replace(order, variant="ours", budget_nbytes=budget(share)))
        if answer.get("is_too_small"):
            break
        yield from _judged(name, order, expected, answer, budget(share))
        if "error" in answer:
            return
        smallest, share = share, share * _SMALLER
    yield Figure(variant="smallest", metric="share of the in-core peak", unit="", value=smallest)


def _same_bits(
    name: str, expected: dict[str, Any], answer: dict[str, Any], *, is_planned: bool = True
) -> Iterable[Figure]:
    if "error" in answer:
        yield failed(name, answer)
        return
    pairs = zip(expected["steps"], answer["steps"], strict=True)
    first = next((i for i, (a, b) in enumerate(pairs) if a["digest"] != b["digest"]), None)
    note = "" if first is None else f"first other bits in step {first}, which ran {answer['steps'][first]['mode']}"
    yield equal_steps(name, expected, answer, note=note)
    if is_planned:
        num_planned = sum(step["mode"] == "planned" for step in answer["steps"])
        note = "; ".join(answer.get("unplannable", ()))
        good = num_planned > 1
        yield Figure(
            variant=name, metric="steps that were planned", unit="", value=num_planned, is_good=good, note=note
        )


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
        is_good=used_nbytes <= budget_nbytes + _CONTEXT_SLACK_NBYTES,
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
    workload: str,
    batch_sizes: Sequence[int],
    budget_nbytes: int,
    variants: Sequence[Variant],
    *,
    sample_nbytes: int = 0,
    **common: Any,
) -> Measure:
    """Samples a second by batch; where computation alone was measured, also as a fraction of the limit.

    Args:
        workload, batch_sizes, budget_nbytes: Of each session.
        variants: In this order, for each batch.
        sample_nbytes: What a sample adds to the memory that a step needs; host memory is pinned accordingly.
        common: Further fields of every `Order`.
    """

    def measure(shell: Shell) -> Iterable[Figure]:
        for batch_size in batch_sizes:
            # Not less by the budget: what was evicted once keeps its place there while it is back in memory.
            host_nbytes = batch_size * sample_nbytes + 2 * GIB
            order = Order(workload=workload, batch_size=batch_size, **{"num_steps": _NUM_STEPS, **common})
            compute_s = None
            for variant in variants:
                name = f"batch {batch_size}, {variant.name}"
                chosen: dict[str, Any] = dict(variant.fields)
                if chosen["variant"] == "ours":
                    chosen = {"budget_nbytes": budget_nbytes, "host_budget_nbytes": host_nbytes, **chosen}
                answer = shell.train(replace(order, **chosen))
                yield _samples_per_s(name, answer)
                if "error" in answer:
                    continue
                if variant.name == COMPUTE.name:
                    compute_s = _step_s(answer)
                if "link" in answer:
                    yield from _against_the_limit(name, answer, compute_s)
                    yield _fragmentation(name, answer)
                    yield _remaps(name, answer)

    return measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to train, as fields of `Order`."""

    name: str
    fields: Mapping[str, Any]


def ours(policy: str, placement: str = "standing", **fields: Any) -> Variant:
    """A session with this policy."""
    words = [policy, *([placement] if placement != "standing" else []), *(f"{k} {v}" for k, v in fields.items())]
    return Variant(
        name=", ".join(words), fields={"variant": "ours", "policy": policy, "placement": placement, **fields}
    )


def other(variant: str, **fields: Any) -> Variant:
    """One of `benchmarks.gpu.child.VARIANTS`."""
    return Variant(name=variant, fields={"variant": variant, **fields})


COMPUTE = other("aliased")
"""Computation alone. Before sessions whose limit is to be reckoned."""


def _step_s(answer: dict[str, Any]) -> float:
    return statistics.median(step["s"] for step in answer["steps"][-_NUM_TIMED:])


def _samples_per_s(name: str, answer: dict[str, Any]) -> Figure:
    if "error" in answer:
        return Figure(variant=name, metric="samples", unit="1/s", value=None, note=answer["error"].splitlines()[0])
    last = answer["steps"][-_NUM_TIMED:]
    notes = [f"peak {answer['peak_nbytes'] // MIB} MiB", "last steps " + ", ".join(sorted({s["mode"] for s in last}))]
    if num_remapped := last[-1].get("num_remapped_chunks"):
        notes.append(f"{num_remapped} chunks remapped")
    if num_reruns := last[-1].get("num_reruns"):
        notes.append(f"{num_reruns} re-runs")
    notes += [*answer.get("unplannable", ()), *answer.get("notes", ()), *_why_left(answer)]
    value = answer["batch_size"] / _step_s(answer)
    return Figure(variant=name, metric="samples", unit="1/s", value=value, note="; ".join(notes))


def _why_left(answer: dict[str, Any]) -> list[str]:
    """Why steps left their plans, each reason once."""
    whys = (step.get("why") for step in answer["steps"] if step["mode"] == "off_plan")
    return [f"off its plan: {why}" for why in dict.fromkeys(whys) if why]


def _against_the_limit(name: str, answer: dict[str, Any], compute_s: float | None) -> Iterable[Figure]:
    """The least time that the step's bytes take on both links, by rates measured in the same process."""
    link, last = answer["link"], answer["steps"][-1]
    machine = Machine(
        chunk_nbytes=1,
        num_chunks=1,
        load_bytes_per_s=link["read_bytes_per_s"],
        evict_bytes_per_s=link["write_bytes_per_s"],
        shared_bytes_per_s=link["read_together_bytes_per_s"] + link["write_together_bytes_per_s"],
    )
    link_s = least_busy_ns(machine, last["loaded_nbytes"], last["evicted_nbytes"]) / 1e9
    rates = " ".join(f"{link[key] / 1e9:.1f}" for key in _RATES)
    yield Figure(
        variant=name,
        metric="both links are busy for at least",
        unit="s",
        value=link_s,
        note=f"in {last['loaded_nbytes'] // MIB}, out {last['evicted_nbytes'] // MIB} MiB; in, out, both: {rates} GB/s",
    )
    if compute_s is None:
        return
    yield Figure(
        variant=name,
        metric="fraction of the limit",
        unit="",
        value=max(compute_s, link_s) / _step_s(answer),
        note=f"computing {compute_s:.4f} s, step {_step_s(answer):.4f} s, planned {answer.get('predicted_s', 0):.4f} s",
    )


_RATES = ("read_bytes_per_s", "write_bytes_per_s", "read_together_bytes_per_s", "write_together_bytes_per_s")


def _fragmentation(name: str, answer: dict[str, Any]) -> Figure:
    """What of the chunks that are held at the fullest moment holds no byte."""
    metric = "internal fragmentation"
    if not answer.get("occupied_nbytes"):
        return Figure(variant=name, metric=metric, unit="", value=None, note="no plan was made")
    live, occupied = answer["live_nbytes"], answer["occupied_nbytes"]
    note = f"{live // MIB} MiB in {occupied // MIB} MiB of chunks"
    return Figure(variant=name, metric=metric, unit="", value=1 - live / occupied, note=note)


def _remaps(name: str, answer: dict[str, Any]) -> Figure:
    """How many chunks a planned step maps elsewhere, and what the plan takes that to cost."""
    last = answer["steps"][-1]
    priced_s, step_s = answer.get("remap_s", 0.0), _step_s(answer)
    note = f"priced at {priced_s * 1e3:.2f} ms of a step of {step_s * 1e3:.1f} ms; the last step ran {last['mode']}"
    value = last.get("num_remapped_chunks", 0)
    return Figure(variant=name, metric="remapped chunks in a step", unit="", value=value, note=note)


def ordered(*parts: Measure) -> Measure:
    """One after the other, within one item's time."""

    def measure(shell: Shell) -> Iterable[Figure]:
        for part in parts:
            yield from part(shell)

    return measure


_POLICIES = ("auto", "window", "vdnn", "lms", "on_demand")
_ALL_POLICIES = tuple(ours(policy) for policy in _POLICIES)
RIVALS = (other("save_on_cpu"), other("offload_hooks"), other("checkpoint"), other("expandable_segments"))
LONE_RIVALS = (other("managed", budget_nbytes=16 * GIB), other("deepspeed_offload"))
"""Each an item of its own: managed memory beyond the card's may take minutes, or hang."""
RECOMPUTATION = (ours("auto", recompute=True), ours("auto", recompute=False))
_SIDE_BY_SIDE = (
    ("gpt", "adamw_fused", 0.5),
    ("gpt", "adamw_foreach", 0.5),
    ("encoder", None, 0.5),
    ("tied_frozen", None, 0.5),
    ("resnet50", None, 0.5),
    ("densenet121", None, 0.5),
    ("lstm", None, 0.75),
    ("unet", None, 0.8),
)
_GPT_1B: dict[str, Any] = {"builds_on_device": True, "sample_nbytes": 8_000_000_000}
_SAMPLE_NBYTES = 88_000_000
"""What an image of 224x224 adds to ResNet-50's step: 87 MB by a trace of batch 960 on fake tensors. Those of the other
models are from such traces, too, parameters and their state included. At 8 GiB an op of batch 835 fills the pool."""

ITEMS: tuple[Item, ...] = (
    Item(name="preflight", limit_s=60, measure=preflight),
    Item(name="doctor", limit_s=45, measure=doctor),
    Item(name="tests", limit_s=130, measure=tests("tests/gpu")),
    Item(name="demo", limit_s=60, measure=demo),
    Item(name="bits of other models, side by side", limit_s=110, measure=side_by_side.workloads(_SIDE_BY_SIDE)),
    Item(
        name="bits of programs, side by side",
        limit_s=120,
        measure=side_by_side.programs(sorted(PROGRAMS)),
    ),
    Item(name="bitwise conv_stack", limit_s=120, measure=bitwise("conv_stack")),
    Item(name="bitwise gpt", limit_s=120, measure=bitwise("gpt")),
    Item(
        name="resnet50 16GiB",
        limit_s=230,
        measure=ordered(
            throughput(
                "resnet50", (190,), 16 * GIB, (other("in_core"), COMPUTE, ours("auto")), sample_nbytes=_SAMPLE_NBYTES
            ),
            throughput("resnet50", (480,), 16 * GIB, (COMPUTE, ours("auto")), sample_nbytes=_SAMPLE_NBYTES),
        ),
    ),
    Item(
        name="resnet50 16GiB, batches 960 and 1440",
        limit_s=290,
        measure=throughput("resnet50", (1440, 960), 16 * GIB, (COMPUTE, ours("auto")), sample_nbytes=_SAMPLE_NBYTES),
    ),
    Item(
        name="gpt_1b 8GiB",
        limit_s=180,
        measure=throughput("gpt_1b", (4,), 8 * GIB, (COMPUTE, ours("auto"), other("in_core")), **_GPT_1B),
    ),
    Item(
        name="gpt_1b 8GiB, fused and window",
        limit_s=180,
        measure=throughput(
            "gpt_1b", (4,), 8 * GIB, (COMPUTE, ours("auto", optimizer="adamw_fused"), ours("window")), **_GPT_1B
        ),
    ),
    Item(name="budget changes conv_stack", limit_s=50, measure=budget_changes("conv_stack")),
    Item(name="recomputation conv_stack", limit_s=80, measure=recomputation("conv_stack")),
    Item(name="recomputation gpt", limit_s=80, measure=recomputation("gpt")),
    Item(name="bitwise resnet50", limit_s=240, measure=bitwise("resnet50", host_nbytes=_LARGE_HOST_NBYTES)),
    Item(
        name="resnet50 16GiB, rivals and policies at batch 480",
        limit_s=400,
        measure=throughput(
            "resnet50", (480,), 16 * GIB, (COMPUTE, *RIVALS, *_ALL_POLICIES), sample_nbytes=_SAMPLE_NBYTES
        ),
    ),
    *(
        Item(
            name=f"resnet50 16GiB, {placement} at batch 480",
            limit_s=240,
            measure=throughput(
                "resnet50",
                (480,),
                16 * GIB,
                tuple(ours(policy, placement) for policy in _POLICIES),
                sample_nbytes=_SAMPLE_NBYTES,
            ),
        )
        for placement in ("remapped", "best_fit")
    ),
    Item(
        name="resnet50 8GiB, nine times what fits",
        limit_s=300,
        measure=throughput(
            "resnet50", (800, 89), 8 * GIB, (COMPUTE, ours("auto"), other("in_core")), sample_nbytes=_SAMPLE_NBYTES
        ),
    ),
    *(
        Item(
            name=f"resnet50 {budget_gib}GiB, recomputation at batch {batch_size}",
            limit_s=limit_s,
            measure=throughput(
                "resnet50",
                (batch_size,),
                budget_gib * GIB,
                (COMPUTE, *RECOMPUTATION),
                sample_nbytes=_SAMPLE_NBYTES,
            ),
        )
        for budget_gib, batch_size, limit_s in ((16, 1440, 290), (8, 800, 180), (16, 480, 150), (16, 64, 60))
    ),
    Item(
        name="gpt_1b 8GiB, recomputation",
        limit_s=180,
        measure=throughput("gpt_1b", (4,), 8 * GIB, (COMPUTE, *RECOMPUTATION), **_GPT_1B),
    ),
    *(
        Item(
            name=f"resnet50 16GiB, {rival.name} at batch 480",
            limit_s=120,
            measure=throughput("resnet50", (480,), 16 * GIB, (rival,), num_steps=5),
        )
        for rival in LONE_RIVALS
    ),
    Item(name="driver calls", limit_s=60, measure=driver_calls),
    Item(name="sanitizer", limit_s=180, measure=sanitizer("conv_stack")),
    Item(
        name="resnet50 16GiB, by chunk size",
        limit_s=300,
        measure=throughput(
            "resnet50",
            (480,),
            16 * GIB,
            tuple(ours("auto", chunk_nbytes=mib * MIB) for mib in (2, 4, 8, 20, 40)),
            sample_nbytes=_SAMPLE_NBYTES,
        ),
    ),
    Item(name="bitwise gpt, adamw_fused", limit_s=120, measure=bitwise("gpt", optimizer="adamw_fused")),
    Item(name="bitwise gpt, adamw_foreach", limit_s=120, measure=bitwise("gpt", optimizer="adamw_foreach")),
    *(
        Item(
            name=f"resnet50 16GiB, batch {batch_size}",
            limit_s=180,
            measure=throughput(
                "resnet50",
                (batch_size,),
                16 * GIB,
                (other("in_core"), COMPUTE, *_ALL_POLICIES, ours("window", "remapped"), ours("window", "best_fit")),
                sample_nbytes=_SAMPLE_NBYTES,
            ),
        )
        for batch_size in (64, 128, 256)
    ),
    *(
        Item(
            name=f"{workload} 8GiB",
            limit_s=180,
            measure=throughput(
                workload,
                (batch_size,),
                8 * GIB,
                (COMPUTE, ours("auto"), ours("window"), other("in_core")),
                sample_nbytes=sample_nbytes,
            ),
        )
        for workload, batch_size, sample_nbytes in (
            ("densenet121", 256, 140_000_000),
            ("pix2pix_hd", 8, 2_400_000_000),
            ("deeplab_v3", 32, 1_300_000_000),
        )
    ),
    Item(name="bitwise unet", limit_s=120, measure=bitwise("unet", host_nbytes=_LARGE_HOST_NBYTES)),
    Item(name="bitwise encoder", limit_s=120, measure=bitwise("encoder")),
    Item(name="bitwise lstm", limit_s=120, measure=bitwise("lstm")),
    Item(name="bitwise tied_frozen", limit_s=120, measure=bitwise("tied_frozen")),
    Item(name="bitwise densenet121", limit_s=180, measure=bitwise("densenet121", host_nbytes=_LARGE_HOST_NBYTES)),
    Item(name="bitwise deeplab_v3", limit_s=180, measure=bitwise("deeplab_v3", host_nbytes=_LARGE_HOST_NBYTES)),
    Item(
        name="resnet50 16GiB, TF32",
        limit_s=120,
        measure=throughput(
            "resnet50", (480,), 16 * GIB, (COMPUTE, ours("auto")), sample_nbytes=_SAMPLE_NBYTES, tf32=True
        ),
    ),
)
"""In order of importance: a quarter of an hour has room for the first two shards. A smaller version of them
runs over the fake (`fake_items.py`).
"""

NOT_THERE: tuple[str, ...] = ()
"""Figures that issue 3 asks for and that no item measures yet; the table names them."""
