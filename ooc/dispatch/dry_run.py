"""Runs the rest of a step without data, when one of its ops did not fit, to name a budget that will do.

The error's traceback has the outermost module that was being called, and its arguments. Its call is made again from the
beginning on tensors without data (`ooc.tracing.fake_tensors`), then the backward pass, then the step of each optimizer
for its largest parameter. A loss that is computed outside of the module is guessed at three times the module's output:
what it was made of, the gradient, and the gradient's source (`log_softmax`, `mse_loss`).

The module is used as it is, with parameters and buffers replaced for the length of the call. Whatever the call changes
is put back: the modules' attributes, one level deep, and the states of random number generators. Nothing is printed.
What else a `forward` changes (a file, a counter elsewhere) is changed once more. Nothing is run where a process group
is open, since a `forward` may wait for other ranks, or where code is compiled.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import random
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ooc.dispatch.expected_need import ExpectedNeed, backward_needs
from ooc.tracing.own_memory import own_memory
from scheduler.budget import smallest_num_chunks
from scheduler.plan import Machine
from scheduler.profiles import load_profile
from scheduler.trace import Trace

if TYPE_CHECKING:
    from ooc.tracing.fake_tensors import FakeRecording

_MOST_OPS = 20_000
"""A dry run ends after so many ops (a loop whose end depends on values may never): 5 to 15 s of them."""

_LOSS_OUTPUTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a dry run has to know of the moment at which an op did not fit.

    Attributes:
        budget_nbytes, chunk_nbytes, threshold_nbytes: The session's.
        has_gradients: Whether gradients were recorded, or a backward pass was under way.
        autocast_dtype: Of the CPU, where autocast was on.
        optimizers: Those that have parameters in the session.
        created_nbytes: What the op was to make out of nothing; 0: it has operands.
    """

    budget_nbytes: int
    chunk_nbytes: int
    threshold_nbytes: int
    has_gradients: bool
    autocast_dtype: torch.dtype | None
    optimizers: tuple[weakref.ref[torch.optim.Optimizer], ...]
    created_nbytes: int

    def look_ahead(self, traceback: TracebackType) -> tuple[int, str] | None:
        """What the step needs at once, and what for. None: nobody can say."""
        found = None
        with contextlib.suppress(Exception):  # a guess, about a step that has failed: no reason to fail otherwise
            found = self._look_ahead(traceback)
        return (found.nbytes, found.reason) if found is not None else None

    def _look_ahead(self, traceback: TracebackType) -> ExpectedNeed | None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None
        call = _outermost_call(traceback)
        if call is not None and any(map(_is_compiled, call.module.modules())):
            return None
        optimizers = [found for ref in self.optimizers if (found := ref()) is not None]
        if call is None and not optimizers:
            if self.created_nbytes and _is_in_constructor(traceback):
                return ExpectedNeed(nbytes=2 * self.created_nbytes, reason="a parameter and its gradient (a guess)")
            return None
        with _disable_current_modes(), _all_put_back(call.module if call is not None else None):
            needs = [self._need_of_call(call)] if call is not None else []
            needs += [self._need_of_step(optimizer) for optimizer in optimizers]
        what = "its optimizer's step" if call is None else f"a run of {type(call.module).__name__} without data"
        return ExpectedNeed(nbytes=max(needs), reason=f"the rest of the step, by {what} (a guess)")

    def _need_of_call(self, call: _Call) -> int:
        """What the call needs, and its backward pass. As far as it gets, if an op is not known without data."""
        recording = self._recording()
        losses: list[torch.Tensor] = []
        is_whole = False
        loss_nbytes = 0
        with contextlib.suppress(Exception), recording:
            tensors = {name: recording.faked(t) for name, t in _named_tensors(call.module)}
            args, kwargs = tree_map(
                lambda value: recording.faked(value) if isinstance(value, torch.Tensor) else value,
                (call.args, call.kwargs),
            )
            with (
                torch.set_grad_enabled(self.has_gradients),
                torch.autocast("cpu", dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None),
            ):
                made = torch.func.functional_call(call.module, tensors, args, kwargs)
            outputs = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]
            losses = [t for t in outputs if t.numel() == 1] or outputs
            if losses and losses[0].numel() > 1:
                chunks = -(-max(t.numel() * t.element_size() for t in losses) // self.chunk_nbytes)
                loss_nbytes = _LOSS_OUTPUTS * chunks * self.chunk_nbytes
            if losses:
                wanted = [t for t in tree_leaves((tensors, args, kwargs)) if isinstance(t, torch.Tensor)]
                _go_back(losses, [t for t in wanted if t.requires_grad])
            is_whole = True
        trace = recording.so_far()
        needs = [self._need_of(trace), loss_nbytes]
        if not is_whole and self.has_gradients:
            needs += backward_needs(trace)
        return max(needs)

    def _need_of_step(self, optimizer: torch.optim.Optimizer) -> int:
        """What an optimizer's step needs: two steps, since the first one makes its state."""
        recording = self._recording()
        with contextlib.suppress(Exception), recording:
            step = type(optimizer).step
            if getattr(step, "hooked", False):
                step = step.__wrapped__  # without the hooks that say that a step has been made
            twin = _twin(optimizer, recording)
            for _ in range(2):
                step(twin)
        return self._need_of(recording.so_far())

    def _recording(self) -> FakeRecording:
        from ooc.tracing.fake_tensors import FakeRecording  # takes a second, and most sessions have no such error

        return FakeRecording(
            load_profile("desktop"),
            budget_nbytes=self.budget_nbytes,
            threshold_nbytes=self.threshold_nbytes,
            own_nbytes=own_memory,
            most_ops=_MOST_OPS,
            allow_fallbacks=False,
        )

    def _need_of(self, trace: Trace) -> int:
        machine = Machine(chunk_nbytes=self.chunk_nbytes, num_chunks=1, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
        return smallest_num_chunks(trace, machine) * self.chunk_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A module's call."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _outermost_call(traceback: TracebackType | None) -> _Call | None:
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is nn.Module._call_impl.__code__:
            known = frame.f_locals
            return _Call(module=known["self"], args=tuple(known["args"]), kwargs=dict(known["kwargs"]))
        traceback = traceback.tb_next
    return None


def _is_in_constructor(traceback: TracebackType | None) -> bool:
    """Whether a module was being made."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        traceback = traceback.tb_next
    return False


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__module__.startswith("torch._dynamo")


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _go_back(losses: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Run the backward pass, accumulating nothing.

    By the engine itself: `torch.autograd.grad` is replaced in a session, and counts as the program's.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(losses),
        tuple(torch.ones_like(loss) for loss in losses),
        False,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def _twin(optimizer: torch.optim.Optimizer, recording: FakeRecording) -> torch.optim.Optimizer:
    """The optimizer before its first step, over the largest parameter of each group and its gradient without data."""

    def faked(value: Any) -> Any:
        return recording.faked(value.detach()) if isinstance(value, torch.Tensor) else value

    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[])
    for group in optimizer.param_groups:
        parameter = max(group["params"], key=lambda p: p.numel() * p.element_size())
        own = faked(parameter).requires_grad_()
        own.grad = torch.empty_like(own)
        twin.param_groups.append({**group, "params": [own]})
    return twin


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Nothing that torch logs on this thread is shown meanwhile: it tells at length where fake tensors fail."""
    thread = threading.get_ident()

    def is_anothers(record: logging.LogRecord) -> bool:
        return record.thread != thread

    names = [name for name in list(logging.Logger.manager.loggerDict) if name.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_anothers)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_anothers)


@contextlib.contextmanager
def _all_put_back(module: nn.Module | None) -> Iterator[None]:
    """Puts back what a call may change besides tensors; nothing is printed meanwhile."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    attributes = [_Attributes(part) for part in module.modules()] if module is not None else []
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
            _unlogged(),
        ):
            yield
    finally:
        for saved in attributes:
            saved.put_back()
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class _Attributes:
    """A module's attributes as they were; of lists, dictionaries and sets also what they held."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(vars(module))
        kinds = (list, dict, set, deque)
        self._held = [(value, copy.copy(value)) for value in self._values.values() if isinstance(value, kinds)]

    def put_back(self) -> None:
        for value, before in self._held:
            value.clear()
            value.extend(before) if isinstance(value, list | deque) else value.update(before)
        own = vars(self._module)
        own.clear()
        own.update(self._values)
