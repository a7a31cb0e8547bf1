"""`ooc demo --device cuda`: trains on a GPU in core, then within a budget, and compares losses, memory and time.

It prints plain lines, since an image for GPUs may have no packages but torch.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from dataclasses import replace

from ooc.cli.trial import TrialFailed, TrialOptions, TrialResult, TrialStep, run_trial
from ooc.units import MIB, format_duration, format_nbytes, parse_nbytes

__all__ = ["main"]

_NUM_STEPS = 12
_MEASURING_STEPS = 4
"""Enough for two equal steps after the one in which the optimizer makes its state."""
_SHARE = 0.5
"""The default budget, as a share of what the step needs in core: chunks of 2 MiB leave small models less room."""
_CHUNK_NBYTES = 2 * MIB
_PLENTY_NBYTES = 1024 * MIB
"""A pool that holds the step, for the fake, where only a session can tell what a step needs."""
_WORKLOADS = {"gpt": "gpt", "resnet50": "resnet50", "vgg16": "vgg16_cifar", "lstm": "lstm", "bert": "bert"}


def main(
    *,
    model: str = "gpt",
    budget: str | None = None,
    num_steps: int | None = None,
    store: str | None = None,
    device: str = "cuda",
) -> int:
    """Run the demo and print what came out. Returns 0 if all losses are equal to the last bit, 2 for a bad argument.

    Args:
        model: One of `ooc demo`'s.
        budget: By default half of what a step needs in core.
        num_steps: Steps of each run.
        store: Directory for the file behind host memory.
        device: "cuda", "cuda:1"; "fake", to try the demo with a small version of the model.
    """
    if model not in _WORKLOADS:
        return _refuse(f"no model is called {model!r}. Options: {', '.join(_WORKLOADS)}.")
    if re.fullmatch(r"cuda(:\d+)?|fake", device) is None:
        return _refuse(f"--device {device}: there is no such device. Options: cpu, cuda, cuda:1.")
    if num_steps is not None and num_steps < _MEASURING_STEPS:
        return _refuse(f"--steps {num_steps} leaves no planned step. Options: at least {_MEASURING_STEPS}.")
    options = TrialOptions(
        workload=_WORKLOADS[model],
        preset="small" if device == "fake" else "full",
        num_steps=num_steps or _NUM_STEPS,
        store=store,
        device=device,
    )
    try:
        in_core = _run("in core", options)
        budget_nbytes = parse_nbytes(budget, what="budget") if budget is not None else _half(options, in_core)
        out_of_core = _run(f"within {format_nbytes(budget_nbytes)}", replace(options, budget_nbytes=budget_nbytes))
    except (TrialFailed, ValueError, OSError) as error:
        print(f"ooc demo: {error}", file=sys.stderr)
        return 1
    _tell(in_core, out_of_core, budget_nbytes)
    return 0 if in_core.losses == out_of_core.losses else 1


def _refuse(message: str) -> int:
    print(f"ooc demo: {message}", file=sys.stderr)
    return 2


def _run(name: str, options: TrialOptions) -> TrialResult:
    def on_step(step: TrialStep) -> None:
        loss = float.fromhex(step.loss)
        print(f"{name}, step {step.index}: loss {loss:.6f}, {format_duration(step.duration_s)}", flush=True)

    # A setting of cuBLAS, so that equal programs have equal bits.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    return run_trial(options, on_step=on_step, environment=environment)


def _half(options: TrialOptions, in_core: TrialResult) -> int:
    """Half of what a step needs, in whole chunks."""
    needed = in_core.tensors_nbytes
    if not needed:
        measuring = replace(options, num_steps=_MEASURING_STEPS, budget_nbytes=_PLENTY_NBYTES)
        needed = _run("measured", measuring).report["in_core_peak_nbytes"]
    return max(int(needed * _SHARE) // _CHUNK_NBYTES, 2) * _CHUNK_NBYTES


def _tell(in_core: TrialResult, out_of_core: TrialResult, budget_nbytes: int) -> None:
    rows = out_of_core.report["steps"]
    planned = [row for row in rows if row["mode"] == "planned"]
    equal = sum(a == b for a, b in zip(in_core.losses, out_of_core.losses, strict=True))
    print(f"losses equal to the last bit: {equal} of {len(in_core.losses)}")
    print(f"planned steps: {len(planned)} of {len(rows)}")
    print(f"tensors at the worst moment: {format_nbytes(out_of_core.report['in_core_peak_nbytes'])} needed, ", end="")
    print(f"{format_nbytes(out_of_core.report['peak_nbytes'])} held, budget {format_nbytes(budget_nbytes)}")
    if in_core.device_nbytes:
        used = f"{format_nbytes(in_core.device_nbytes)} in core, {format_nbytes(out_of_core.device_nbytes)} out of core"
        print(f"device memory in use, by the driver, context included: {used}")
    in_core_s = statistics.median(step.duration_s for step in in_core.steps[1:])
    if planned:
        planned_s = statistics.median(row["duration_s"] for row in planned)
        moved = format_nbytes(planned[-1]["evicted_nbytes"])
        print(
            f"time a step: {format_duration(in_core_s)} in core, {format_duration(planned_s)} planned "
            f"({planned_s / in_core_s:.2f} x), {moved} moved out"
        )
    if equal != len(in_core.losses):
        print("The losses differ. That must not happen: please report it with this output.")
