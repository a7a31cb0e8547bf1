"""Library calls that ask for the addresses of tensors and have no more use for them when they return.

Nobody can tell how long a number is used, so a variable whose `data_ptr` was asked for is moved by no plan until the
next step begins. But a checkpoint asks for the address of every parameter, to find out which share memory and to
write them, and then the rest of the step would run on demand. Of the calls here it is known, from their source, that
they compare addresses or read through them, and that none is in what they return or leave behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

_CALLS = {
    "save": {"safetensors.torch", "accelerate.utils.other"},
    "save_file": {"safetensors.torch"},
    "save_model": {"safetensors.torch", "accelerate.accelerator"},
    "save_pretrained": {"transformers.modeling_utils", "peft.peft_model"},
    "save_torch_model": {"huggingface_hub.serialization._torch"},
    "save_torch_state_dict": {"huggingface_hub.serialization._torch"},
    "split_torch_state_dict_into_shards": {"huggingface_hub.serialization._torch"},
}
"""By the function's name its modules; read in safetensors 0.8, huggingface_hub 2.4, transformers 5.23, peft 0.21 and
accelerate 1.15."""


_COMPARING: dict[str, set[str] | None] = {
    "torch.serialization": None,  # all of its functions
    "torch._tensor": {"__deepcopy__", "_reduce_ex_internal"},
}
"""Modules, and functions of them, that compare an address at once, with others or with zero; torch 2.11 to 2.14."""


def is_compared() -> bool:
    """Whether the function that asks for the address (the caller's caller) only compares it at once."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code.co_name == "_data_ptr" and frame.f_globals.get("__name__") == "torch.storage":
        frame = frame.f_back  # `TypedStorage` asks on behalf of that
    if frame is None:
        return False
    names = _COMPARING.get(frame.f_globals.get("__name__", ""), set())
    return names is None or frame.f_code.co_name in names


def call_of_pointer() -> int | None:
    """Identify the outermost of these calls that this thread is in; None: it is in none of them."""
    calls = list(_calls())
    return calls[-1] if calls else None


def calls_under_way() -> set[int]:
    """Identities of those of these calls that this thread is in.

    They are addresses of frames, which are used again: frames of other functions are left out, else one of them could
    be taken for a call that has returned.
    """
    return set(_calls())


def _calls() -> Iterator[int]:
    """Identities of the calls that this thread is in, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        modules = _CALLS.get(frame.f_code.co_name)
        if modules is not None and frame.f_globals.get("__name__") in modules:
            yield id(frame)
        frame = frame.f_back
