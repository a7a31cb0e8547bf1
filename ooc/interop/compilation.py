"""`torch.compile` under a session: what inductor compiles is run as regions, all else is left eager.

Dynamo does not compile under a dispatch mode unless the mode says that it does not mind. The session's says so as soon
as something is to be compiled by inductor, after torch was told to make every compiled graph visible
(`ooc.interop.compiled_region`). Code of other backends may call native kernels that no mode sees: it is not compiled,
and the user is told once.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _python_dispatch

from ooc.dispatch.mode import SessionMode
from ooc.interop.compiled_region import nbytes_by_storage, region_of
from ooc.interop.guest_threads import GuestMode
from ooc.interop.replacements import Replacements
from ooc.tracing.call_sites import users_stacklevel
from ooc.units import format_nbytes

__all__ = ["Compilation"]

_lock = threading.Lock()
_INDUCTOR = "inductor"
_RUN_BY_OPS = "ooc.dispatch.", "ooc.memory.", "ooc.replay.", "ooc.tracing.", "vmm.", "scheduler."
_LARGE_FRACTION = 2
"""A region that takes more than 1/2 of the budget leaves little room for what is to come."""


class Compilation:
    """Replaces `torch.compile`, and decides for each call of compiled code whether it runs as compiled.

    Args:
        mode: The session's.
        is_host: Whether the session's memory is the host's.
        budget_nbytes: Tells the budget of now.
    """

    def __init__(self, *, mode: SessionMode, is_host: bool, budget_nbytes: Callable[[], int]) -> None:
        self._mode = mode
        self._is_host = is_host
        self._budget_nbytes = budget_nbytes
        self._replacements = Replacements()
        self._has_announced = False
        self._inner: Callable[[Any], Any] | None = None  # torch's own choice

    def __repr__(self) -> str:
        return f"<Compilation, {'gated' if self._inner is not None else 'not gated'}>"

    def install(self) -> None:
        """From now on compiled code runs as regions, or eagerly."""
        compile_function = torch.compile

        def compile_in_session(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("disable"):
                return compile_function(model, *args, **kwargs)
            backend = kwargs.get("backend", _INDUCTOR)
            if backend == _INDUCTOR and self._is_host and self._arm():
                self._install_gate()
                return compile_function(model, *args, **kwargs)
            self._announce(str(backend))
            return model if model is not None else _itself

        self._replacements.replace(torch, "compile", compile_in_session)
        self._mode.note_region = self._note_region
        self._install_gate()

    def remove(self) -> None:
        """Compiled code runs as ever. Idempotent."""
        self._replacements.put_back()
        self._inner = None

    def _install_gate(self) -> None:
        """Be asked whenever compiled code is called. Without Dynamo imported, nothing has been compiled."""
        eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
        if eval_frame is not None and self._inner is None:
            self._inner = eval_frame._callback_from_stance
            self._replacements.replace(eval_frame, "_callback_from_stance", self._choose)
            _keep_dynamo_out()

    def _choose(self, callback: Any) -> Any:
        """Torch asks by which compiler a frame is to be compiled: None runs it eagerly."""
        assert self._inner is not None
        if callback is None:  # compilation is disabled here, around an optimizer for example
            return self._inner(callback)
        backend = _backend_of(callback)
        is_compiled = callback is False or _name_of(backend) == _INDUCTOR
        if not is_compiled or not self._is_host or not self._arm():
            self._announce(_name_of(backend))
            return None
        return self._inner(callback)

    def _announce(self, backend: str) -> None:
        """Warn, once a session, that code of this backend's runs eagerly."""
        if self._has_announced:
            return
        self._has_announced = True
        where = "" if self._is_host else " on a GPU"
        warnings.warn(
            f"torch.compile does nothing under an ooc session{where} with backend {backend!r}, whose code may use "
            "tensors that the session does not see: what is marked to be compiled runs op by op (with the results of "
            "eager execution). Options: backend 'inductor', on the CPU.",
            RuntimeWarning,
            stacklevel=users_stacklevel(),
        )

    def _note_region(self, name: str, need_nbytes: int) -> None:
        """Say what a region costs that takes most of the budget."""
        budget_nbytes = self._budget_nbytes()
        if need_nbytes * _LARGE_FRACTION > budget_nbytes:
            warnings.warn(
                f"{name} is compiled as one region: what it uses and makes, {format_nbytes(need_nbytes)} of the "
                f"{format_nbytes(budget_nbytes)}, is in memory together while it runs, and little can be moved "
                "meanwhile. Options: compile blocks instead of the whole model (block.compile()), which costs "
                "torch less time, too; a larger budget.",
                RuntimeWarning,
                stacklevel=users_stacklevel(),
            )

    @staticmethod
    def _arm() -> bool:
        """Let Dynamo compile under our modes, with every compiled graph visible. False: this torch cannot."""
        if SessionMode.sees_compiled_regions:
            return True
        with _lock:
            import torch._dynamo
            import torch._inductor.config
            from torch._higher_order_ops import wrap

            config: Any = torch._inductor.config
            if not hasattr(config, "wrap_inductor_compiled_regions") or not hasattr(wrap, "inductor_compiled_code"):
                return False
            if not config.wrap_inductor_compiled_regions:
                config.wrap_inductor_compiled_regions = True  # it stays so: outside sessions it changes nothing
                torch._dynamo.reset()  # what was compiled before is not visible
            for mode in (SessionMode, GuestMode):
                if mode not in wrap.inductor_compiled_code.python_key_table:
                    wrap.inductor_compiled_code.py_impl(mode)(_run_region)
            SessionMode.sees_compiled_regions = True
            _note_that_modes_do_not_mind()
            return True


def _run_region(mode: Any, compiled: Any, inputs: list[Any], **_name: Any) -> Any:
    """Run a compiled graph as one op of the mode's."""
    region = region_of(compiled)
    if region.need_nbytes is not None or not isinstance(mode, SessionMode):
        return mode.__torch_dispatch__(region, (), (inputs,), {})
    operands = nbytes_by_storage(inputs)  # now: the region empties its list
    result = mode.__torch_dispatch__(region, (), (inputs,), {})
    region.need_nbytes = sum({**operands, **nbytes_by_storage(result)}.values())
    mode.note_region(region.name, region.need_nbytes)
    return result


def _note_that_modes_do_not_mind() -> None:
    """Tell Dynamo, which asks each mode when it is entered only. Other modes than ours may still mind."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    if all(mode.is_infra_mode() or mode.ignore_compile_internals() for mode in modes):
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals = False
        _python_dispatch.set_is_in_mode_without_ignore_compile_internals(False)


def _keep_dynamo_out() -> None:
    """Let Dynamo look at no code that ops run, nor at what that calls.

    A frame that Dynamo does not compile itself, such as the `forward` of torch's own `Sequential`, it goes through with
    its eyes open: what is called there is compiled. Modes' `__torch_dispatch__` torch takes out; ours is native code.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_RUN_BY_OPS):
            _keep_dynamo_out_of(module)


@functools.cache  # it lasts as long as the process
def _keep_dynamo_out_of(module: ModuleType) -> None:
    eval_frame: Any = torch._C._dynamo.eval_frame
    skipped = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for code in code_of(module):
        eval_frame.set_code_exec_strategy(code, skipped)


def code_of(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's own functions and methods, and of those within them; not of what it imports."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    for each in [*vars(module).values(), *(member for owner in classes for member in vars(owner).values())]:
        function = inspect.unwrap(each.__func__ if isinstance(each, (classmethod, staticmethod)) else each)
        is_own = isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__
        code = [function.__code__] if is_own else []
        while code:
            yield (found := code.pop())
            code += [constant for constant in found.co_consts if isinstance(constant, CodeType)]


def _backend_of(callback: Any) -> Any:
    """The backend within Dynamo's wrappers."""
    while True:
        inner = getattr(callback, "_torchdynamo_orig_backend", None)
        if inner is None:
            return callback
        callback = inner


def _name_of(backend: Any) -> str:
    return str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None) or backend)


def _itself(model: Any) -> Any:
    return model
