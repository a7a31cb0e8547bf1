"""The session: trains a model within one byte budget, from its opening to its close.

    with ooc.Session(budget="2GiB") as session:
        model, optimizer = build()
        for batch in loader:
            with session.step():
                ...

A session routes torch's large allocations into a pool of chunks (the budget) and sees every op through a dispatch mode.
Steps first run on demand and are recorded. Once the same sequence was seen twice it is planned, and from then on the
plan is replayed (DESIGN.md section 6). This module is the public face; `ooc.engine` has the parts.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from ooc import _current
from ooc.devices.protocols import Device
from ooc.engine import Engine, open_engine
from ooc.errors import SessionError
from ooc.interop.micro_batches import Reduction, run_micro_batches
from ooc.options import StepBoundary, parse_options
from ooc.reporting.explain import Explanation, explain
from ooc.reporting.report import make_report
from ooc.reporting.statistics import session_stats, step_metrics
from ooc.telemetry.steps import StepLog
from scheduler.plan import Plan
from scheduler.trace import Trace
from vmm.machine import memory_room


class Session:
    """Trains within a byte budget. Open once constructed; use it as a context manager, or `close()` it.

    Args:
        budget: Bytes for all large storages together: an int, or text such as "400MiB".
        device: "cpu", "cuda", "cuda:1", or a device of `ooc.devices`.
        host_budget: On a GPU, bytes of host memory to pin for what is evicted; by default half of what is free.
        store: Directory for the file that evicted bytes go to; not in memory (tmpfs).
        policy: The planner: a name in `scheduler.policies.POLICIES`.
        window_nbytes: Window length of the policy `window`; searched when not given.
        chunk_nbytes: Chunk size; chosen by the budget when not given.
        threshold_nbytes: Storages below this are left to torch's own allocator and not counted.
        debug: Let every touch of an evicted variable fault, so that a missed use cannot pass.
        step_boundary: "explicit": by `step()`; "optimizer": when an optimizer's `step` returns, or where a program has
            none, when a backward pass ends.
        plan_cache: Keep plans on disk and use those of earlier runs (see `ooc.replay.plan_cache`).
        plan: A plan to replay for the step that it was made for, at this budget and chunk size (`ooc plan`); other
            steps are planned by `policy`.
        progress: One line a step to stderr: "never", "auto" (on a terminal), "always".
        recompute: Whether ops may be run again instead of moving what they made, where that is faster. True: from the
            first plan on; ops are tried in learning. None: with `auto` once a plan waits for the store for a tenth of
            its step, with policies that do nothing else always. See `ooc/DESIGN.md`, "Recomputation".
        background_planning: Let another process make plans where training would wait for them for more than 5 % of its
            time; which step is the first that is planned then depends on how long that takes. False: training waits
            for each plan, and the same steps are planned whenever a program runs. None: True, unless the environment
            has `OOC_BACKGROUND_PLANNING=0`.

    Attributes:
        engine: The parts that it is made of; not a stable interface.

    Raises:
        ValueError: The budget is not a size, or less than a chunk; or another argument is not what it must be.
        SessionError: Another session is open.
        vmm.store.StoreUnavailable, vmm.driver.MemoryFault: No store, or not the memory.
        vmm.native_build.NativeBuildError: The native parts cannot be built.

        Whatever is raised, a signal's handler included, leaves nothing behind: no memory, no file, no thread.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        device: str | Device = "cpu",
        host_budget: int | str | None = None,
        store: str | Path | None = None,
        policy: str = "auto",
        window_nbytes: int | str | None = None,
        chunk_nbytes: int | str | None = None,
        threshold_nbytes: int | str | None = None,
        debug: bool = False,
        step_boundary: StepBoundary = "explicit",
        plan_cache: bool = True,
        plan: Plan | None = None,
        progress: str = "never",
        recompute: bool | None = None,
        background_planning: bool | None = None,
    ) -> None:
        _current.check_none_open()
        options = parse_options(
            budget,
            device=device,
            host_budget=host_budget,
            store=store,
            policy=policy,
            window_nbytes=window_nbytes,
            chunk_nbytes=chunk_nbytes,
            threshold_nbytes=threshold_nbytes,
            debug=debug,
            step_boundary=step_boundary,
            plan_cache=plan_cache,
            plan=plan,
            progress=progress,
            recompute=recompute,
            background_planning=background_planning,
        )
        self._thread = threading.get_ident()
        open_engine(options, claim=self._claim, closing=(Session.close.__code__, Session.__exit__.__code__))

    def __repr__(self) -> str:
        return f"<Session {'open' if self.engine.is_open else 'closed'}, budget {self.budget_nbytes} bytes>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        self.engine.runner.refusals.explain(error)
        self.close()

    def _claim(self, engine: Engine) -> None:
        self.engine = engine
        _current.claim(self)

    # -- training

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark one training step. Everything from here to the next `step()` is planned as one period."""
        self._check_open()
        self.engine.check_has_memory("step")
        cycle = self.engine.cycle
        cycle.begin_period()
        cycle.begin_step()
        try:
            yield
        finally:
            cycle.end_step()

    def micro_batch(
        self,
        model: Callable[..., Any],
        loss: Callable[[Any, Any], torch.Tensor],
        batch: tuple[Any, Any],
        *,
        parts: int | None = None,
        size: int | None = None,
        reduction: Reduction = "mean",
    ) -> torch.Tensor:
        """Run forward and backward over a batch in parts that fit, one after the other; gradients add up.

        To be followed by `optimizer.step()`. The gradients are those of plain PyTorch over the same parts, to the last
        bit, and those of the whole batch but for rounding. Not so with batch norm, which computes over the samples of
        a part: a warning says so. `ooc.micro_batches` is the same as a loop, for models of any other form.

        Args:
            model: Called with the inputs of a part: a tensor, or the items of a tuple, list or mapping.
            loss: Called with the model's output and the part's targets; gives a scalar.
            batch: Inputs and targets. See `ooc.micro_batches` for how they are cut.
            parts, size: Number of parts, or samples of a part (as `ooc fit --micro-batch` finds them).
            reduction: How `loss` reduces over samples: "mean" (parts weigh their share of the samples) or "sum".

        Returns:
            The loss of the whole batch: a scalar without a graph.

        Raises:
            ValueError: The batch cannot be cut so.
        """
        self._check_open()
        return run_micro_batches(model, loss, batch, parts=parts, size=size, reduction=reduction)

    @contextmanager
    def resident(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Keep tensors in memory at fixed addresses for the length of the block.

        For code that neither torch's dispatcher nor the replaced functions see: extensions, other
        threads inside a step, system calls. The tensors count as written.

        Raises:
            BudgetTooSmall: They do not fit at once.
            TypeError: One of them is no tensor; a list of them, for one.
        """
        with self.engine.exports.resident(tensors):
            yield

    def set_budget(self, budget: int | str) -> None:
        """Change the budget, between any two ops; memory that is given up is free when this returns.

        What no longer fits moves to the store. A step under way continues on demand, and the next one is planned for
        the new budget. At most the machine's memory, or the device's. On a GPU the host waits for the device first, and
        what is given up is the driver's, for other processes, when this returns. Peaks in reports and `memory_stats`
        start anew; the earlier ones are in `past_budgets` of the report.

        Args:
            budget: As of the session; rounded down to whole chunks. The chunks keep their size.

        Raises:
            ValueError: Not a size, or less than a chunk.
            SessionError: Within an op, or on another thread; what must stay (in `resident()`; on a GPU also what
                `data_ptr` or dlpack gave out, and live blocks below the threshold) does not fit. The budget is as it
                was.
            StoreFailed, vmm.store.StoreFull, vmm.driver.MemoryFault: What must go cannot be written out, or the
                memory for more is not there. The budget is as it was.
        """
        self._check_open()
        self.engine.set_budget(budget)

    @contextmanager
    def yielded(self) -> Iterator[None]:
        """Give all memory back for the length of the block, for other programs; between any two ops.

        Every variable moves to the store, and each comes back to its address. Within the block no op may use a tensor
        of the session (`SessionError`); on a GPU no op may use the device at all, and no other thread either: libraries
        keep workspaces there. Allocations are torch's own in the block, as without a session. Plans are kept.

        Raises:
            SessionError: Within an op, on another thread, or within such a block; something must stay in memory
                (`resident()`; on a GPU also what `data_ptr` or dlpack gave out). Nothing has changed.
            StoreFailed, vmm.store.StoreFull: What must go cannot be written out. Nothing has changed.
            vmm.driver.MemoryFault: At the end, the memory is not there any more. Nothing is lost: all is in the store,
                and `set_budget` takes memory when there is some.
        """
        self._check_open()
        with self.engine.yielded():
            yield

    def cupy_allocator(self) -> Callable[[int], Any]:
        """An allocator for `cupy.cuda.set_allocator`, within this session's budget (see `ooc.interop.cupy_pool`)."""
        self._check_open()
        return self.engine.cupy_allocator()

    def close(self, *, bring_back: bool = True) -> None:
        """End the session. Idempotent.

        Args:
            bring_back: Variables that are still alive become ordinary memory, however much that
                is. If False, they stay where they are, in the session's pool or in the store's file, and both stay
                until they are freed: for a process that is about to exit. On a GPU they are lost then, and touching
                one of them ends the process.
        """
        self.engine.close(bring_back=bring_back)

    # -- what a user may look at

    @property
    def budget_nbytes(self) -> int:
        """The present budget."""
        return self.engine.budget_nbytes

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk in bytes."""
        return self.engine.options.chunk_nbytes

    @property
    def threshold_nbytes(self) -> int:
        """Size from which on storages are managed; smaller ones are left to torch's own allocator."""
        return self.engine.options.threshold_nbytes

    @property
    def policy(self) -> str:
        """Name of the policy that plans."""
        return self.engine.options.policy

    @property
    def steps(self) -> StepLog:
        """The log of finished steps."""
        return self.engine.steps

    def trace(self) -> Trace | None:
        """The trace of the sequence planned last, if any."""
        return self.engine.sequences.last_trace

    def plan(self) -> Plan | None:
        """The plan made last, if any."""
        return self.engine.sequences.last_plan

    def report(self, *, with_timeline: bool = False) -> dict[str, Any]:
        """The session so far as plain data (see `ooc run --report`).

        Args:
            with_timeline: Also the last step that was replayed to its end: its trace, its plan, and when
                each op and each transfer started and stopped (for `ooc report`).
        """
        report = make_report(self.engine)
        if with_timeline:
            with self.engine.lock:
                report["timeline"] = self.engine.timeline.document()
        return report

    def explain(self, what: torch.Tensor | str) -> Explanation:
        """Where a tensor is, when it moves in the plan that is being replayed, and why.

        Args:
            what: A tensor, or a name as a module or optimizer gives it: "blocks.0.weight",
                "gradient of blocks.0.weight", "exp_avg of blocks.0.weight". Names are looked up among
                all modules and optimizers of the process; with several models they begin with the
                model's class.

        Raises:
            ValueError: There is no tensor of this name.
            TypeError: It is neither a tensor nor a name.
        """
        self._check_open()
        with self.engine.lock:
            self.engine.runner.absorb()
            return explain(self.engine, what)

    def memory_stats(self) -> dict[str, int]:
        """See `ooc.memory_stats`."""
        return session_stats(self.engine)

    def metrics(self) -> dict[str, float]:
        """The last step as scalars, for TensorBoard or similar: `for key, value in session.metrics().items()`."""
        return step_metrics(self.engine)

    def counters(self) -> dict[str, int]:
        """Counters since the session was opened, by name: bytes moved, nanoseconds waited, numbers of events."""
        return self.engine.steps.counters()

    def _check_open(self) -> None:
        if not self.engine.is_open:
            raise SessionError("this session is closed; open a new one")
        if threading.get_ident() != self._thread:
            raise SessionError("a session's steps belong to the thread that opened it")


@atexit.register  # after `vmm.transfers` has registered the end of its threads, so that this runs before it
def _close_at_exit() -> None:
    """Close the session that is open when the interpreter exits; what is alive can be used until the very end.

    It comes after the program's own functions of this kind. Nothing is copied, but on a GPU: there it is brought back,
    if that takes no more memory than the budget and the machine has it to spare. A session of another thread is left
    alone.
    """
    session = _current.session
    if not isinstance(session, Session) or threading.get_ident() != session._thread:
        return
    nbytes = 0 if session.engine.memory.is_host else session.engine.live_nbytes()
    fits = 0 < nbytes <= session.budget_nbytes and 2 * nbytes <= memory_room().available_nbytes
    session.close(bring_back=fits)
