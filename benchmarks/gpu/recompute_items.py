"""Items about recomputation on a device: bits where a plan runs ops again, and how often it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.child import Order
from benchmarks.gpu.figures import Figure, Measure, Shell, equal_steps, failed, share_nbytes

_MIB = 1 << 20
_SHARE = 0.75
"""Of the peak: policies that only recompute find no plan for much less."""


def recomputation(
    workload: str,
    *,
    policies: Sequence[tuple[str, bool]] = (("sublinear", False), ("sublinear", True), ("auto", False)),
    preset: Any = "full",
    chunk_nbytes: int = 2 << 20,
    host_nbytes: int = 2 << 30,
) -> Measure:
    """Trains by policies that recompute, in debug mode too where the pair says so: the bits of the run in core."""

    def measure(shell: Shell) -> Iterable[Figure]:
        order = Order(workload=workload, preset=preset, digests=True, warns=True, host_budget_nbytes=host_nbytes)
        expected = shell.train(order)
        if "error" in expected:
            yield failed("in core", expected)
            return
        budget_nbytes = share_nbytes(expected, _SHARE, chunk_nbytes, least=4)
        for policy, debug in policies:
            name = f"{policy}, debug" if debug else policy
            fields = {"policy": policy, "debug": debug, "budget_nbytes": budget_nbytes, "chunk_nbytes": chunk_nbytes}
            answer = shell.train(replace(order, variant="ours", recompute=True, **fields))
            if "error" in answer:
                yield failed(name, answer)
                continue
            yield from _judged(name, expected, answer, must_recompute=policy != "auto")

    return measure


def _judged(name: str, expected: dict[str, Any], answer: dict[str, Any], *, must_recompute: bool) -> Iterable[Figure]:
    modes = ", ".join(step["mode"] for step in answer["steps"])
    yield equal_steps(name, expected, answer, note=f"modes {modes}")
    last = answer["steps"][-1]
    must_recompute = must_recompute and not answer.get("unplannable")
    notes = [f"{last['recomputed_nbytes'] / _MIB:.0f} MiB, loaded {last['loaded_nbytes'] / _MIB:.0f} MiB"]
    notes += [f"never run again: {op}, {why}" for op, why in answer.get("not_replayable", {}).items()]
    yield Figure(
        variant=name,
        metric="re-runs in the last step",
        unit="",
        value=last["num_reruns"],
        is_good=(last["num_reruns"] > 0 and last["mode"] == "planned") if must_recompute else None,
        note="; ".join([*notes, *answer.get("unplannable", ())]),
    )
