"""A smaller version of the gate's items, for trying the gate itself over the fake driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu import side_by_side
from benchmarks.gpu.budget_items import budget_changes
from benchmarks.gpu.figures import Item
from benchmarks.gpu.items import COMPUTE, LONE_RIVALS, MIB, RECOMPUTATION, RIVALS, bitwise, other, ours, throughput
from benchmarks.gpu.machine_items import demo, doctor, driver_calls, preflight, sanitizer
from benchmarks.gpu.recompute_items import recomputation

_FAKE: dict[str, Any] = {"preset": "small", "num_steps": 5}

FAKE_ITEMS: tuple[Item, ...] = (
    Item(name="preflight", limit_s=90, measure=preflight),
    Item(name="doctor", limit_s=90, measure=doctor),
    Item(name="demo", limit_s=300, measure=demo),
    Item(name="driver calls", limit_s=60, measure=driver_calls),
    Item(name="bitwise conv_stack", limit_s=470, measure=bitwise("conv_stack", preset="small", chunk_nbytes=64 << 10)),
    Item(
        name="bits of other models, side by side",
        limit_s=300,
        measure=side_by_side.workloads(
            (("gpt", "adamw_foreach", 0.6), ("tied_frozen", None, 0.7)),
            preset="small",
            chunk_nbytes=64 << 10,
            host_nbytes=256 << 20,
        ),
    ),
    Item(
        name="bits of programs, side by side",
        limit_s=300,
        measure=side_by_side.programs(("experts", "adversarial")),
    ),
    Item(name="sanitizer", limit_s=120, measure=sanitizer("conv_stack")),
    Item(
        name="budget changes conv_stack",
        limit_s=300,
        measure=budget_changes("conv_stack", preset="small", chunk_nbytes=64 << 10),
    ),
    Item(
        name="recomputation conv_stack",
        limit_s=470,
        measure=recomputation("conv_stack", preset="small", chunk_nbytes=64 << 10),
    ),
    Item(
        name="rivals conv_stack",
        limit_s=470,
        measure=throughput(
            "conv_stack", (8,), 3 * MIB, (other("in_core"), *RIVALS, *LONE_RIVALS), **{**_FAKE, "num_steps": 3}
        ),
    ),
    Item(
        name="recomputation and chunk sizes conv_stack",
        limit_s=470,
        measure=throughput(
            "conv_stack",
            (8,),
            3 * MIB,
            (*RECOMPUTATION, *(ours("auto", chunk_nbytes=kib << 10) for kib in (64, 128))),
            **_FAKE,
        ),
    ),
    Item(
        name="throughput conv_stack",
        limit_s=470,
        measure=throughput(
            "conv_stack",
            (8,),
            3 * MIB,
            (
                replace(COMPUTE, fields={**COMPUTE.fields, "budget_nbytes": 4 * MIB}),
                *(ours("window", placement) for placement in ("standing", "remapped", "best_fit")),
            ),
            **_FAKE,
        ),
    ),
    Item(
        name="throughput gpt_1b",
        limit_s=470,
        measure=throughput(
            "gpt_1b",
            (4,),
            6 * MIB,
            (ours("auto"), ours("auto", optimizer="adamw_fused")),
            builds_on_device=True,
            **{**_FAKE, "num_steps": 7},
        ),
    ),
)
"""For trying the gate itself: five to ten processes each, of 4 to 8 s of processor time. The limits are for a machine
on which many others work, too."""
