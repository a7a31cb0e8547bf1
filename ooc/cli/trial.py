"""Runs one training in a child process, which reports each step as a JSON line.

    python -m ooc.cli.trial '{"workload": "gpt", "budget_nbytes": 200000000, ...}'

The demo and the benchmarks start such trials and compare them. In a process of its own, the kernel's
count of memory is that of the trial alone.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from ooc import models
from ooc.cli.memory_group import MeasuredProcess

ERROR_EXIT_CODE = 1
NO_ALGORITHM = "does not have a deterministic implementation"
"""What torch says of an op, where algorithms must be deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """What a trial trains, and how.

    Attributes:
        workload, preset, sizes: For `ooc.models.get`. The workload `"baseline"` is a model of a few
            bytes: what the process takes before there is anything to train.
        optimizer: Empty: the workload's own.
        budget_nbytes: Train out of core within this; None: in core.
        num_threads: None: torch's default.
        wants_curves: Report memory over the planned step, too.
        device: "cpu", "cuda" or "cuda:1"; "fake": a session's memory is a fake device's, and all else the host's.
    """

    workload: str
    preset: models.Preset = "full"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    num_steps: int
    seed: int = 0
    num_threads: int | None = None
    budget_nbytes: int | None = None
    store: str | None = None
    policy: str = "auto"
    wants_curves: bool = False
    device: str = "cpu"

    @property
    def tensors_on(self) -> torch.device:
        """Where the model is."""
        return torch.device("cpu" if self.device == "fake" else self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStep:
    """One finished step. `loss` is the float32 loss as `float.hex` writes it: all its bits."""

    index: int
    loss: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A finished trial, as its parent sees it.

    Attributes:
        peak_nbytes: The process's peak memory by the kernel; `source` says how it was counted.
        report: The session's report; empty in core.
        curves: `live` and `resident`, as in `ooc.reporting.memory_curves`, over the time that
            `planned_median_s` says; empty unless asked for.
        device_nbytes: Where the model is on a GPU, the most memory of it in use after a step, by the driver's count:
            that of other processes and of the context included. Else 0.
        tensors_nbytes: There, the most memory in tensors, by torch's count. Else 0.
    """

    steps: tuple[TrialStep, ...]
    peak_nbytes: int
    source: str
    report: Mapping[str, Any]
    curves: Mapping[str, list[tuple[float, int]]]
    device_nbytes: int = 0
    tensors_nbytes: int = 0

    @property
    def losses(self) -> tuple[str, ...]:
        """All losses, bit for bit."""
        return tuple(step.loss for step in self.steps)


class TrialFailed(RuntimeError):
    """Raised when the child did not finish: with its own error, or how it ended."""


def train(
    workload: models.Workload,
    *,
    num_steps: int,
    optimizer: str = "",
    seed: int = 0,
    step_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    transform: Callable[[nn.Module], nn.Module] = lambda model: model,
    device: torch.device | None = None,
) -> Iterator[TrialStep]:
    """Train `workload` and yield each step as it ends. `device`: None: the host."""
    torch.manual_seed(seed)
    model = transform(workload.build())
    if device is not None:
        model.to(device)
    stepper = workload.make_optimizer(model, optimizer or None)
    for index in range(num_steps):
        started = time.perf_counter()
        with step_context():
            loss = workload.loss(model, _moved(workload.make_batch(index), device))
            loss.backward()
            stepper.step()
            stepper.zero_grad(set_to_none=True)
            bits = loss.item().hex()
            del loss
        yield TrialStep(index=index, loss=bits, duration_s=time.perf_counter() - started)


def _moved(batch: models.Batch, device: torch.device | None) -> models.Batch:
    return batch if device is None else tuple(tensor.to(device) for tensor in batch)


def run_trial(
    options: TrialOptions,
    *,
    on_step: Callable[[TrialStep], None] | None = None,
    environment: dict[str, str] | None = None,
) -> TrialResult:
    """Run a trial in a child process, and measure the child.

    Raises:
        TrialFailed: With the child's own error message.
    """
    command = [sys.executable, "-m", "ooc.cli.trial", json.dumps(asdict(options))]
    return follow_trial(command, on_step=on_step, environment=environment)


def follow_trial(
    command: list[str],
    *,
    on_step: Callable[[TrialStep], None] | None = None,
    environment: dict[str, str] | None = None,
    limit_nbytes: int | None = None,
) -> TrialResult:
    """Run `command`, which speaks this module's JSON lines, and measure it.

    Args:
        limit_nbytes: Limit the child to this by a memory control group.

    Raises:
        TrialFailed: With the child's own error message.
        ooc.cli.memory_group.MemoryGroupUnavailable: A limit was asked for, and cannot be had here.
    """
    steps: list[TrialStep] = []
    last: dict[str, Any] = {}
    with MeasuredProcess(command, environment=environment, limit_nbytes=limit_nbytes) as child:
        assert child.process.stdout is not None
        for line in child.process.stdout:
            event = json.loads(line)
            if event["event"] == "step":
                steps.append(TrialStep(**{f.name: event[f.name] for f in fields(TrialStep)}))
                if on_step is not None:
                    on_step(steps[-1])
            else:
                last = event
        code = child.process.wait()
        peak_nbytes, source = child.peak_nbytes(), child.source
    if last.get("event") != "done" or code != 0:
        raise TrialFailed(last.get("message") or f"the process ended with exit code {code} after {len(steps)} steps")
    return TrialResult(
        steps=tuple(steps),
        peak_nbytes=peak_nbytes,
        source=source,
        report=last["report"],
        curves=last["curves"],
        device_nbytes=last.get("device_nbytes", 0),
        tensors_nbytes=last.get("tensors_nbytes", 0),
    )


def planned_median_s(report: Mapping[str, Any]) -> float | None:
    """The median time of the planned steps of a session's report; None if there was none."""
    durations = [row["duration_s"] for row in report["steps"] if row["mode"] == "planned"]
    return statistics.median(durations) if durations else None


def tell(event: str, **body: Any) -> None:
    """Send one JSON line to the parent."""
    print(json.dumps({"event": event, **body}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the trial that the first argument describes, as the child process."""
    (text,) = arguments if arguments is not None else sys.argv[1:]
    options = TrialOptions(**json.loads(text))
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    settle_vector_functions()
    try:
        if options.tensors_on.type == "cuda":
            _train_deterministically(options)
        else:
            _train(options)
    except (RuntimeError, ValueError, OSError) as error:
        tell("error", message=str(error), type=type(error).__name__)
        return ERROR_EXIT_CODE
    return 0


def settle_vector_functions() -> None:
    """Let MKL's vector functions (`sqrt`, `exp`, `tanh`) set themselves up, on one thread.

    They do so in the first call of a process. If several threads make that, as Adam's first `sqrt` of a large tensor
    does, some elements may be less exact (by up to 3e-4, in 2 of 60 processes): two runs of plain PyTorch differ then.
    """
    torch.ones(8).exp()


def _train_deterministically(options: TrialOptions) -> None:
    """On a GPU two runs of one program differ in bits, unless torch is told that they must not.

    A model with an op that has no deterministic algorithm fails in its first step, and trains anew with a warning
    instead: not at once, since torch then takes the fast algorithm also where it has another (attention).
    """
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    try:
        _train(options)
    except RuntimeError as error:
        if NO_ALGORITHM not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        _train(options)


def _train(options: TrialOptions) -> None:
    if options.budget_nbytes is None:
        _train_in_core(options)
    else:
        _train_out_of_core(options, options.budget_nbytes)


def _train_in_core(options: TrialOptions) -> None:
    if options.tensors_on.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"--device {options.device}: torch ({torch.__version__}) sees no CUDA device.\n"
            "  Options: ooc doctor --device cuda says what is missing; --device cpu."
        )
    used = _DeviceUse(options.tensors_on)
    for step in train(_workload(options), **_how(options)):
        used.look()
        tell("step", **asdict(step))
    tell("done", report={}, curves={}, **used.told())


def _train_out_of_core(options: TrialOptions, budget_nbytes: int) -> None:
    from ooc.reporting.memory_curves import Curve, step_curves
    from ooc.session import Session

    used = _DeviceUse(options.tensors_on)
    device: Any = options.device
    if device == "fake":
        from ooc.testing.fake_device import FakeCudaDevice

        device = FakeCudaDevice(host_budget=256 << 20)
    with Session(
        budget_nbytes, store=options.store, policy=options.policy, device=device, background_planning=False
    ) as session:
        for step in train(_workload(options), **_how(options), step_context=session.step):
            used.look()
            tell("step", **asdict(step))
        report = session.report(with_timeline=options.wants_curves)
        curves: dict[str, Curve] = {}
        if options.wants_curves:
            curves = step_curves(report, session.trace(), duration_s=planned_median_s(report))
            del report["timeline"]
        told = used.told()
    tell("done", report=report, curves=curves, **told)


class _DeviceUse:
    """The most of a GPU's memory that was seen in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nbytes = 0

    def look(self) -> None:
        """Take a sample."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._nbytes = max(self._nbytes, total - free)

    def told(self) -> dict[str, int]:
        """The figures for the parent."""
        if self._device.type != "cuda":
            return {}
        return {"device_nbytes": self._nbytes, "tensors_nbytes": torch.cuda.max_memory_allocated(self._device)}


def _how(options: TrialOptions) -> dict[str, Any]:
    found: dict[str, Any] = {"num_steps": options.num_steps, "optimizer": options.optimizer, "seed": options.seed}
    return found | ({"device": options.tensors_on} if options.tensors_on.type != "cpu" else {})


def _workload(options: TrialOptions) -> models.Workload:
    if options.workload != "baseline":
        return models.get(options.workload, options.preset, **options.sizes)
    return models.get("tiny_ops", "small", num_links=1)


if __name__ == "__main__":
    sys.exit(main())
