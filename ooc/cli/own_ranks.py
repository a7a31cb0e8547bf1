"""Ranks that a script starts itself, rather than torchrun: each trains within a session of its own, like this process.

Two ways are known. A script that starts itself once more as a program, with a rank of its own in the environment, as
Lightning does for `strategy="ddp"`: then the command becomes this `ooc run`. And `torch.multiprocessing.spawn`: then
what it calls is called within a session. Of other ways a warning tells: their processes hold no budget.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ooc.errors import OocError
from ooc.interop.replacements import Replacements
from ooc.session import Session
from ooc.tracing.call_sites import users_stacklevel
from vmm.store import StoreError

AsRank = Callable[..., Any]
"""Called in a new process, and sent there by pickle: with a function, the process's index, and the function's other
arguments."""

_RANKS = ("LOCAL_RANK", "RANK")
_OPTIONS = "torchrun --nproc-per-node N -m ooc run ...; torch.multiprocessing.spawn; ooc.Session in these processes"


class OwnRanks:
    """Replaces `subprocess.Popen` and what starts processes in `torch.multiprocessing` while a script runs.

    Args:
        session: This process's.
        prefix: The interpreter's arguments of this `ooc run` up to the script, that of a script absolute.
        as_rank: What runs a function in a new process as a rank; None: on a device where that is not possible.

    Attributes:
        is_first_elsewhere: Whether another process is rank 0 in place of this one, which starts the ranks and waits.
    """

    def __init__(self, session: Session, prefix: Sequence[str], as_rank: AsRank | None) -> None:
        self._session = session
        self._prefix = list(prefix)
        self._as_rank = as_rank
        self.is_first_elsewhere = False

    def __repr__(self) -> str:
        return f"<OwnRanks, {'elsewhere' if self.is_first_elsewhere else 'none, or beside this process'}>"

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """While the block runs, ranks that the program starts are ours."""
        package = importlib.import_module("torch.multiprocessing")
        module = importlib.import_module("torch.multiprocessing.spawn")
        start = functools.wraps(module.start_processes)(
            functools.partial(self._start_processes, module.start_processes)
        )
        before = subprocess.Popen.__init__

        @functools.wraps(before)
        def begin(process: Any, args: Any, *rest: Any, **named: Any) -> None:
            before(process, self.command(args, named.get("env")), *rest, **named)

        replacements = Replacements()
        try:
            replacements.replace(package, "start_processes", start)
            replacements.replace(module, "start_processes", start)
            replacements.replace(subprocess.Popen, "__init__", begin)
            yield
        finally:
            replacements.put_back()

    def command(self, args: Any, env: Mapping[str, str] | None) -> Any:
        """What is run in place of a command: this `ooc run`, if the script starts itself as another rank."""
        if env is None or not isinstance(args, (list, tuple)) or not args or args[0] != sys.executable:
            return args
        if all(env.get(name) in (None, os.environ.get(name)) for name in _RANKS):
            return args  # nobody's rank, or our own: a helper of this process
        words = list(args[1:])
        flags, words = (["-u"], words[1:]) if words[:1] == ["-u"] else ([], words)
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        itself = (["-m", spec.name],) if spec is not None else ([sys.argv[0]], [os.path.abspath(sys.argv[0])])
        for start in itself:
            if words[: len(start)] == start:
                self.is_first_elsewhere |= env.get("RANK", env.get("LOCAL_RANK")) == "0"
                return [sys.executable, *flags, *self._prefix, *words[len(start) :]]
        if words[:3] != ["-m", "ooc", "run"]:
            self._warn("a program was started as another rank")
        return args

    def _start_processes(
        self,
        start: Callable[..., Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        if start_method == "fork" or self._as_rank is None:
            self._warn("processes were started")
            return start(fn, args, nprocs, join, daemon, start_method)
        self.is_first_elsewhere = True
        context = start(functools.partial(self._as_rank, fn), args, nprocs, False, daemon, start_method)
        if not join:
            return context
        with self._given_back():
            while not context.join():
                pass
        return None

    @contextlib.contextmanager
    def _given_back(self) -> Iterator[None]:
        """Give this process's memory back while it waits, if that can be; the ranks need theirs."""
        with contextlib.ExitStack() as stack:
            if not _others_may_run():
                with contextlib.suppress(OocError, StoreError):  # something must stay in memory, or the store is full
                    stack.enter_context(self._session.yielded())
            yield

    @staticmethod
    def _warn(what: str) -> None:
        warnings.warn(
            f"{what} that ooc run knows nothing about: what these processes allocate is not held to any budget. "
            f"Options: {_OPTIONS}.",
            RuntimeWarning,
            stacklevel=users_stacklevel(),
        )


def _others_may_run() -> bool:
    """Whether the program has threads besides this one, which may use tensors while it waits."""
    us = threading.current_thread()
    return any(thread is not us and not thread.name.startswith("ooc-") for thread in threading.enumerate())
