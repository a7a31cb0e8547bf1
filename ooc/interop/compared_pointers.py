"""Functions of torch that ask for a tensor's address only to compare it at once: they give out no memory.

Nobody can tell how long a number is used, so a variable whose `data_ptr` was asked for counts as written, and is loaded
late, until the next step begins. Of the functions here it is known, from their source, that they have no use for it
after a comparison with other addresses, or with zero.
"""

from __future__ import annotations

import sys
from types import FrameType

_COMPARING: dict[str, set[str] | None] = {
    "torch.serialization": None,  # all of its functions
    "torch._tensor": {"__deepcopy__", "_reduce_ex_internal"},
    "torch.autograd.graph": {"_get_tid", "_get_sid"},  # of `allow_mutation_on_saved_tensors`: keys of a dictionary
}
"""By their modules; torch 2.11 to 2.14."""


def is_compared() -> bool:
    """Whether the function that asks for the address (the caller's caller) only compares it at once."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code.co_name == "_data_ptr" and frame.f_globals.get("__name__") == "torch.storage":
        frame = frame.f_back  # `TypedStorage` asks on behalf of that
    if frame is None:
        return False
    names = _COMPARING.get(frame.f_globals.get("__name__", ""), set())
    return names is None or frame.f_code.co_name in names
