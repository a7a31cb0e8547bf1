"""Trials of ops in learning: each kind of op is run twice once, and its bits are compared.

No schema tells whether an op's bits repeat: a sum may be split among threads as it happens, a library may choose
another algorithm. So an op counts as replayable only after a trial of its kind: op, geometry of its operands, threads.
A trial is made with a recipe, as a re-run would be, within the budget: where there is no room for it, the op is not
replayable yet, and the next step tries again, up to three times.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Protocol

import torch

from ooc.errors import StoreFailed
from ooc.memory.no_room import NoRoom
from ooc.memory.record import VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.dispatcher import Dispatcher
from ooc.replay.op_watch import Range
from ooc.replay.random_state import RandomState, default_generators
from ooc.replay.recipes import NoRecipe, Recipe, below_everything, has_its_bytes
from ooc.replay.rerun_device import RerunDevice
from ooc.tracing import op_semantics
from ooc.tracing.recorder import StepRecorder
from ooc.tracing.replayability import is_random, is_unsteady_on_cuda, makes_undefined_bytes, may_run_again
from vmm.table import ALLOC, AllocatorTable, inside_op

_log = logging.getLogger(__name__)

_MOST_WITHOUT_ROOM = 3
_NEW, _SEEN, _DIFFERS, REPEATS = -1, 0, 1, 2
"""What is known of a kind: as `ooc::Trial` in ooc/dispatch/native/trials.h."""


class RerunTrials:
    """Which kinds of op may run again, as far as is known.

    Attributes:
        is_on: Whether trials are made on demand, and ops called replayable there.
        refused: By op, why it is never run again: its bits differed, or it could not be run again.
        num_trials: Made so far.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        allocator: AllocatorTable,
        dispatcher: Dispatcher,
        device: RerunDevice,
        is_on: bool,
    ) -> None:
        self._device = device
        self._manager = manager
        self._allocator = allocator
        self._dispatcher = dispatcher
        self.is_on = is_on
        self._num_without_room: Counter[int] = Counter()  # by kind
        self.refused: dict[str, str] = {}
        self.num_trials = 0

    def __repr__(self) -> str:
        return f"<RerunTrials: {self.num_trials} made, {len(self.refused)} ops refused>"

    def knows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this kind of op is known to repeat its bits."""
        return self.may_run_again(func) and self._dispatcher.trial(self._dispatcher.kind(func, args, kwargs)) == REPEATS

    def may_run_again(self, func: Any) -> bool:
        """Whether an op may be run again as far as its schema and its trials so far tell."""
        return self.is_on and self.may_be_tried(func)

    def may_be_tried(self, func: Any) -> bool:
        """Whether a trial may tell if an op repeats its bits."""
        return may_run_again(func) and str(func) not in self.refused and not self._may_differ_by_chance(func)

    def _may_differ_by_chance(self, func: Any) -> bool:
        """Whether an op's bits may be the same in a trial, and others later."""
        return (
            self._device.torch_device.type == "cuda"
            and is_unsteady_on_cuda(func)
            and not torch.are_deterministic_algorithms_enabled()
        )

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RerunTrial | bool:
        """Before an op runs on demand: whether it may be run again, or a trial that will tell.

        A kind is tried when it comes for the second time: what never repeats costs nothing.
        """
        if not self.may_run_again(func):
            return False
        dispatcher = self._dispatcher
        kind = dispatcher.kind(func, args, kwargs)
        known = dispatcher.trial(kind)
        if known == _NEW:
            dispatcher.set_trial(kind, _SEEN)
        if known != _SEEN:
            return known == REPEATS
        if makes_undefined_bytes(func):
            dispatcher.set_trial(kind, REPEATS)
            return True
        return self._trial(kind, func, args, kwargs, DemandRoom(self._manager)) or False

    def begin_in_plan(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], new_room: Callable[[], TrialRoom]
    ) -> tuple[int, RerunTrial | None]:
        """Before an op of a plan runs: its kind, and a trial if nothing is known of that."""
        dispatcher = self._dispatcher
        kind = dispatcher.kind(func, args, kwargs)
        if dispatcher.trial(kind) not in (_NEW, _SEEN):
            return kind, None
        if makes_undefined_bytes(func):
            dispatcher.set_trial(kind, REPEATS)
            return kind, None
        room = new_room()
        if any(room.nbytes_at(address) is None for address in dispatcher.occurrences(args, kwargs)):
            return kind, None
        return kind, self._trial(kind, func, args, kwargs, room)

    def repeats(self, kind: int) -> bool:
        """Whether a kind of op was tried, and its bits were the same."""
        return self._dispatcher.trial(kind) == REPEATS

    def _trial(
        self, kind: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], room: TrialRoom
    ) -> RerunTrial | None:
        """A trial of the op that is about to run; None, which is noted, if it cannot be run again."""
        dispatcher = self._dispatcher
        try:
            recipe = Recipe(
                func,
                args,
                kwargs,
                variable_of=lambda tensor: dispatcher.address(tensor) or None,
                small_nbytes=self._allocator.state.threshold,
                apart=self._allocator.apart,
                stream=self._device.begin_noting(),
            )
        except NoRecipe:
            dispatcher.set_trial(kind, _DIFFERS)
            return None
        written = dispatcher.operands(*op_semantics.written_values(func, args, kwargs))
        return RerunTrial(self, kind, recipe, list(written), room, self._allocator, self._device)

    def address(self, tensor: torch.Tensor) -> int:
        """Where the variable begins that a tensor lies on; 0: on none."""
        return self._dispatcher.address(tensor)

    def begin_step(self) -> None:
        """Note what kinds of op depend on beside the ops: how many threads there are, and what they are held to."""
        self._dispatcher.set_environment(torch.get_num_threads() * 2 + torch.are_deterministic_algorithms_enabled())

    def note_outcome(self, kind: int, func: Any, problem: str) -> bool:
        """Note what a trial has shown; `problem` is empty if the bits were the same."""
        self.num_trials += 1
        self._dispatcher.set_trial(kind, _DIFFERS if problem else REPEATS)
        if problem and str(func) not in self.refused:
            self.refused[str(func)] = problem
            self._dispatcher.refuse(func)
            _log.info("%s is never run again: %s", func, problem)
        return not problem

    def leave_kind(self, kind: int) -> None:
        """Never try this kind of op: what it returns cannot be compared. Other kinds of the same op are as before."""
        self._dispatcher.set_trial(kind, _DIFFERS)

    def note_no_room(self, kind: int) -> None:
        """Note that a trial could not be made; after some, none is tried any more: each costs room, and so moves."""
        self._num_without_room[kind] += 1
        if self._num_without_room[kind] == _MOST_WITHOUT_ROOM:
            del self._num_without_room[kind]
            self._dispatcher.set_trial(kind, _DIFFERS)


class TrialRoom(Protocol):
    """Memory for a trial, within the budget.

    Attributes:
        moves_others: Whether others are moved for it, so that one that was not found is not looked for for ever.
    """

    moves_others: bool

    def nbytes_at(self, address: int) -> int | None:
        """Of the variable there; None if there is none that a trial may touch."""

    def in_use(self) -> list[Range]:
        """What a comparison may read: all that is pinned, or, on a host, nothing."""

    def take(self, nbytes: int) -> int:
        """The address of so many bytes. Raises `NoRoom`, `StoreFailed`."""

    def keep(self, address: int) -> None:
        """What was taken there is the program's from now on: an op keeps it."""

    def close(self) -> None:
        """Give back what was taken and is not kept."""


class DemandRoom:
    """Memory for a trial on demand: what is used last is evicted for it."""

    moves_others = True

    def __init__(self, manager: ResidencyManager) -> None:
        self._manager = manager
        self._taken: dict[int, VariableRecord] = {}

    def nbytes_at(self, address: int) -> int | None:
        """Of the variable there; None if there is none, or it is a plan's."""
        record = self._manager.records.get(address)
        return record.nbytes if record is not None else None

    def in_use(self) -> list[Range]:
        """All that is pinned."""
        return [(address, record.nbytes) for address, record in self._manager.records.items() if record.pins]

    def take(self, nbytes: int) -> int:
        """The address of so many bytes, pinned until `close`."""
        record = self._manager.new_record(nbytes)
        try:
            self._manager.give_chunks(record)
        except BaseException:
            self._manager.dispose(record)
            raise
        record.pin()
        self._taken[record.address] = record
        return record.address

    def keep(self, address: int) -> None:
        """What was taken there is the program's from now on: managed like all that no op has named."""
        record = self._taken.pop(address)
        record.is_workspace = True
        record.unpin()

    def close(self) -> None:
        """Free what was taken and is not kept."""
        while self._taken:
            self._manager.free(self._taken.popitem()[0])


class RerunTrial:
    """The trial of one op. `prepare` before it runs, `finish` after it, `close` in any case."""

    def __init__(
        self,
        trials: RerunTrials,
        kind: int,
        recipe: Recipe,
        written: Sequence[int],
        room: TrialRoom,
        allocator: AllocatorTable,
        device: RerunDevice,
    ) -> None:
        self._device = device
        self._trials = trials
        self._kind = kind
        self._recipe = recipe
        self._written = written
        self._room = room
        self._allocator = allocator
        self._before: dict[int, tuple[int, int]] = {}  # by address: where its bytes from before the op are, how many
        self.has_room = True

    def __repr__(self) -> str:
        return f"<RerunTrial of {self._recipe.func}>"

    def prepare(self) -> None:
        """Keep the bytes of what the op is about to change. Its operands are resident and pinned."""
        for address in self._written:
            nbytes = self._room.nbytes_at(address)
            if nbytes is None:
                self.has_room = False  # a plan's, or none of ours: no trial this time
                return
            copy = self._take(nbytes)
            if copy is None:
                return
            self._device.copy_bytes((address, nbytes), (copy, nbytes))
            self._before[address] = copy, nbytes

    def finish(self, result: Any, sizes: Sequence[int], lasting: Sequence[bool]) -> bool:
        """Run the op again and compare. Whether its bits repeat; False also where there was no room to find out.

        Args:
            result: Of the first run.
            sizes: Of the large storages that the op allocated, in order.
            lasting: For each, whether it is still there.
        """
        if not all(_has_comparable_bytes(each) for each in _leaves(result)):
            self._trials.leave_kind(self._kind)
            return False
        births: list[int] = []
        for nbytes in sizes if self.has_room else ():
            address = self._take(nbytes)
            if address is None:
                break
            births.append(address)
        if not self.has_room:
            if self._room.moves_others:
                self._trials.note_no_room(self._kind)
            return False
        problem = self._problem(result, births, sizes, lasting)
        for address, nbytes in zip(births, sizes, strict=True):
            if self._allocator.adopt(address, nbytes):  # else it would be given to somebody else
                self._room.keep(address)
                problem = problem or "it keeps memory that it allocates"
        return self._trials.note_outcome(self._kind, self._recipe.func, problem)

    def conclude(
        self,
        result: Any,
        results: Sequence[VariableRecord],
        recorder: StepRecorder,
        records: Container[int],
    ) -> bool:
        """As `finish`, for the op on demand that `recorder` has not noted yet.

        Args:
            result: Of the first run.
            results: The records of what it returned.
            recorder: Has what it allocated.
            records: Addresses of what is alive.
        """
        inside = inside_op(recorder.num_ops)
        born = [event for event in recorder.events if event.position == inside and event.kind == ALLOC]
        sizes, lasting = [event.nbytes for event in born], [event.address in records for event in born]
        for record in results:
            record.pin()
        try:
            return self.finish(result, sizes, lasting)
        finally:
            for record in results:
                record.unpin()

    def close(self) -> None:
        """Free what the trial took."""
        self._room.close()

    def _problem(self, result: Any, births: Sequence[int], sizes: Sequence[int], lasting: Sequence[bool]) -> str:
        def range_of(address: int) -> Range:
            found = self._before.get(address)
            nbytes = self._room.nbytes_at(address)
            if found is None and nbytes is None:
                raise LookupError(f"no variable at {address:#x}")
            return found or (address, nbytes or 0)

        def storage_of(address: int) -> torch.UntypedStorage:
            return self._device.storage_at(*range_of(address))

        allocs = list(zip(sizes, births, strict=True))
        try:
            operands = [range_of(address) for address in self._recipe.variables]
        except LookupError as unknown:  # an array over a part of a variable, say
            return str(unknown)
        writes = list(self._before.values())
        reads = [place for place in operands if place not in writes]
        born = [(address, nbytes) for nbytes, address in allocs]
        drawn = () if is_random(self._recipe.func) else default_generators(self._device.torch_device)
        random = RandomState(drawn, self._allocator.apart)
        try:
            with (
                self._device.running(self._recipe, reads=reads, writes=writes, births=born),
                self._allocator.rerunning(allocs) as served,
            ):
                again = self._recipe.run(storage_of)
        except Exception as error:  # noqa: BLE001 - whatever it is, this op is not run again
            return f"it raised when it was run again ({type(error).__name__})"
        if random.has_changed():
            random.restore()
            return "it draws random numbers, and its tags do not say so"
        if any(lasts and not row["served"] for row, lasts in zip(served, lasting, strict=True)):
            return "it allocated less when it was run again"
        return self._difference(result, again, {*self._before, *(address for address, _ in operands)})

    def _difference(self, result: Any, again: Any, operands: Container[int]) -> str:
        """What differs between what the op made and what it made when it was run again; empty: nothing."""
        device = self._device
        device.note_look(self._room.in_use())
        with below_everything():
            pairs = list(zip(_leaves(result), _leaves(again), strict=False))
            if not all(self._is_same(first, second, operands) for first, second in pairs):
                return "its bits differed when it was run again"
        for address, (copy, nbytes) in self._before.items():
            if not device.are_same_bytes((address, nbytes), (copy, nbytes)):
                return "its bits differed when it was run again"
        return ""

    def _is_same(self, first: Any, second: Any, operands: Container[int]) -> bool:
        if not isinstance(first, torch.Tensor):
            return type(first) is type(second) and (first == second or first != first)
        if not isinstance(second, torch.Tensor) or not _has_comparable_bytes(second) or _shape(first) != _shape(second):
            return False
        if self._trials.address(first) in operands:
            return True  # a view of an operand; those that the op writes are compared as a whole
        return self._device.are_same(first, second)

    def _take(self, nbytes: int) -> int | None:
        """The address of so many bytes of the trial's room; None, which is noted: there are none.

        Nothing else is under way where the refusal is caught. A generator that did so for its caller
        (`contextlib.contextmanager`) would leave a cycle of frames behind on Python 3.12, which kept what the op has
        made: torch then copies a gradient that it takes as it is in other steps, and those are two sequences of ops.
        """
        try:
            return self._room.take(nbytes)
        except (NoRoom, StoreFailed):
            self.has_room = False
            return None


def _has_comparable_bytes(value: Any) -> bool:
    """Whether a value is no tensor, or one whose elements are its storage's bytes, read as they are.

    Not so: sparse, nested, quantized, conjugated and meta tensors, subclasses, and what lost its storage's bytes.
    """
    if not isinstance(value, torch.Tensor):
        return True
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return (
        is_plain
        and not value.is_meta
        and not (value.is_nested or value.is_quantized or value.is_conj() or value.is_neg())
        and has_its_bytes(value)
    )


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _leaves(each)
    else:
        yield value
