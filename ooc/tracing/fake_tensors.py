"""Records a step without running it, with fake tensors, which have sizes and no bytes.

Under torch's `FakeTensorMode` a model larger than the machine is built and stepped in seconds, and a dispatch
mode above it notes each op with its storages and the life of each storage, as `ooc.tracing.recorder` does for a step
that runs. What that cannot know, the trace's metadata says:

* an op's internal temporaries (oneDNN's layout copies) are not seen, so the floor of the budget is too low by them;
* times come from a device profile: arithmetic and bytes of each op, kept in the trace for other devices;
* a script that asks for a value (`.item()`) gets 1 (or False): fine for logging, wrong where it decides what runs.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ooc.tracing import op_semantics as ops
from ooc.tracing.call_sites import CallSites
from ooc.tracing.composites import is_made_of_others, take_apart
from ooc.tracing.gradients import raw_gradient
from ooc.tracing.observed import NEED, Observed, close_cycle, need_nbytes
from ooc.tracing.own_memory import OwnMemory
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import StepRecorder
from scheduler.profiles import Profile
from scheduler.trace import Trace
from vmm.table import between_ops, inside_op
from vmm.torch_cpu import ALLOC, FREE, GRANULE_NBYTES, Event

_log = logging.getLogger(__name__)

# As in a session: list ops and convolution_backward run in parts when their operands exceed this part of the budget.
_SPLIT_FRACTION = 8
_NEVER_SPLIT = 1 << 62
MOST_SETUP_OPS = 1 << 16
"""Ops before the first step that are kept at once, to see what they need: about 1 KiB each."""


@dataclass(slots=True, eq=False)
class _Storage:
    """A live fake storage, with what the recorder reads of records. Its address is made up and unique."""

    address: int
    nbytes: int
    kind: str = ""
    label: str = ""
    seen: bool = True
    origin: None = None
    birthplace: None = None

    @property
    def serial(self) -> int:
        """Order of allocation."""
        return self.address


class RecordingTooLong(RuntimeError):
    """Raised by the op that is one too many."""


class FakeRecording:
    """Records steps of fake tensors until two in a row agree.

    Use as a context manager around everything that makes or uses tensors, and call `boundary` once a step.

    Args:
        profile: Whose op times the trace gets.
        budget_nbytes: Split list ops and convolution_backward as a session of this budget would; None: never.
        threshold_nbytes: Smaller storages are left out, as in a session.
        own_nbytes: Estimates what an op allocates for itself, from the op and its arguments; None: nothing.
        allow_fallbacks: Whether an op that torch does not know without data may be run on real zeros, in real memory.
        most_ops: `RecordingTooLong` is raised at the next one; None: no limit.

    Attributes:
        trace: None until two successive steps agreed.
        num_steps: Boundaries so far, the first included.
        num_made_up: Values that the program asked for and that were made up.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        budget_nbytes: int | None = None,
        threshold_nbytes: int = GRANULE_NBYTES,
        own_nbytes: Callable[[Any, Sequence[Any]], OwnMemory] | None = None,
        most_ops: int | None = None,
        allow_fallbacks: bool = True,
    ) -> None:
        self.profile = profile
        self._own_nbytes, self._most_ops = own_nbytes, most_ops
        self.threshold_nbytes = threshold_nbytes
        self.split_nbytes = _NEVER_SPLIT if budget_nbytes is None else budget_nbytes // _SPLIT_FRACTION
        self.trace: Trace | None = None
        self.num_steps = 0
        self.num_made_up = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=allow_fallbacks)
        self._mode = _Mode(self)
        self._known: dict[int, tuple[weakref.ref[Any], _Storage]] = {}  # by id() of the live storage object
        self._next_address = 1
        self._recorder: StepRecorder | None = StepRecorder({})
        self._need_nbytes = 0
        self._costs: list[tuple[int, int]] = []
        self._small: list[tuple[frozenset[int], frozenset[int]]] = []  # per op: untracked storages read, and written
        self._call_sites = CallSites()
        self._is_in_op = False
        self._num_ops = 0
        self._before: Observed | None = None

    def __repr__(self) -> str:
        state = "complete" if self.trace is not None else "learning"
        return f"<FakeRecording {state}, {self.num_steps} boundaries, {len(self._known)} storages>"

    def __enter__(self) -> Self:
        self._fake.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._mode.__exit__(*reason)
        self._fake.__exit__(*reason)

    def boundary(self, optimizer: torch.optim.Optimizer | None = None, model: torch.nn.Module | None = None) -> bool:
        """End one step and begin the next. Returns whether `trace` is complete.

        Args:
            optimizer, model: To tell parameters, gradients and optimizer state by kind and name.
        """
        self._name_storages(optimizer, model)
        self.num_steps += 1
        if self._recorder is not None and self.trace is None:
            gc.collect()  # what only a reference cycle keeps must not look alive in one step and dead in the next
            observed = self._recorder.build(self._by_address())
            self._note_need(observed.trace)
            before, self._before = self._before, observed if self.num_steps > 1 else None
            if before is not None and observed.trace.ops and _agree(before, observed):
                self.trace = self._finish(close_cycle(before, observed))
        self._recorder = StepRecorder(self._by_address())
        self._call_sites.clear()
        self._costs, self._small = [], []
        return self.trace is not None

    def faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same geometry without data, a leaf where it is a leaf; it is there from the start."""
        made: torch.Tensor = self._fake.from_tensor(tensor)
        storage = made.untyped_storage()
        if storage.nbytes() >= self.threshold_nbytes and id(storage) not in self._known and self._recorder is not None:
            known = self._know(storage, _Storage(self._next_address, storage.nbytes()))
            self._next_address += 1
            self._recorder.start_records[known.address] = known  # type: ignore[assignment]
        return made

    def so_far(self) -> Trace:
        """The ops since the last boundary, without what a step's repetition would tell."""
        if self._recorder is None:
            raise ValueError("nothing has been recorded")
        return self._recorder.build(self._by_address()).trace

    def _note_need(self, trace: Trace) -> None:
        self._need_nbytes = max(self._need_nbytes, need_nbytes(trace))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one op on fake tensors, and record its operands, results and work."""
        recorder = self._recorder
        occurrences = self._addresses((args, kwargs))
        self._count(func)
        own = self._own_nbytes(func, args) if self._own_nbytes is not None else OwnMemory()
        changed = ops.written_values(func, args, dict(kwargs))
        where = self._call_sites.of_this_op() if recorder is not None else ""
        written = self._addresses(changed)
        self._is_in_op = True
        self._free(self._allocate(own.before_nbytes))
        held = self._allocate(own.with_results_nbytes)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            self.num_made_up += 1
            result = False if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        finally:
            self._is_in_op = False
        if recorder is None or func.namespace == "prim":  # `prim.device` and its like ask for no bytes
            self._addresses(result)
            return result
        flops, nbytes = _work(func, args, kwargs, result)
        self._is_in_op = True
        results = self._addresses(result)
        self._free(held)
        self._is_in_op = False
        if not occurrences and not results:  # as in a session, which never sees it
            if self._small:
                reads, writes = self._small[-1]
                self._small[-1] = reads, writes | self._small_storages(changed)
            return result
        if self.num_steps == 0 and recorder.num_ops == MOST_SETUP_OPS:
            self._note_need(recorder.build(self._by_address()).trace)
            self._recorder = recorder = StepRecorder(self._by_address())
            self._costs, self._small = [], []
        recorder.append(
            OpRecord(
                func=func,
                where=where,
                occurrences=occurrences,
                written=written,
                results=results,
                duration_ns=self.profile.op_ns(flops, nbytes),
            )
        )
        self._costs.append((flops, nbytes))
        self._small.append((self._small_storages((args, kwargs)), self._small_storages(changed)))
        return result

    def _count(self, func: Any) -> None:
        if func.namespace == "prim":  # asked for by C++ code that no exception may pass
            return
        self._num_ops += 1
        if self._most_ops is not None and self._num_ops > self._most_ops:
            raise RecordingTooLong(f"more than {self._most_ops} ops")

    def _finish(self, trace: Trace) -> Trace:
        flops, nbytes = zip(*self._costs, strict=True)
        is_replayable = self._replayable()
        return replace(
            trace,
            ops=tuple(replace(op, replayable=is_replayable[i]) for i, op in enumerate(trace.ops)),
            metadata={
                "recorded": "fake tensors: without the ops' internal temporaries; times by profile",
                "times_of": self.profile.name,
                "torch": torch.__version__,
                "threshold_nbytes": self.threshold_nbytes,
                "num_made_up_values": self.num_made_up,
                NEED: self._need_nbytes,
                "costs": {"flops": list(flops), "nbytes": list(nbytes)},
            },
        )

    def _replayable(self) -> list[bool]:
        """Per op, whether it may be run again: no random numbers, no writes, no untracked operand written later."""
        assert self._recorder is not None
        found: list[bool] = []
        changed_later: set[int] = set()
        for op, (reads, writes) in zip(reversed(self._recorder.ops), reversed(self._small), strict=True):
            is_random = torch.Tag.nondeterministic_seeded in op.func.tags
            is_pure = ops.written_arguments(op.func) == ()
            found.append(is_pure and not is_random and not (reads & changed_later))
            changed_later |= writes
        return found[::-1]

    def _small_storages(self, values: Any) -> frozenset[int]:
        """Storages below the threshold among `values`, by an id that a later one may take over: then no re-run."""
        storages = [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
        return frozenset(id(s) for s in storages if s.nbytes() < self.threshold_nbytes)

    def _by_address(self) -> Any:
        return {storage.address: storage for _, storage in self._known.values()}

    def _addresses(self, values: Any) -> tuple[int, ...]:
        """The storages of all tensors among `values`, repeats included; those never seen are allocated now."""
        found = []
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage.nbytes() >= self.threshold_nbytes:
                    found.append(self._address(storage))
        return tuple(found)

    def _address(self, storage: torch.UntypedStorage) -> int:
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known[0]() is storage:
            return known[1].address
        return self._know(storage, self._allocate(storage.nbytes())).address

    def _know(self, storage: torch.UntypedStorage, made: _Storage) -> _Storage:
        key = id(storage)
        self._known[key] = (weakref.ref(storage, lambda _: self._freed(key, made)), made)
        return made

    def _allocate(self, nbytes: int) -> _Storage:
        made = _Storage(self._next_address, nbytes)
        self._next_address += 1
        self._note(made, ALLOC)
        return made

    def _free(self, storage: _Storage) -> None:
        self._note(storage, FREE)

    def _freed(self, key: int, storage: _Storage) -> None:
        if key in self._known and self._known[key][1] is storage:
            del self._known[key]
        self._note(storage, FREE)

    def _note(self, storage: _Storage, kind: int) -> None:
        recorder = self._recorder
        if recorder is not None and storage.nbytes >= self.threshold_nbytes:
            index = recorder.num_ops
            position = inside_op(index) if self._is_in_op else between_ops(index)
            recorder.events.append(Event(storage.address, storage.nbytes, kind, position))

    def _name_storages(self, optimizer: torch.optim.Optimizer | None, model: torch.nn.Module | None) -> None:
        names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        for group in optimizer.param_groups if optimizer is not None else ():
            for number, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {number}")
                self._name(parameter, "parameter", name)
                self._name(raw_gradient(parameter), "gradient", f"gradient of {name}")
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                for key, value in state.items():
                    self._name(value, "optimizer_state", f"{key} of {name}")

    def _name(self, value: Any, kind: str, label: str) -> None:
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value.untyped_storage()))
            if known is not None:
                known[1].kind, known[1].label = kind, label


class _Mode(TorchDispatchMode):  # to mypy all of torch is Any
    """Dispatch mode above the fake tensors, which gives each op to the recording."""

    def __init__(self, recording: FakeRecording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recording, kwargs = self.recording, kwargs or {}
        if torch.is_inference_mode_enabled() and is_made_of_others(func, _key_of(args, kwargs)):
            return take_apart(func, args, kwargs, mode=self, outside=None)
        if ops.is_list_op(func):
            return ops.run_list_op(func, args, kwargs, limit_nbytes=recording.split_nbytes, run=recording.run)
        if ops.is_convolution_backward(func):
            return ops.run_convolution_backward(
                func, args, kwargs, limit_nbytes=recording.split_nbytes, run=recording.run
            )
        return recording.run(func, args, kwargs)


def _key_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The dispatch key of real tensors on the device of an op's arguments."""
    return next((t.device.type.upper() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), "CPU")


def _agree(first: Observed, second: Observed) -> bool:
    """Whether two observations are of one sequence, on the same long-lived storages."""
    if first.trace.fingerprint() != second.trace.fingerprint():
        return False
    throughout = [i for i, v in enumerate(second.trace.variables) if v.birth_tick is None and v.death_tick is None]
    changed = [i for i in throughout if first.start_serials[i] != second.start_serials[i]]
    return len(changed) * 2 <= len(throughout)


def _work(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[int, int]:
    """`(flops, bytes walked through)` of an op. One that only makes views or metadata does no work."""
    counter = flop_registry.get(func._overloadpacket)
    flops = int(counter(*args, **kwargs, out_val=result)) if counter is not None else 0
    operands = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    sources = {id(t.untyped_storage()) for t in operands.values()}
    results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    is_view = func.is_view or (
        not ops.written_arguments(func) and all(id(t.untyped_storage()) in sources for t in results)
    )
    if is_view and not flops:
        return 0, 0
    fresh = [t for t in results if id(t) not in operands]
    return flops, sum(t.numel() * t.element_size() for t in [*operands.values(), *fresh])
