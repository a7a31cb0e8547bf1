"""Lets native code do what goes before a planned op where nothing is to be moved (native/acts.h)."""

from __future__ import annotations

from ooc.dispatch.signals import CriticalLock
from ooc.memory.record import NO_GUARD, State, VariableRecord
from ooc.memory.residency import ResidencyManager
from ooc.replay.acts import ResidencyActs
from ooc.replay.dispatcher import Dispatcher, NativeReleases
from ooc.replay.op_acts import Before
from ooc.replay.plan_variables import ExecutableResidency, PlanVariable
from vmm.addresses import Reservation
from vmm.store import FileStore, Transfer

_SLOTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Before, ("releases", "loads", "arrivals", "rerun", "births")),
    (ExecutableResidency, ("variable", "runs", "transfer", "waits")),
    (PlanVariable, ("record", "successor", "index", "nbytes", "evictable", "dies_within")),
    (
        VariableRecord,
        ("_state", "_runs", "_stored", "_transfer", "_exports", "_seen", "guard", "nbytes", "reservation"),
    ),
    (Reservation, ("_given", "_is_protected")),
    (Transfer, ("ticket",)),
)
"""In the order of `Slot` in native/acts.h."""


def act_natively(dispatcher: Dispatcher, *, manager: ResidencyManager, acts: ResidencyActs, lock: CriticalLock) -> None:
    """Tell native code where it finds what `Executor.before` looks at and changes.

    On a device all of that stays Python's: there ops wait for transfers, not the host.
    """
    if not manager.is_host or not isinstance(manager.store, FileStore):
        return
    dispatcher.prepare_acts(
        lock.acquire,
        lock.release,
        State.RESIDENT,
        State.LOADING,
        State.AWAY,
        manager.flights.lists(),
        Transfer,
        *manager.store.engine.finished_ring,
        NO_GUARD,
        (manager.guards.lift, acts.reread, acts.guard),
        manager.records,
        tuple(owner.__dict__[name] for owner, names in _SLOTS for name in names),
    )
    dispatcher.allow_releases(NativeReleases.NONE if manager.debug else NativeReleases.ALL)
