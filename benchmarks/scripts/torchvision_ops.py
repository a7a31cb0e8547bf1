"""Import before what imports torchvision: makes it importable where it is of another build than torch.

Next to a torch for the CPU pip installs the torchvision for CUDA: its compiled operators cannot be loaded, and then its
import fails for want of one of them, and with it timm's and most of transformers'. None of the scripts uses these
operators, so those that the import asks for are declared, without an implementation.
"""

import importlib
import re

import torch

_MISSING = re.compile(r"operator torchvision::(\w+) does not exist")


def _missing_operator() -> str | None:
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None  # not installed: nothing to do
    except RuntimeError as error:
        found = _MISSING.search(str(error))
        if found is None:
            raise
        return found[1]
    return None


while (name := _missing_operator()) is not None:
    torch.library.define(f"torchvision::{name}", "(Tensor value) -> Tensor")  # a second time it would raise
