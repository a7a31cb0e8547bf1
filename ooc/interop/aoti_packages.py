"""Packages of AOTInductor (`torch._inductor.aoti_load_package`), whose code uses its inputs by address, past any op.

While a session is open the methods by which torch runs such a package are replaced: each run is one op of the step, as
if the package had been declared by `ooc.opaque`. So is the loading of its constants, which are copied by address; those
that stay the user's own (`user_managed`) are operands of each run from then on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ooc.interop.opaque_ops import OpaqueOp, run_opaque
from ooc.interop.replacements import Replacements

__all__ = ["AotiPackages"]

_KINDS = ("AOTIModelPackageLoader", "AOTIModelContainerRunnerCpu")
_RUNS = ("run", "boxed_run")
_CONSTANTS = ("load_constants", "update_constant_buffer")


class AotiPackages:
    """Replaces the methods that run AOTInductor's packages while a session is open."""

    def __init__(self) -> None:
        self._replacements = Replacements()
        self._users: weakref.WeakKeyDictionary[Any, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()
        """By package, the user's own tensors among its constants."""

    def __repr__(self) -> str:
        return "<AotiPackages>"

    def open(self) -> None:
        """Replace what this torch has."""
        native: Any = getattr(torch._C, "_aoti", None)
        for kind in (getattr(native, name, None) for name in _KINDS):
            for name in (*_RUNS, *_CONSTANTS):
                if hasattr(kind, name):
                    make = self._running if name in _RUNS else self._loading
                    self._replacements.replace(kind, name, make(getattr(kind, name)))

    def close(self) -> None:
        """Put them back. Idempotent."""
        self._replacements.put_back()

    def _running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        op = OpaqueOp(lambda _users, *args, **kwargs: run(*args, **kwargs), name=f"aoti.{run.__name__}")

        @functools.wraps(run)
        def ran(package: Any, *args: Any, **kwargs: Any) -> Any:
            users = list(self._users.get(package, {}).values())
            return run_opaque(op, (users, package, *args), kwargs)

        return ran

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        op = OpaqueOp(load, name=f"aoti.{load.__name__}")

        @functools.wraps(load)
        def loaded(package: Any, constants: Any, *args: Any, **kwargs: Any) -> Any:
            result = run_opaque(op, (package, constants, *args), kwargs)
            users = self._users.setdefault(package, {})
            is_users = kwargs.get("user_managed", args[2] if len(args) > 2 else False)
            for name, tensor in constants.items():
                users.pop(name, None)
                if is_users:
                    users[name] = tensor
            return result

        return loaded
