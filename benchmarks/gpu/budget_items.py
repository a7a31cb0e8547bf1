"""Items about budgets that change and memory that is given back: bits, and what the driver has free then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.gpu.child import Order
from benchmarks.gpu.figures import Figure, Measure, Shell, failed, share_nbytes

_MIB = 1 << 20
_SHARE = 1.0
"""The budget as a share of the in-core peak. Half of it must hold the largest op: with cuDNN's workspace, 0.44 of the
conv stack's on an H100."""
_SLACK_NBYTES = 64 << 20
"""Kernels are loaded when they are first used, into memory that the driver counts, too."""


def budget_changes(workload: str, *, preset: Any = "full", chunk_nbytes: int = 2 << 20, num_steps: int = 12) -> Measure:
    """`set_budget` to half and back, and `yielded()`, between steps of one training: the bits of the run in core."""

    def measure(shell: Shell) -> Iterable[Figure]:
        order = Order(
            workload=workload, preset=preset, digests=True, num_steps=num_steps, host_budget_nbytes=2 << 30, warns=True
        )
        expected = shell.train(order)
        if "error" in expected:
            yield failed("in core", expected)
            return
        budget_nbytes = share_nbytes(expected, _SHARE, chunk_nbytes, least=8)
        answer = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes, disturbs=True))
        if "error" in answer:
            yield failed("changing", answer)
            return
        pairs = list(zip(expected["steps"], answer["steps"], strict=True))
        num_equal = sum(a["digest"] == b["digest"] for a, b in pairs)
        yield Figure(
            variant="changing",
            metric=f"steps bit for bit equal, of {len(pairs)}",
            unit="",
            value=num_equal,
            is_good=num_equal == len(pairs),
            note="modes " + ", ".join(step["mode"] for step in answer["steps"]),
        )
        for found in answer["disturbances"]:
            off_nbytes = abs(found["nbytes"] - found["expected_nbytes"])
            yield Figure(
                variant=found["act"],
                metric="the driver has more free, by its own count",
                unit="MiB",
                value=found["nbytes"] / _MIB,
                is_good=off_nbytes <= _SLACK_NBYTES,
                note=f"expected {found['expected_nbytes'] / _MIB:.1f} MiB",
            )

    return measure
