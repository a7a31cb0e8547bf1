"""Builds and loads the native dispatcher (native/dispatch.cpp, native/boxed.cpp) on first use."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.replay.dispatcher import Dispatcher
from vmm import native_build
from vmm.table import AllocatorTable
from vmm.torch_cpu import torch_build_flags

_log = logging.getLogger(__name__)

_NATIVE = Path(__file__).parent / "native"
_BOXED_WAYS: tuple[tuple[int, tuple[str, ...]], ...] = ((2 << 30, ("-DOOC_SEES_NODES",)), (1 << 30, ()))
"""Ways to compile boxed.cpp, the best one first: twice the memory that g++ 12 took, and flags."""

_ALLOCATOR_HEADER = Path(__file__).parents[2] / "vmm" / "native" / "allocator.h"


@functools.cache
def _dispatch_module() -> Any:
    return _load("dispatch", ["c10", "torch_cpu"])


def dispatcher_type() -> Any:
    """The native `Dispatcher` class. Raises `NativeBuildError` with the remedy."""
    return _dispatch_module().Dispatcher


def leave_unnoticed(mode: type) -> bool:
    """Let torch compute under dispatch modes of this class as without one (native/unnoticed_mode.h). For good.

    Returns:
        False: this torch cannot be told. Under any mode it takes other formulas in places, with other bits.

    Raises:
        NativeBuildError: See `dispatcher_type`.
    """
    is_left: bool = _dispatch_module().leave_unnoticed(mode)
    return is_left


@functools.cache
def notice_sums() -> None:
    """Let torch go on to sum up gradients under a mode as it does under any: where it asks from is found by trial.

    That runs backward passes, which start autograd's threads of all devices: call it when the session's allocator is
    torch's.
    """
    module = _dispatch_module()

    def backward(*, sums: bool) -> None:
        x = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)
        negative = x.neg()
        (negative + (negative if sums else x.detach())).backward()

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        others = module.sites_of(lambda: backward(sums=False))
        for site in set(module.sites_of(lambda: backward(sums=True))).difference(others):
            module.keep_noticed(site)


def sum_in_place(whether: bool) -> None:
    """Whether torch sums up gradients in place where it does without a mode (`notice_sums`). In the whole process."""
    _dispatch_module().notice(not whether)


@functools.cache
def boxed_ops() -> Any | None:
    """The native module that runs ops without Python (native/boxed.cpp); None where it cannot be built.

    Its headers are ATen's, which take half a gigabyte to compile, and autograd's, which take as much again: a small
    board may have no room for the latter, or for both, and another torch may have changed what they say. Without it ops
    take the way through Python, some microseconds longer each; without autograd's, those of backward passes take one or
    two more while they are recorded.
    """
    libraries = ["c10", "torch_cpu", "torch_python"]
    for nbytes, flags in _BOXED_WAYS:
        try:
            return _load("boxed", libraries, flags=flags, memory_nbytes=nbytes, is_optional=True)
        except (native_build.NativeBuildError, ImportError) as error:  # built, but torch has not what it calls
            _log.info("native/boxed.cpp cannot be built%s: %s", f" with {' '.join(flags)}" if flags else "", error)
    _log.info("ops go through Python")
    return None


def _load(
    name: str, libraries: list[str], *, flags: tuple[str, ...] = (), memory_nbytes: int = 0, is_optional: bool = False
) -> Any:
    """Build and load one of our extension modules, `ooc._NAME`, from native/NAME.cpp."""
    include_dirs, library_dirs = torch_build_flags()
    python_headers = Path(sysconfig.get_paths()["include"])
    if not (python_headers / "Python.h").exists():
        raise native_build.NativeBuildError(
            f"Python's headers are not installed: there is no {python_headers / 'Python.h'}.\n"
            "  Options: apt install python3-dev; a Python from conda, uv or pyenv, which brings them."
        )
    path = native_build.build(
        f"ooc_{name}",
        [_NATIVE / f"{name}.cpp", *sorted(_NATIVE.glob("*.h")), _ALLOCATOR_HEADER],
        include_dirs=[*include_dirs, str(python_headers)],
        library_dirs=library_dirs,
        libraries=libraries,
        extra_flags=["-std=c++20", "-Wno-missing-field-initializers", "-Wno-cast-function-type", *flags],
        cache_key=f"{torch.__version__} {sysconfig.get_config_var('SOABI')}",
        meets_torch=True,
        memory_nbytes=memory_nbytes,
        is_optional=is_optional,
    )
    loader = importlib.machinery.ExtensionFileLoader(f"ooc._{name}", str(path))
    spec = importlib.util.spec_from_loader(f"ooc._{name}", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def new_dispatcher(
    allocator: AllocatorTable,
    *,
    dispatch: Callable[..., Any],
    before: Callable[[int], bool],
    after: Callable[[int], None],
    finish: Callable[..., None],
    failed: Callable[..., None],
) -> Dispatcher:
    """Make a dispatcher over an allocator's table, for the calling thread. It holds no resources.

    Args:
        allocator: Its state says which addresses are the session's.
        dispatch: Called as `__torch_dispatch__` for any op but the one that the plan expects.
        before, after: Called around op `index` of the plan where it has actions there; False says that the step has
            bailed out of the plan.
        finish: Called when an op that began on the plan has ended off it.
        failed: Called when a planned op raised.

    Raises:
        vmm.native_build.NativeBuildError: It cannot be built.
    """
    made: Dispatcher = dispatcher_type()(
        allocator.state_address,
        allocator.this_thread_function,
        torch.empty(0),
        torch._C.TensorBase,
        dispatch,
        before,
        after,
        finish,
        failed,
    )
    return made
