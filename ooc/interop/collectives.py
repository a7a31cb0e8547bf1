"""Collectives of torch.distributed: ops that go on after they have returned. See ooc/DESIGN.md, "Collectives".

Gloo reads and writes a collective's operands on its own threads, after the op that launched it. `Collectives` finds out
which operands those are and when they are free again; `ooc.memory.flights` keeps the account.

Work's `wait` and `get_future` are replaced while a session is open. The one says that a collective is over at the
moment when the program knows, so that memory is freed there and traces agree from step to step. The other waits, since
what is chained to a future would run on Gloo's threads, where no dispatch mode sees it (a communication hook that
writes its bucket).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.dispatch.op_runner import OpRunner
from ooc.errors import SessionError
from ooc.interop.model_broadcast import ModelBroadcast
from ooc.interop.replacements import Replacements
from ooc.memory.residency import ResidencyManager
from ooc.replay.bailout import born_in, records_of
from ooc.tracing import collective_ops
from vmm.threads import is_foreign_thread

_log = logging.getLogger(__name__)

_TIMED_OUT = "timed out"
"""What Work's `wait` says then."""
_LAST_WAIT_S = 5.0
"""For collectives under way when the process exits: another rank may have died."""


class Collectives:
    """The collectives of one session. Ops and allocations come here from its `OpRunner`.

    Attributes:
        launches: Of each that is being launched, ops whose acts wait until its operands are known to be in flight.
        num_apart, apart_nbytes: Allocations of the backend's threads so far, outside the budget.
    """

    def __init__(
        self,
        *,
        manager: ResidencyManager,
        runner: OpRunner,
        is_open: Callable[[], bool],
        budget_nbytes: Callable[[], int],
    ) -> None:
        self._manager = manager
        self._flights = manager.flights
        self._runner = runner
        self._is_open = is_open
        self._thread = threading.get_ident()
        self.launches: list[list[int]] = []
        self._operands: WeakKeyDictionary[Any, Sequence[int]] = WeakKeyDictionary()  # by what the program waits for
        self._functional: dict[int, _FunctionalLanding] = {}  # by a result's address
        self._waited_before = -1  # the op that comes after the program's own wait
        self._replacements = Replacements()
        self._model_broadcast = ModelBroadcast(budget_nbytes=budget_nbytes, is_ours=self._is_here)
        self.num_apart = self.apart_nbytes = 0

    def __repr__(self) -> str:
        return f"<Collectives, {self._flights!r}>"

    # -- ops; the session's lock is held but for `run`

    def run(
        self,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op that launches a collective, or waits for one, by `run`.

        Its operands are in flight before anything else happens: what the plan does after it comes last.
        """
        if collective_ops.is_wait(func):
            result = run(func, args, kwargs)
            self._end_functional(args)
            return result
        with self._runner.lock:
            postponed: list[int] = []
            self.launches.append(postponed)
            first_serial = self._manager.num_serials
            try:
                result = run(func, args, kwargs)
                self._note_launch(func, args, kwargs, result, first_serial)
            finally:
                self.launches.pop()
            for index in postponed:
                if self._runner.executor.active is not None:
                    self._runner.executor.after(index)
        return result

    def postpones(self, index: int) -> bool:
        """Whether a planned op's acts after it must wait, since it is a collective being launched. Takes note of it."""
        if not self.launches:
            return False
        self.launches[-1].append(index)
        return True

    def take_landed(self, op_index: int) -> Sequence[int]:
        """Addresses that the program has waited for since the op before this one."""
        waited_for = self._flights.waited_for
        if not waited_for:
            return ()
        addresses = tuple(waited_for)
        waited_for.clear()
        return addresses if self._waited_before == op_index else ()

    def is_apart(self, nbytes: int) -> bool:
        """Whether an allocation is the backend's own, which torch's allocator serves. On any thread; takes no lock.

        While a collective is launched or under way its threads may need memory at any moment. It is not part of the
        step: it would come at other places in each, and would wait for us, who may be waiting for the collective.
        """
        if not self._manager.is_host or not (self.launches or self._flights) or not is_foreign_thread():
            return False
        self.num_apart += 1
        self.apart_nbytes += nbytes
        return True

    def _note_launch(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, first_serial: int
    ) -> None:
        runner = self._runner
        operands = runner.dispatcher.operands
        addresses = operands(args, kwargs, result)
        landing = _landing_of(func, result)
        if landing is None:
            return
        if not self._manager.is_host or collective_ops.has_hidden_followers(func, args):
            landing.wait()  # on a device, that orders the compute stream after it, and with that all that we do
        if not self._manager.is_host:
            return
        left = self._left_behind(first_serial)
        addresses = [*addresses, *left]
        if not addresses:
            return
        written = [*operands(*collective_ops.written_by(func, args, kwargs, result)), *left]
        planned = records_of(runner.executor.active, runner.dispatcher.cursor - 1)
        found = {address: planned.get(address) or self._manager.records.get(address) for address in addresses}
        records = {address: record for address, record in found.items() if record is not None}
        for address in left:
            if address in records:
                records[address].note_seen()  # until it is over it is pinned; then it may go like any other
        self._flights.begin(landing, list(records.values()), [records[a] for a in written if a in records])
        self._operands[landing.key] = addresses
        if isinstance(landing, _FunctionalLanding):
            self._functional.update(dict.fromkeys(operands(result), landing))
        recorder = runner.recording.recorder
        if recorder is not None and (op := recorder.last_op()) is not None:
            op.written, op.in_flight, op.is_held = written, addresses, collective_ops.is_point_to_point(func)

    def _left_behind(self, first_serial: int) -> list[int]:
        """Addresses of what the op that has just run allocated, results or not, and that is alive.

        Gloo reduces and scatters in a copy, which only `Work.wait` names, in ops of its own.

        Args:
            first_serial: Records that the op made beside a plan, or on demand, have this serial or a later one.
        """
        runner, records = self._runner, self._manager.records
        made = takewhile(lambda address: records[address].serial >= first_serial, reversed(records))
        return [*born_in(runner.executor.active, runner.dispatcher.cursor - 1), *made]

    def _end_functional(self, args: tuple[Any, ...]) -> None:
        for address in self._runner.dispatcher.operands(args):
            landing = self._functional.pop(address, None)
            if landing is not None:
                landing.has_ended = True
                self._note_waited(landing)

    # -- the program's own waits

    def open(self) -> None:
        """Replace `Work.wait` and `Work.get_future`. Without torch.distributed: nothing."""
        if not torch.distributed.is_available():
            return
        self._model_broadcast.open()
        kind = torch._C._distributed_c10d.Work
        wait, get_future = kind.wait, kind.get_future

        @functools.wraps(wait)
        def wait_and_tell(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            if self._is_ours(work):
                self._note_waited(work)
            return result

        @functools.wraps(get_future)
        def get_finished_future(work: Any) -> Any:
            # Whatever its operands are: what is chained to it may touch any tensor. (A send or receive has no future.)
            future = get_future(work)
            if self._is_here():
                with contextlib.suppress(RuntimeError):  # the future has it, too
                    wait(work)
                if self._is_ours(work):
                    self._note_waited(work)
            return future

        self._replacements.replace(kind, "wait", wait_and_tell)
        self._replacements.replace(kind, "get_future", get_finished_future)

    def close(self) -> None:
        """Put them back. Idempotent."""
        self._model_broadcast.close()
        self._replacements.put_back()

    def _is_ours(self, work: Any) -> bool:
        return self._is_here() and work in self._operands

    def _is_here(self) -> bool:
        """Whether this is the session's thread, and the session open."""
        return threading.get_ident() == self._thread and self._is_open()

    def _note_waited(self, key: Any) -> None:
        """The program has waited for a collective: it is over as of this place in the step."""
        with self._runner.lock:
            addresses = self._operands.pop(key, ())
            self._flights.end(key)
            op_index = self._runner.op_index
            if self._waited_before != op_index:
                self._flights.waited_for.clear()
            self._waited_before = op_index
            self._flights.waited_for.extend(addresses)

    # -- the session's ends

    def settle(self, act: str, *, is_last: bool = False) -> None:
        """Wait for all that is under way, before `act`.

        Args:
            act: For the message.
            is_last: The process is about to exit: wait for some seconds only, and go on in any case.

        Raises:
            SessionError: A send or receive is under way, and nobody but the program may wait for it.
        """
        if self._flights.settle(timeout_s=_LAST_WAIT_S if is_last else None) or is_last:
            return
        what = (
            f"{act}: {', '.join(self._flights.names())} not over, so that its operands must stay where they are. "
            "Options: wait() for it before."
        )
        if sys.exception() is None:
            raise SessionError(what)
        _log.warning("%s What it does from now on is lost.", what)

    def document(self) -> dict[str, int]:
        """For the report: collectives so far, waits of ours for them, what their backend took beside the budget."""
        return {**self._flights.statistics(), "num_apart": self.num_apart, "apart_nbytes": self.apart_nbytes}


class _WorkLanding:
    """A collective whose `Work` we have."""

    def __init__(self, func: Any, work: Any) -> None:
        self.key = work
        self.name = str(func)
        self.may_wait = not collective_ops.is_point_to_point(func)
        self._wait = type(work).wait
        self._wait = getattr(self._wait, "__wrapped__", self._wait)  # without telling ourselves

    def __repr__(self) -> str:
        return f"<_WorkLanding of {self.name}>"

    def is_over(self) -> bool:
        return bool(self.key.is_completed())

    def wait(self) -> None:
        # Ops of its own (a copy out of what was reduced) are no ops of the step: the program's own wait has them again.
        with _disable_current_modes(), contextlib.suppress(RuntimeError):  # the program's own wait raises it again
            self._wait(self.key)

    def wait_at_most(self, timeout_s: float, /) -> bool:
        """For how long a scatter of what was reduced is waited for Gloo does not let us say."""
        try:
            with _disable_current_modes():
                self._wait(self.key, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            return _TIMED_OUT not in str(error)  # else it has failed, and is over
        return True


class _FunctionalLanding:
    """A functional collective: torch's registry has its `Work`, and `wait_tensor` of a result ends it."""

    def __init__(self, func: Any, results: Any) -> None:
        self.key = self
        self.name = str(func)
        self.may_wait = not collective_ops.is_point_to_point(func)
        self.has_ended = False
        self._results = results if isinstance(results, list | tuple) else (results,)

    def __repr__(self) -> str:
        return f"<_FunctionalLanding of {self.name}>"

    def is_over(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        with _disable_current_modes(), contextlib.suppress(RuntimeError):
            for result in self._results:
                torch.ops._c10d_functional.wait_tensor(result)
        self.has_ended = True

    def wait_at_most(self, _timeout_s: float, /) -> bool:
        """Torch's registry knows no limit."""
        self.wait()
        return True


def _landing_of(func: Any, result: Any) -> _WorkLanding | _FunctionalLanding | None:
    """How to know that what `func` has just launched is over; None: it has launched nothing."""
    if collective_ops.is_functional(func):
        return _FunctionalLanding(func, result)
    for value in result if isinstance(result, tuple) else (result,):
        if isinstance(value, torch.ScriptObject):
            return _WorkLanding(func, torch._C._distributed_c10d.Work.unbox(value))
    return None
