"""Train models larger than memory, under a byte budget that is held, bit for bit equal."""

from ooc.budget_change import set_budget
from ooc.errors import BudgetTooSmall, HiddenWrite, OocError, Refused, SessionError, StoreFailed
from ooc.fragmentation.live import Recording, record_fragmentation
from ooc.opaque_ops import opaque
from ooc.session import Session
from ooc.statistics import memory_stats

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
