"""Lets native code do what goes before and after a planned op where nothing is to be waited for (native/acts.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ooc.dispatch.signals import CriticalLock
from ooc.memory.counters import Counters
from ooc.memory.record import NO_GUARD, State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.dispatcher import Dispatcher, NativeReleases
from ooc.replay.op_acts import After, Before
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from vmm.addresses import Reservation
from vmm.store import FileStore, Slot, Transfer
from vmm.transfers import Segments

_SLOTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Before, ("releases", "loads", "arrivals", "rerun", "births")),
    (After, ("dirties", "writes", "drops", "discards")),
    (ExecutableResidency, ("variable", "runs", "transfer", "waits", "moved", "fitted")),
    (
        PlanVariable,
        ("record", "successor", "index", "nbytes", "evictable", "dies_within", "is_elastic", "is_born"),
    ),
    (
        VariableRecord,
        ("_state", "_runs", "_stored", "_transfer", "_exports", "_seen", "guard", "nbytes", "reservation", "address")
        + ("slot",),
    ),
    (Reservation, ("_given", "_is_protected", "_is_file", "num_chunks")),
    (Transfer, ("_engine", "ticket", "nbytes")),
    (Slot, ("offset", "capacity_nbytes", "_last_write", "_reads", "_is_freed")),
    (Segments, ("address", "num", "nbytes")),
    (Counters, ("loaded_nbytes", "evicted_nbytes", "dropped_nbytes", "num_crowded")),
)
"""In the order of `Slot` in native/acts.h."""


def act_natively(
    dispatcher: Dispatcher,
    *,
    manager: ResidencyManager,
    acts: ResidencyActs,
    lock: CriticalLock,
    not_quiet: Sequence[list[Any]],
) -> None:
    """Tell native code where it finds what `Executor.before` and `after` look at and change.

    On a device all of that stays Python's: there ops wait for transfers, not the host.

    Args:
        dispatcher: Native code.
        manager, acts, lock: The session's.
        not_quiet: Lists that hold something while there is more to do around ops than native code does.
    """
    store = manager.store
    if not manager.is_host or not isinstance(store, FileStore):
        return
    submit, _, handle = store.engine.native_calls
    dispatcher.prepare_acts(
        lock.acquire,
        lock.release,
        State.RESIDENT,
        State.LOADING,
        State.AWAY,
        (*manager.flights.lists(), *not_quiet),
        Transfer,
        *store.engine.finished_ring,
        NO_GUARD,
        (manager.guards.lift, acts.reread, acts.guard),
        manager.records,
        tuple(owner.__dict__[name] for owner, names in _SLOTS for name in names),
        (
            store.engine,
            store.engine.refusal,
            manager.moves.append,
            manager.fork_readers.held,
            manager.counters,
            acts.writes,
            acts.loads,
        ),
        (submit, handle, *store.native_file),
    )
    dispatcher.allow_releases(NativeReleases.NONE if manager.debug else NativeReleases.ALL)
