"""Collectives of torch.distributed: ops that go on after they have returned.

The ops of c10d return a `Work`; Gloo reads and writes their operands later, on its own threads. Here is what has to
be known of them: which ops those are, when each is over, what it writes. `ooc.memory.flights` keeps the account.

Work's `wait` and `get_future` are replaced while a session is open: the one says that a collective is over at the
moment when the program knows, so that memory is freed there and traces agree from step to step; the other waits, since
what is chained to a future would run on Gloo's threads, where no dispatch mode sees it (a communication hook that
writes its bucket).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_WORK = "torch.classes.c10d.Work"

_POINT_TO_POINT = frozenset(
    {
        "c10d::send",
        "c10d::recv_",
        "c10d::recv_any_source_",
        "_c10d_functional::isend",
        "_c10d_functional::irecv",
        "_c10d_functional::batch_p2p_ops",
    }
)
_NOT_LAUNCHING = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})

_WRITTEN: dict[str, tuple[int, ...]] = {
    # Positions of what is written; of an op that is not listed, everything. (Gloo reduces in its operands.)
    "c10d::allgather_": (0,),
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_coalesced_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::alltoall_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::send": (),
}


@functools.cache
def is_collective(func: Any) -> bool:
    """Whether an op launches a collective, or waits for one."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    name: str = schema.name
    if name.startswith("_c10d_functional::"):
        return name != "_c10d_functional::_wrap_tensor_autograd"
    return any(_WORK in str(value.type) for value in getattr(schema, "returns", ()))


def is_wait(func: Any) -> bool:
    """Whether this is `wait_tensor`, which ends functional collectives."""
    return bool(func._schema.name == "_c10d_functional::wait_tensor")


def is_point_to_point(func: Any) -> bool:
    """Whether this is a send or a receive, which ends when the program waits for it and not before."""
    return func._schema.name in _POINT_TO_POINT


def has_hidden_followers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether C++ may have chained something to what `func` launches, to run on the backend's threads.

    DDP's built-in fp16 hook does: it writes the bucket, which is no operand.
    """
    return (
        func._schema.name == "c10d::allreduce_"
        and torch._C._current_graph_task_id() != -1
        and any(tensor.dtype is torch.float16 for tensor in args[0])
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[Any, ...]:
    """The values that a collective writes."""
    positions = _WRITTEN.get(func._schema.name)
    if positions is None:
        return (*args, *kwargs.values(), result)
    return tuple(args[position] for position in positions if position < len(args))


class WorkLanding:
    """A collective whose `Work` we have."""

    def __init__(self, func: Any, work: Any) -> None:
        self.name = str(func)
        self.may_wait = not is_point_to_point(func)
        self.key = work

    def __repr__(self) -> str:
        return f"<WorkLanding of {self.name}>"

    def is_over(self) -> bool:
        return bool(self.key.is_completed())

    def wait(self) -> None:
        with contextlib.suppress(RuntimeError):  # the program's own wait raises it again
            _original("wait")(self.key)


class FunctionalLanding:
    """A functional collective: torch's registry has its `Work`, and `wait_tensor` of a result ends it."""

    def __init__(self, func: Any, results: Any) -> None:
        self.key = self
        self.name = str(func)
        self.may_wait = not is_point_to_point(func)
        self.has_ended = False
        self._results = results if isinstance(results, list | tuple) else (results,)

    def __repr__(self) -> str:
        return f"<FunctionalLanding of {self.name}>"

    def is_over(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        with _disable_current_modes(), contextlib.suppress(RuntimeError):
            for result in self._results:
                torch.ops._c10d_functional.wait_tensor(result)
        self.has_ended = True


def landing_of(func: Any, result: Any) -> WorkLanding | FunctionalLanding | None:
    """How to know that what `func` has just launched is over; None: it has launched nothing."""
    if func._schema.name in _NOT_LAUNCHING:
        return None
    if func.namespace == "_c10d_functional":
        return FunctionalLanding(func, result)
    for value in result if isinstance(result, tuple) else (result,):
        if isinstance(value, torch.ScriptObject):
            return WorkLanding(func, torch._C._distributed_c10d.Work.unbox(value))
    return None


_replaced: dict[str, Any] = {}
"""Methods of `Work` as they were, while a session is open."""


def _original(name: str) -> Any:
    return _replaced.get(name) or getattr(torch._C._distributed_c10d.Work, name)


class WaitHooks:
    """`Work.wait` and `Work.get_future` replaced, from `open` to `close`.

    Args:
        note_end: Told of a work that the program has waited for, on the session's thread.
        is_ours: Whether a work is in flight with operands of the session's, and may be waited for.
    """

    def __init__(self, *, note_end: Callable[[Any], None], is_ours: Callable[[Any], bool]) -> None:
        self._note_end = note_end
        self._is_ours = is_ours
        self._thread = threading.get_ident()
        self._is_open = False

    def __repr__(self) -> str:
        return f"<WaitHooks {'open' if self._is_open else 'closed'}>"

    def open(self) -> None:
        """Replace them. Without torch.distributed: nothing."""
        if self._is_open or not torch.distributed.is_available():
            return
        kind = torch._C._distributed_c10d.Work
        wait, get_future = kind.wait, kind.get_future
        _replaced.update(wait=wait, get_future=get_future)

        @functools.wraps(wait)
        def wait_and_tell(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            if self._is_open and threading.get_ident() == self._thread:
                self._note_end(work)
            return result

        @functools.wraps(get_future)
        def get_finished_future(work: Any) -> Any:
            if self._is_open and threading.get_ident() == self._thread and self._is_ours(work):
                with contextlib.suppress(RuntimeError):  # the future has it, too
                    wait(work)
                self._note_end(work)
            return get_future(work)

        kind.wait, kind.get_future = wait_and_tell, get_finished_future
        self._is_open = True

    def close(self) -> None:
        """Put them back. Idempotent."""
        if self._is_open:
            self._is_open = False
            for name, method in _replaced.items():
                setattr(torch._C._distributed_c10d.Work, name, method)
            _replaced.clear()
