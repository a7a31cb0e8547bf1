"""How much host memory there is to pin for a device: by the kernel, or as the user says."""

from __future__ import annotations

import os

from ooc.units import parse_nbytes

__all__ = ["VARIABLE", "host_memory_nbytes"]

VARIABLE = "OOC_HOST_NBYTES"
"""Environment variable: host memory to reckon with, such as "96GiB". For hosts that are given memory only as they use
it, which the kernel does not count as available before."""


def host_memory_nbytes(available_nbytes: int) -> int:
    """The memory that sizes are taken from: what `VARIABLE` says, else `available_nbytes`.

    Raises:
        ValueError: The variable is no size.
    """
    said = os.environ.get(VARIABLE)
    return parse_nbytes(said, what=VARIABLE) if said else available_nbytes
