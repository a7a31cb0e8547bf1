"""Train models larger than memory, under a byte budget that is held, bit for bit equal."""

from ooc._current import memory_stats, set_budget, yielded
from ooc.errors import BudgetTooSmall, HiddenWrite, OocError, Refused, SessionError, StoreFailed
from ooc.fragmentation.live import Recording, record_fragmentation
from ooc.interop.micro_batches import micro_batches
from ooc.interop.opaque_ops import opaque
from ooc.interop.step_in_backward import StepInBackward, accumulating, step_in_backward
from ooc.session import Session

__all__ = [
    "BudgetTooSmall",
    "HiddenWrite",
    "OocError",
    "Recording",
    "Refused",
    "Session",
    "SessionError",
    "StepInBackward",
    "StoreFailed",
    "accumulating",
    "memory_stats",
    "micro_batches",
    "opaque",
    "record_fragmentation",
    "set_budget",
    "step_in_backward",
    "yielded",
]
