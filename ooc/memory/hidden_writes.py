"""The error for bytes that changed although nothing said so (debug mode)."""

from __future__ import annotations

from ooc.errors import HiddenWrite
from ooc.memory.record import VariableRecord
from ooc.units import format_nbytes


def hidden_write(record: VariableRecord) -> HiddenWrite:
    """What to raise where a resident record is not what its copy in the store is, which is to be relied on."""
    return HiddenWrite(
        f"{record.label or 'a variable'} ({format_nbytes(record.nbytes)}) was changed since it was last "
        "written to the store, but no op that ran meanwhile says that it writes it: outside debug mode the "
        "change would be lost.\n  Options: ooc.opaque(fn) around code that writes tensors behind the "
        "dispatcher's back; a report, if it was an ATen op (its schema hides a write)."
    )
