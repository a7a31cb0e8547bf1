"""Recipes: what it takes to run one op of the step again, noted when it ran first.

A recipe keeps no variable alive. In place of each tensor over a variable it has the variable's index and the tensor's
geometry; at the re-run a stand-in over the variable's address takes its place. Tensors over small storages, which
nobody manages, may change later in the step, so the recipe has a copy of their bytes from before the op, shared with
the step's other recipes as long as they do not change. All other arguments are kept by value. With them go the
settings that kernels ask for (grad mode, threads, determinism), the stream and, for random ops, the state of the
generator.

A re-run is below autograd, autocast and all modes: no graph, no version counter and no hook of the program sees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.replay import precisions
from ooc.replay.device_settings import CudaSettings
from ooc.replay.inner_keys import InnerKeys
from ooc.replay.random_state import Apart, RandomState, generators_of
from ooc.tracing.replayability import is_random

StorageOf = Callable[[int], torch.UntypedStorage]
"""The storage to use for a variable, by its index in the plan."""

_data_ptr: Any = torch._C.StorageBase.data_ptr  # an export, where a session is open, by its usual name

_memcmp: Any = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t

_SMALLEST_NORMAL, _HALF = sys.float_info.min, 0.5  # multiplied where denormal numbers are flushed: 0

_SIMPLE = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device, torch.memory_format)


class NoRecipe(Exception):
    """An op's arguments are such that it cannot be noted; the message says what stands in the way."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """A tensor, but for its storage."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        return cls(tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.requires_grad)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        return tensor.requires_grad_() if self.requires_grad else tensor


@dataclass(frozen=True, slots=True)
class _OnVariable:
    variable: int
    geometry: _Geometry


@dataclass(frozen=True, slots=True)
class _OnCopy:
    """On a copy of a small storage. A re-run may change it, so each one gets a copy of its own."""

    number: int
    geometry: _Geometry


class _Random:
    """The argument `generator`: the generator in the state that it had."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator


@dataclass(frozen=True, slots=True)
class Settings:
    """What kernels ask of the thread and the process beside their arguments.

    Autocast is not among it: ops arrive below autocast, and are run again below it. What they call may not be: that is
    `InnerKeys`.
    """

    grad: bool
    inference: bool
    num_threads: int
    deterministic: bool
    deterministic_warns: bool
    fills_uninitialized: bool
    default_dtype: torch.dtype
    flushes_denormals: bool
    nnpack: bool
    onednn: bool
    onednn_deterministic: bool
    onednn_precisions: tuple[str, ...]
    matmul_precision: str | None
    """None: newer settings contradict it, and torch does not tell."""
    cuda: CudaSettings | None
    """None: CUDA has not been started."""

    @classmethod
    def now(cls) -> Settings:
        """Those of this moment."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.get_default_dtype(),
            _SMALLEST_NORMAL * _HALF == 0.0,
            torch._C._get_nnpack_enabled(),
            torch._C._get_mkldnn_enabled(),
            torch._C._get_mkldnn_deterministic(),
            tuple([precisions.precision("mkldnn", op) for op in precisions.ONEDNN_OPS]),
            precisions.matmul_precision(),
            CudaSettings.now() if torch.cuda.is_initialized() else None,
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """For the time of the block, the settings are these."""
        before = Settings.now()
        if before == self:
            yield
            return
        with contextlib.ExitStack() as stack:
            if before.inference != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            if before._precisions != self._precisions:
                stack.enter_context(precisions.precisions_unset())
            stack.callback(before._set)
            self._set()
            yield

    @property
    def _precisions(self) -> tuple[Any, ...]:
        return self.matmul_precision, self.onednn_precisions, self.cuda.precisions if self.cuda is not None else None

    def _set(self) -> None:
        now = Settings.now()
        if now.grad != self.grad:
            torch._C._set_grad_enabled(self.grad)
        if now.num_threads != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if (now.deterministic, now.deterministic_warns) != (self.deterministic, self.deterministic_warns):
            torch._C._set_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        if now.fills_uninitialized != self.fills_uninitialized:
            torch.utils.deterministic.fill_uninitialized_memory = self.fills_uninitialized
        if now.default_dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if now.flushes_denormals != self.flushes_denormals:
            torch.set_flush_denormal(self.flushes_denormals)
        if now.nnpack != self.nnpack:
            torch._C._set_nnpack_enabled(self.nnpack)
        if now.onednn != self.onednn:
            torch._C._set_mkldnn_enabled(self.onednn)
        if now.onednn_deterministic != self.onednn_deterministic:
            torch._C._set_mkldnn_deterministic(self.onednn_deterministic)
        if self.matmul_precision is not None and now.matmul_precision != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)  # before the newer ones: it sets two of them
        for op, precision in zip(precisions.ONEDNN_OPS, self.onednn_precisions, strict=True):
            if precisions.precision("mkldnn", op) != precision:
                precisions.set_precision("mkldnn", op, precision)
        if self.cuda is not None and now.cuda != self.cuda:
            self.cuda.apply()


class SmallCopies:
    """The copies of small storages that the recipes of a step have: one of each for as long as its bytes stay.

    Whether they do is told by comparing them. What writes through `.data`, an array or a pointer leaves no other trace,
    and for so few bytes it takes no longer than a copy. Not so on a device, where the host would have to wait: there
    each recipe has its own.
    """

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: dict[int, torch.UntypedStorage] = {}  # by the original's identity, which may be used again

    def __repr__(self) -> str:
        return f"<SmallCopies of {len(self._latest)} storages>"

    def of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of a storage's present bytes. Nobody may change it."""
        found = self._latest.get(storage._cdata)
        if found is None or not _have_same_bytes(found, storage):
            found = _copy(storage)
            if storage.device.type == "cpu":
                self._latest[storage._cdata] = found
        return found

    def clear(self) -> None:
        """Forget them: those that recipes have stay theirs."""
        self._latest.clear()


class Recipe:
    """One op with the arguments it had. Make it before the op runs.

    Args:
        func: The op.
        args, kwargs: Its arguments.
        variable_of: The plan's variable that a tensor lies on; None if it lies on none.
        small_nbytes: Storages that are no variable's and have at least so many bytes are not copied.
        apart: Where the states of generators are allocated.
        copies: Of small storages, shared with the step's other recipes; None: it has its own.
        stream: The device's stream on which the op runs; None: the host.

    Attributes:
        variables: Those that its operands lie on.

    Raises:
        NoRecipe: An argument cannot be noted.
    """

    __slots__ = ("_args", "_copies", "_inner", "_kwargs", "_random", "_settings", "func", "stream", "variables")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        variable_of: Callable[[torch.Tensor], int | None],
        small_nbytes: int,
        apart: Apart,
        copies: SmallCopies | None = None,
        stream: Any = None,
    ) -> None:
        self.func = func
        self.stream = stream
        self._copies: list[torch.UntypedStorage] = []
        noting = _Noting(self._copies, copies or SmallCopies(), variable_of, small_nbytes)
        try:
            self._args = tuple(noting.note(value) for value in args)
            self._kwargs = {name: noting.note(value) for name, value in kwargs.items()}
            self.variables = frozenset(noting.variables)
            self._settings, self._inner = Settings.now(), InnerKeys.now()
            self._random = RandomState(
                generators_of(noting.generator, noting.devices) if is_random(func) else (), apart
            )
        except NoRecipe:
            raise
        except Exception as error:  # the op itself may run all the same
            raise NoRecipe(f"{type(error).__name__} while its arguments were noted: {error}") from error

    def __repr__(self) -> str:
        return f"<Recipe of {self.func}>"

    def run(self, storage_of: StorageOf) -> Any:
        """Run the op again. Its results are on whatever its allocations were served from."""
        # In this order: entering or leaving inference mode sets autograd's part of the dispatch keys anew.
        with self._settings.applied(), below_everything(), self._random.again():
            copies = [storage.clone() for storage in self._copies]
            args = tuple(_made(value, storage_of, copies) for value in self._args)
            kwargs = {name: _made(value, storage_of, copies) for name, value in self._kwargs.items()}
            with self._inner.on():
                return self.func(*args, **kwargs)


@contextlib.contextmanager
def below_everything() -> Iterator[None]:
    """Within the block ops go straight to their kernels: past modes, autocast and autograd."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


def has_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage reaches as far as its elements.

    Not once it was resized to 0 (FSDP), nor of zeros without memory (tangents of forward-mode AD).
    """
    if tensor.numel() == 0:
        return True
    if tensor._is_zerotensor():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return bool((tensor.storage_offset() + last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes())


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy that no mode of the program's sees, nor traces as an op of its own. (Usually there is none.)"""
    if not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()):
        return storage.clone()
    with below_everything():
        return storage.clone()


def _have_same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Of two storages on the host."""
    nbytes = one.nbytes()
    return nbytes == other.nbytes() and bool(_memcmp(_data_ptr(one), _data_ptr(other), nbytes) == 0)


class _Noting:
    def __init__(
        self,
        copies: list[torch.UntypedStorage],
        shared: SmallCopies,
        variable_of: Callable[[torch.Tensor], int | None],
        small_nbytes: int,
    ) -> None:
        self.generator: torch.Generator | None = None
        self.devices: set[torch.device] = set()
        self.variables: set[int] = set()
        self._copies = copies
        self._shared = shared
        self._variable_of = variable_of
        self._small_nbytes = small_nbytes
        self._numbers: dict[int, int] = {}  # by the storage's identity

    def note(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._note_tensor(value)
        if value is None or isinstance(value, _SIMPLE):
            if isinstance(value, torch.device):
                self.devices.add(value)
            return value
        if isinstance(value, list | tuple):
            return (
                type(value)(self.note(each) for each in value) if type(value) in (list, tuple) else self._refuse(value)
            )
        if isinstance(value, torch.Generator):
            self.generator = value
            return _Random(value)
        return self._refuse(value)

    def _note_tensor(self, tensor: torch.Tensor) -> _OnVariable | _OnCopy:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise NoRecipe(f"an operand is no plain strided tensor ({tensor.layout}, {tensor.dtype})")
        if not has_its_bytes(tensor):
            raise NoRecipe(f"an operand's storage was shrunk to {tensor.untyped_storage().nbytes()} bytes")
        self.devices.add(tensor.device)
        variable = self._variable_of(tensor)
        geometry = _Geometry.of(tensor)
        if variable is not None:
            self.variables.add(variable)
            return _OnVariable(variable, geometry)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes >= self._small_nbytes:
            raise NoRecipe(f"an operand of {nbytes} bytes is not the session's")
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._copies)
            self._copies.append(self._shared.of(storage))
        return _OnCopy(number, geometry)

    @staticmethod
    def _refuse(value: Any) -> Any:
        raise NoRecipe(f"an argument is a {type(value).__name__}")


def _made(value: Any, storage_of: StorageOf, copies: list[torch.UntypedStorage]) -> Any:
    if isinstance(value, _OnVariable):
        return value.geometry.over(storage_of(value.variable))
    if isinstance(value, _OnCopy):
        return value.geometry.over(copies[value.number])
    if isinstance(value, list | tuple):
        return type(value)(_made(each, storage_of, copies) for each in value)
    if isinstance(value, _Random):
        return value.generator
    return value


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that somebody else owns: when it goes, nothing is freed."""
    storage: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return storage
