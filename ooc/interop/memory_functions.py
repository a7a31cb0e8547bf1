"""The functions of torch that hand out a tensor's memory, or read it, without an op: replaced by `Exports`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ooc.dispatch.guest_ops import is_guest
from ooc.interop.compared_pointers import is_compared
from ooc.interop.unseen_access import Lender, storage_pointer
from ooc.memory.record import VariableRecord


class Exporter(Lender, Protocol):
    """What they need of `Exports`; see there."""

    @property
    def is_saving(self) -> bool: ...
    def export(self, address: int) -> VariableRecord | None: ...
    def export_until_boundary(self, address: int) -> None: ...
    def end(self, record: VariableRecord) -> None: ...
    def end_at_boundary(self, record: VariableRecord) -> None: ...
    def copy_for_guest(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def storage_to_read(self, storage: Any) -> Any: ...
    def saving(self) -> AbstractContextManager[None]: ...


def replacements() -> list[tuple[Any, str, Callable[[Exporter, Any], Any]]]:
    """The functions to replace: owner, name, and what makes the replacement."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    return [
        (tensor, "numpy", _make_numpy),
        (tensor, "tolist", _make_tolist),
        (tensor, "data_ptr", _make_data_ptr),
        (tensor, "__dlpack__", _make_dlpack),
        (torch.utils.dlpack, "to_dlpack", _make_dlpack),
        (torch, "to_dlpack", _make_dlpack),
        (storage, "data_ptr", _make_storage_data_ptr),
        (storage, "__getitem__", _make_storage_reading),
        (storage, "__setitem__", _make_storage_reading),
        (storage, "_write_file", _make_storage_writing_file),
        (torch._C.PyTorchFileWriter, "write_record", _make_record_writing),
        (storage, "_share_fd_cpu_", _make_storage_sharing),
        (storage, "_share_filename_cpu_", _make_storage_sharing),
        (torch, "save", _make_save),
        (torch.serialization, "save", _make_save),
    ]


def _make_numpy(exports: Exporter, original: Any) -> Any:
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        address = exports.address(self)
        if not address:
            return original(self, *args, **kwargs)
        record = exports.export(address)
        try:
            array = original(self, *args, **kwargs)
        except BaseException:
            if record is not None:
                exports.end(record)
            raise
        if record is not None:
            weakref.finalize(array, exports.end_at_boundary, record).atexit = False
        return array

    return numpy


def _make_tolist(exports: Exporter, original: Any) -> Any:
    def tolist(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        address = exports.address(self)
        if not address:
            return original(self, *args, **kwargs)
        if is_guest():
            return original(exports.copy_for_guest(self), *args, **kwargs)
        with exports.reading(address):
            return original(self, *args, **kwargs)

    return tolist


def _make_data_ptr(exports: Exporter, original: Any) -> Any:
    def data_ptr(self: torch.Tensor) -> int:
        address = exports.address(self)
        if address and not is_compared():
            exports.export_until_boundary(address)
        pointer: int = original(self)
        return pointer

    return data_ptr


def _make_dlpack(exports: Exporter, original: Any) -> Any:
    def dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        address = exports.address(tensor)
        if not address or tensor.requires_grad:
            return original(tensor, *args, **kwargs)
        record = exports.export(address)
        if record is None:
            return original(tensor, *args, **kwargs)
        # A capsule has no finalizer that we could use. So export a tensor over the same memory whose
        # storage keeps its owner alive, and end the export when that dies.
        with _disable_current_modes():
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            owner = np.ctypeslib.as_array(_bytes_at(address, nbytes)) if tensor.is_cpu else DeviceBytes(address, nbytes)
            weakref.finalize(owner, _end_with, exports, record, storage).atexit = False
            flat = torch.from_numpy(owner) if tensor.is_cpu else torch.as_tensor(owner, device=tensor.device)
            del owner
            size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
            alias = flat[: nbytes // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            return original(alias.as_strided(size, stride, offset), *args, **kwargs)

    return dlpack


class DeviceBytes:
    """Device memory in the form in which torch and CuPy take it over without a copy; its users keep this alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 2,  # from 3 on torch would ask for a stream to wait for: the tensor's own work is on its stream
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _end_with(exports: Exporter, record: VariableRecord, _storage: Any) -> None:
    """End an export that has kept its storage alive."""
    exports.end_at_boundary(record)


def _bytes_at(address: int, nbytes: int) -> Any:
    return (ctypes.c_uint8 * nbytes).from_address(address)


def _make_storage_data_ptr(exports: Exporter, original: Any) -> Any:
    def data_ptr(self: Any) -> int:
        pointer: int = original(self)
        if exports.owns(pointer) and not is_compared():
            exports.export_until_boundary(pointer)
        return pointer

    return data_ptr


def _make_storage_reading(exports: Exporter, original: Any) -> Any:
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        pointer = storage_pointer(self)
        if not exports.owns(pointer):
            return original(self, *args, **kwargs)
        with exports.reading(pointer):
            return original(self, *args, **kwargs)

    return reading


def _make_storage_writing_file(exports: Exporter, original: Any) -> Any:
    read = _make_storage_reading(exports, original)

    def writing_file(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not exports.is_saving and not is_guest():
            return read(self, *args, **kwargs)
        return original(exports.storage_to_read(self), *args, **kwargs)

    return writing_file


def _make_record_writing(exports: Exporter, original: Any) -> Any:
    def write_record(self: Any, name: str, data: Any, *args: Any) -> Any:
        return original(self, name, exports.storage_to_read(data), *args)

    return write_record


def _make_storage_sharing(exports: Exporter, original: Any) -> Any:
    """Replace a function that moves a storage to shared memory: it copies and frees it below the dispatcher."""

    def sharing(self: Any, *args: Any, **kwargs: Any) -> Any:
        pointer = storage_pointer(self)
        if not exports.owns(pointer):
            return original(self, *args, **kwargs)
        with exports.still() if is_guest() else exports.reading(pointer):
            return original(self, *args, **kwargs)

    return sharing


def _make_save(exports: Exporter, original: Any) -> Any:
    def save(*args: Any, **kwargs: Any) -> Any:
        with exports.saving():
            return original(*args, **kwargs)

    return save
