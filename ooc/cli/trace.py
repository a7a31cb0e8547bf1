"""`ooc trace`: records one step of an unmodified script as a trace.

The script becomes `__main__`, as for `ooc run`, and is ended as soon as two successive steps were the same, by an
exception that no `except Exception` catches. There are two ways to record:

* in a session within a budget, on demand: real ops, real times, temporaries seen;
* on fake tensors (`ooc.tracing.fake_tensors`): no memory, no arithmetic, times from a device profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ooc.cli import run as runner
from ooc.errors import OocError
from ooc.tracing.fake_tensors import FakeRecording
from ooc.tracing.observed import NEED, need_nbytes
from scheduler.profiles import Profile
from scheduler.trace import Trace
from vmm.driver import MemoryFault
from vmm.machine import memory_room
from vmm.native_build import NativeBuildError
from vmm.store import StoreError

_NO_STEP = (
    "two successive equal steps are needed, each ended by an optimizer's step() (after the first one, in which the "
    "optimizer makes its state). Options: let the script run more steps; the same batch shape in each."
)

# What a step is recorded in where nothing is said. All of a pool's pages are made when it opens, 5 ms for 2 MiB on a
# busy machine (half of 21 GiB took 107 s for a script that needs 131 MiB); what does not fit is moved, as ever.
MOST_NBYTES = 2 << 30


class RecordingFailed(RuntimeError):
    """Raised when no step was recorded: the script ended early, or the session could not be opened."""


class _Recorded(BaseException):
    """Ends the script: the step is recorded."""


def record_fake(
    target: str,
    arguments: Sequence[str],
    *,
    profile: Profile,
    is_module: bool = False,
    budget_nbytes: int | None = None,
) -> Trace:
    """Record a step of a script on fake tensors. To be called once in a process.

    Args:
        target, arguments, is_module: As `ooc.cli.run.run`.
        profile: The device profile that gives the trace its op times.
        budget_nbytes: Split large ops as a session of this budget would.

    Raises:
        ooc.cli.run.RunError: There is no such script.
        RecordingFailed: The script ended before two steps agreed.
        BaseException: What the script raises.
    """
    program = _find(target, is_module)
    recording = FakeRecording(profile, budget_nbytes=budget_nbytes)

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if recording.boundary(optimizer):
            raise _Recorded

    with recording:
        _run_script(program, target, arguments, stepped)
    if recording.trace is None:
        raise RecordingFailed(f"{target} ended after {recording.num_steps} optimizer steps; {_NO_STEP}")
    return replace(recording.trace, metadata={**recording.trace.metadata, "script": [target, *arguments]})


def record_real(
    target: str, arguments: Sequence[str], *, budget: int | str | None = None, is_module: bool = False, **session: Any
) -> Trace:
    """Record a step of a script by running it on demand within a budget. To be called once in a process.

    Args:
        target, arguments, is_module: As `ooc.cli.run.run`.
        budget: The session's; None: half of the memory that is available, at most `MOST_NBYTES`.
        session: Further arguments of `Session`.

    Raises:
        ooc.cli.run.RunError: There is no such script.
        RecordingFailed: The session cannot be opened, or the script ended before two steps agreed.
        BaseException: What the script raises.
    """
    from ooc.session import Session

    program = _find(target, is_module)
    if budget is None:
        available = memory_room().available_nbytes
        if available is None:
            raise RecordingFailed("cannot tell how much memory is available. Options: --budget SIZE.")
        budget = max(min(available // 2, MOST_NBYTES) >> 21 << 21, 1 << 21)
    try:
        opened = Session(budget, step_boundary="optimizer", policy="on_demand", plan_cache=False, **session)
    except (ValueError, TypeError, OocError, StoreError, MemoryFault, NativeBuildError) as error:
        raise RecordingFailed(str(error)) from error

    def stepped(*_: object) -> None:
        if opened.trace() is not None:
            raise _Recorded

    try:
        _run_script(program, target, arguments, stepped)
        trace = opened.trace()
        need = max(map(need_nbytes, opened.engine.sequences.earlier_traces()), default=0)
        num_steps, unplannable = opened.steps.num_steps, list(opened.engine.learned()["unplannable"].values())
    finally:
        opened.close(bring_back=False)
    if trace is None:
        reason = f" The planner said: {unplannable[0]}" if unplannable else ""
        raise RecordingFailed(f"{target} ended after {num_steps} steps; {_NO_STEP}{reason}")
    metadata = {
        "recorded": "a run on demand",
        "torch": torch.__version__,
        "budget_nbytes": opened.budget_nbytes,
        NEED: need,
        "threshold_nbytes": opened.threshold_nbytes,
        "script": [target, *arguments],
    }
    return replace(trace, metadata={**trace.metadata, **metadata})


def _find(target: str, is_module: bool) -> Any:
    return runner._find_module(target) if is_module else runner._find_script(target)


def _run_script(program: Any, target: str, arguments: Sequence[str], stepped: Callable[..., None]) -> None:
    """Run the script until its step is recorded, or until it ends."""
    hook = register_optimizer_step_post_hook(stepped)
    try:
        runner._execute(program, target, arguments)
    except (_Recorded, SystemExit):
        return
    finally:
        hook.remove()
