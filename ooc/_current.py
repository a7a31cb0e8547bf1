"""The session that is open in this process, and the functions by which a script reaches it."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from typing import Protocol

from ooc.errors import SessionError

_log = logging.getLogger(__name__)

_OWN_REFERENCES = 2
"""References to a session that this module alone holds: its global, and the argument of `getrefcount`."""


class OpenSession(Protocol):
    """What this module needs of an open `ooc.Session`."""

    def set_budget(self, budget: int | str) -> None:
        """As `Session.set_budget`."""

    def yielded(self) -> AbstractContextManager[None]:
        """As `Session.yielded`."""

    def memory_stats(self) -> dict[str, int]:
        """As `Session.memory_stats`."""

    def close(self) -> None:
        """As `Session.close`."""


session: OpenSession | None = None
"""The open session. Set at the end of an opening, so that a session found here is usable."""


def check_none_open() -> None:
    """Make sure that no session is open. One that nothing refers to any more is closed here.

    (A Ctrl-C right after a session was opened comes before the assignment that would have kept it.)

    Raises:
        SessionError: One is open.
    """
    if session is None:
        return
    if sys.getrefcount(session) > _OWN_REFERENCES:
        raise SessionError(
            "a session is open already: one at a time owns the process's allocations. "
            "Options: close it first (leave its `with` block); under `ooc run`, which opens one for the whole "
            "script, take the script's own out, or start it with python."
        )
    _log.warning("a session that nobody holds any more is closed: %r", session)
    session.close()


def claim(opened: OpenSession) -> None:
    """Make `opened` the process's session."""
    global session
    session = opened


def release() -> None:
    """Note that no session is open any more. Idempotent."""
    global session
    session = None


def set_budget(budget: int | str) -> None:
    """Change the budget of the open session (see `Session.set_budget`).

    Raises:
        SessionError: No session is open; and what `Session.set_budget` raises.
    """
    if session is None:
        raise SessionError(
            f"set_budget({budget!r}): no session is open. Options: ooc run --budget SIZE SCRIPT; "
            "with ooc.Session(SIZE): ..."
        )
    session.set_budget(budget)


def yielded() -> AbstractContextManager[None]:
    """Give all memory of the open session back for the length of a block (see `Session.yielded`).

    Raises:
        SessionError: No session is open; and, on entering, what `Session.yielded` raises.
    """
    if session is None:
        raise SessionError(
            "yielded: no session is open. Options: ooc run --budget SIZE SCRIPT; with ooc.Session(SIZE): ..."
        )
    return session.yielded()


def memory_stats() -> dict[str, int]:
    """Statistics of the open session, in the manner of `torch.cuda.memory_stats()`; empty if none is open.

    Flat, with dotted keys; bytes, unless the key says otherwise. A step stays on its plan while they are taken.

    - `allocated_bytes.all.current`, `.peak`: variables that are alive, wherever they are: what
      training would hold in core (the peak is that of the largest step seen whole).
    - `resident_bytes.all.current`, `.peak`: chunks of the pool that hold variables.
    - `away_bytes.all.current`: of variables that are only in the store.
    - `discarded_bytes.all.current`: of variables whose bytes are nowhere, until ops are run again to make them.
    - `inactive_bytes.all.current`: parts of resident chunks that no variable fills (rounding).
    - `reserved_bytes.all.current`, `.peak`: the pool, which is the budget.
    - `active.all.current`: the number of variables alive; `resident.all.current`: of those in memory.
    - `loaded_bytes.all.total`, `evicted_bytes.all.total`, `dropped_bytes.all.total`.
    - `stall_ns.all.total`, `num_faults`, `num_remapped_chunks`.
    - `num_steps.learning`, `num_steps.planned`, `num_steps.off_plan`: of the newest 20,000 at least.
    """
    return session.memory_stats() if session is not None else {}
