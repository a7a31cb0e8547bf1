"""oneDNN's graph fusion in TorchScript (`torch.jit.enable_onednn_fusion`), which no session can see into.

Fused groups read and write tensors in C++ whenever they run, without an op. So there are none while a session is open.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ooc.interop.replacements import Replacements
from ooc.tracing.call_sites import users_stacklevel
from ooc.tracing.heap import instances_of


class GraphFusion:
    """Keeps oneDNN's graph fusion off while a session is open; warns once if the program wants it."""

    def __init__(self) -> None:
        self._replacements = Replacements()
        self._is_open = False
        self._is_wanted = False
        self._has_warned = False

    def __repr__(self) -> str:
        return f"<GraphFusion {'wanted' if self._is_wanted else 'not wanted'}>"

    def open(self) -> None:
        """Turn it off, and let what is compiled with it be compiled anew."""
        native: Any = torch._C
        if not hasattr(native, "_jit_set_llga_enabled"):
            return
        self._set, self._is_open = native._jit_set_llga_enabled, True
        if native._jit_llga_enabled():
            self._want(True)
            self._set(False)
            _forget_compiled()
        self._replacements.replace(native, "_jit_set_llga_enabled", self._want)
        self._replacements.replace(native, "_jit_llga_enabled", lambda: self._is_wanted)

    def close(self) -> None:
        """Let it be as the program wants it. Idempotent."""
        self._replacements.put_back()
        if self._is_open:
            self._is_open = False
            self._set(self._is_wanted)

    def _want(self, is_enabled: bool) -> None:
        self._is_wanted = bool(is_enabled)
        if self._is_wanted and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "oneDNN graph fusion (torch.jit.enable_onednn_fusion) is off while an ooc session is open: the groups "
                "that it makes use tensors that the session does not see. TorchScript runs op by op, with the results "
                "of that. It is as the program wants it when the session ends.",
                RuntimeWarning,
                stacklevel=users_stacklevel(),
            )


def _forget_compiled() -> None:
    """Drop the compiled code of all scripted functions and methods: their fused groups."""
    kinds = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    for each in instances_of(*kinds, torch.jit.ScriptModule):
        if type(each) in kinds:
            each._debug_flush_compilation_cache()
            continue
        native: Any = each._c
        for name in native._method_names():
            native._get_method(name)._debug_flush_compilation_cache()
