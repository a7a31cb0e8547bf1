"""Train models larger than memory, under a byte budget that is held, bit for bit equal."""

from ooc._current import memory_stats, set_budget
from ooc.errors import BudgetTooSmall, HiddenWrite, OocError, Refused, SessionError, StoreFailed
from ooc.fragmentation.live import Recording, record_fragmentation
from ooc.interop.opaque_ops import opaque
from ooc.session import Session

__all__ = [
    "BudgetTooSmall",
    "HiddenWrite",
    "OocError",
    "Recording",
    "Refused",
    "Session",
    "SessionError",
    "StoreFailed",
    "memory_stats",
    "opaque",
    "record_fragmentation",
    "set_budget",
]
