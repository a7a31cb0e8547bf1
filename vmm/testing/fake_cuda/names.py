"""The names, numbers and types of `cuda.bindings.driver` that the fake has, under their real names."""

from __future__ import annotations

import enum

__all__ = [
    "CUdevice_attribute",
    "CUdeviceptr",
    "CUevent_flags",
    "CUhandle",
    "CUmemAccessDesc",
    "CUmemAccess_flags",
    "CUmemAllocationGranularity_flags",
    "CUmemAllocationProp",
    "CUmemAllocationType",
    "CUmemLocation",
    "CUmemLocationType",
    "CUresult",
    "CUstream_flags",
    "CallRefused",
    "RuleBroken",
]


class CUresult(enum.IntEnum):
    """Result codes, by their real numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class CUmemAllocationType(enum.IntEnum):
    """Kinds of allocations."""

    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    """Where memory is."""

    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):  # noqa: N801
    """What a device may do at a range."""

    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):  # noqa: N801
    """Which granularity to ask for."""

    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


class CUstream_flags(enum.IntEnum):  # noqa: N801
    """How a stream meets the default stream."""

    CU_STREAM_DEFAULT = 0
    CU_STREAM_NON_BLOCKING = 1


class CUevent_flags(enum.IntEnum):  # noqa: N801
    """What an event can do."""

    CU_EVENT_DEFAULT = 0
    CU_EVENT_BLOCKING_SYNC = 1
    CU_EVENT_DISABLE_TIMING = 2


class CUdevice_attribute(enum.IntEnum):  # noqa: N801
    """What can be asked of a device."""

    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18
    CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED = 102


class CUhandle:
    """A driver's handle. No number, as in the real bindings: `int()` gives its number."""

    __slots__ = ("_number",)

    def __init__(self, number: int = 0) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._number:#x}>"


class CUdeviceptr(CUhandle):
    """A device address."""

    __slots__ = ()


class CUmemLocation:
    """A device."""

    def __init__(self) -> None:
        self.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
        self.id = 0


class CUmemAllocationProp:
    """What an allocation is like."""

    def __init__(self) -> None:
        self.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        self.location = CUmemLocation()


class CUmemAccessDesc:
    """Who may do what."""

    def __init__(self) -> None:
        self.location = CUmemLocation()
        self.flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


class RuleBroken(AssertionError):
    """The program did what the real driver does not forbid but answers with garbage, a lost context or worse."""


class CallRefused(Exception):
    """Inside the fake: the call answers this result."""

    def __init__(self, result: CUresult) -> None:
        super().__init__(result.name)
        self.result = result
