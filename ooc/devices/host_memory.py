"""How much host memory may be pinned for a device: as the kernel says, or as the user says."""

from __future__ import annotations

import os

from ooc.units import parse_nbytes

__all__ = ["VARIABLE", "host_memory_nbytes"]

VARIABLE = "OOC_HOST_NBYTES"
"""Environment variable with the host memory to plan with, such as "96GiB". For hosts that get memory only as they use
it, which the kernel does not count as available before."""


def host_memory_nbytes(available_nbytes: int) -> int:
    """Bytes of host memory to plan with: what `VARIABLE` says, else `available_nbytes`.

    Raises:
        ValueError: The variable is not a size.
    """
    said = os.environ.get(VARIABLE)
    return parse_nbytes(said, what=VARIABLE) if said else available_nbytes
