"""The CUDA driver calls that we make, each either done or a `CudaFault` that says what to do about it.

`bindings` is the module `cuda.bindings.driver` (of the package cuda-bindings) or something with its
surface, such as `vmm.testing.fake_cuda.FakeCuda`. Nothing else in vmm calls it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vmm.driver import MemoryFault
from vmm.sizes import format_nbytes

__all__ = ["CudaCalls", "CudaFault", "MemoryInfo", "load_bindings"]

_NOT_READY = "CUDA_ERROR_NOT_READY"
_INVALID_CONTEXT = 201
_NUM_ATTEMPTS = 100
_FIRST_WAIT_S = 20e-6
_LONGEST_WAIT_S = 5e-3
"""With 100 attempts a call that stays NOT_READY is given up after about half a second. The bound on attempts is
that of the public work-around that DESIGN.md names; the waits are not tuned."""

_GONE_WITH_THE_CONTEXT = frozenset({"CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_CONTEXT_IS_DESTROYED"})
"""Results after which there is nothing left to give back."""
_EXPLANATIONS = {
    "CUDA_ERROR_INVALID_VALUE": (
        "an argument breaks a rule of this call: granularity; an address that is not reserved, or mapped twice, or not",
        "report it: with addresses and sizes from the driver's books this is a defect of vmm",
    ),
    "CUDA_ERROR_OUT_OF_MEMORY": (
        "the device, or the host memory that the driver needs for its own books, has no room",
        "a smaller budget; end other processes on the device; larger chunks, since each costs the driver host memory",
    ),
    "CUDA_ERROR_NOT_INITIALIZED": ("cuInit has not been called in this process", "initialise CUDA first"),
    "CUDA_ERROR_DEINITIALIZED": ("the driver is shutting down with the process", "close the pool before exit"),
    "CUDA_ERROR_NO_DEVICE": (
        "no CUDA device is visible",
        "a machine with a GPU; nvidia-smi; CUDA_VISIBLE_DEVICES; a container started with --gpus all; device='cpu'",
    ),
    "CUDA_ERROR_STUB_LIBRARY": (
        "the library that was loaded is the toolkit's stub, not the driver's",
        "take the toolkit's lib64/stubs out of LD_LIBRARY_PATH; install the NVIDIA driver",
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "another process has the device for itself (its compute mode is exclusive or prohibited)",
        "end that process; nvidia-smi -c 0 (as root); another device",
    ),
    "CUDA_ERROR_ECC_UNCORRECTABLE": (
        "the device's memory has an error that cannot be corrected",
        "reset the device or reboot; nvidia-smi -q -d ECC; another device",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "a service that the device needs is not running (the fabric manager, on machines with NVSwitch)",
        "systemctl start nvidia-fabricmanager, of the driver's version",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "a compatibility library for a newer CUDA is in front of the driver's, and this device does not take it",
        "take the cuda-compat directory out of LD_LIBRARY_PATH; a newer driver",
    ),
    "CUDA_ERROR_UNKNOWN": (
        "the driver does not say; at the first call it is often a missing /dev/nvidia-uvm",
        "nvidia-modprobe -u, or a reboot; in a container, the device files and the nvidia runtime; dmesg",
    ),
    "CUDA_ERROR_INVALID_DEVICE": ("no such device", "a smaller device index; check CUDA_VISIBLE_DEVICES"),
    "CUDA_ERROR_INVALID_CONTEXT": (
        "no CUDA context is current on the calling thread",
        "make the device current first, for example torch.cuda.set_device and torch.cuda.init",
    ),
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": (
        "the thread's CUDA context has been destroyed",
        "close the pool before the context",
    ),
    _NOT_READY: (
        "the driver asks to try again later, and did so on every attempt",
        "let the device's queued work finish first (synchronise outside the planned step), then repeat the call",
    ),
    "CUDA_ERROR_NOT_PERMITTED": (
        "not allowed here, for example while a CUDA graph is being captured",
        "no graph capture around operations of the pool",
    ),
    "CUDA_ERROR_NOT_SUPPORTED": (
        "the device or its driver has no virtual memory management",
        "a newer driver; a device with compute capability 6.0 or more; no MIG or virtual GPU profile that lacks it",
    ),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (
        "earlier device work touched addresses where nothing was mapped; the context is lost",
        "restart the process; run in debug mode to find the op",
    ),
    "CUDA_ERROR_LAUNCH_FAILED": ("earlier device work failed; the context is lost", "restart the process"),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the kernel module and the driver library differ",
        "reboot after the driver update",
    ),
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": (
        "a part of this host memory is pinned already",
        "pin each range once; unregister it first",
    ),
}


class CudaFault(MemoryFault):
    """A CUDA driver call failed.

    Attributes:
        call: The driver's function.
        result_name: The result's name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
        result_code: Its number; 0 if there was no call to make.
        num_attempts: How often it was called.
    """

    def __init__(self, message: str, *, call: str, result_name: str, result_code: int, num_attempts: int) -> None:
        super().__init__(message)
        self.call = call
        self.result_name = result_name
        self.result_code = result_code
        self.num_attempts = num_attempts

    @property
    def is_gone_with_context(self) -> bool:
        """Whether it failed because the context is gone, and with it all that could be given back."""
        return self.result_name in _GONE_WITH_THE_CONTEXT


class MemoryInfo(NamedTuple):
    """The device's memory in bytes: what is free by the driver's own account, and all of it."""

    free_nbytes: int
    total_nbytes: int


def load_bindings() -> Any:
    """The module `cuda.bindings.driver`.

    Raises:
        CudaFault: It is not installed. (That a driver library exists shows only at the first call.)
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaFault(
            f"the package cuda-bindings cannot be imported: {error}.\n"
            "  Options: pip install cuda-bindings, of the CUDA version that torch was built for; device='cpu'.",
            call="import cuda.bindings.driver",
            result_name="ImportError",
            result_code=0,
            num_attempts=1,
        ) from error


class CudaCalls:
    """Calls of one `bindings` object, by one thread at a time.

    Handles and addresses are plain integers here: the bindings take them wherever they take their
    own types, and `int()` of those gives them back.

    Args:
        bindings: `cuda.bindings.driver` or its like.
        num_attempts: How often a call that answers NOT_READY is made before it counts as failed.
        wait: What passes the time between attempts, given seconds.
    """

    def __init__(
        self, bindings: Any, *, num_attempts: int = _NUM_ATTEMPTS, wait: Callable[[float], None] = time.sleep
    ) -> None:
        if num_attempts < 1:
            raise ValueError(f"num_attempts={num_attempts}: at least one")
        self._bindings = bindings
        self._num_attempts = num_attempts
        self._wait = wait
        self._num_retries = 0
        self._context: Any = None

    def __repr__(self) -> str:
        return f"<CudaCalls, {self._num_retries} repeated after NOT_READY>"

    @property
    def bindings(self) -> Any:
        """What it calls."""
        return self._bindings

    @property
    def num_retries(self) -> int:
        """Calls so far that were made again because the driver was not ready."""
        return self._num_retries

    def note_context(self) -> None:
        """From now on a thread without a current context gets that of this one, when a call of its asks for one.

        Any thread may come to us: a user's that reads a tensor, say. Most have the context; asking each time costs.
        """
        self._context = self.call("cuCtxGetCurrent", what="the current context")

    def call(self, name: str, *arguments: Any, what: str) -> Any:
        """Make the call `name`; its value, a tuple of its values, or None.

        Args:
            name: The driver's function.
            arguments: Its arguments.
            what: What it is for, with values, to begin an error's message.

        Raises:
            CudaFault: It failed, and (we rely on it: DESIGN.md) had no effect.
        """
        function = self._function(name, what)
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, self._num_attempts + 1):
            result, *values = self._made(function, arguments, name, what)
            if int(result) == 0:
                return values[0] if len(values) == 1 else tuple(values) or None
            if _name(result) != _NOT_READY or attempt == self._num_attempts:
                break
            self._num_retries += 1
            self._wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise self._fault(name, result, what, attempt)

    def memory_info(self) -> MemoryInfo:
        """Free and total memory of the device whose context is current."""
        free, total = self.call("cuMemGetInfo", what="the device's free memory")
        return MemoryInfo(int(free), int(total))

    def shares_host_memory(self, device: int) -> bool:
        """Whether a device has no memory of its own, but the host's.

        [Note: unified memory] On such devices (boards, GB10) what is evicted to pinned host memory is where it was.
        Not so where a device with memory of its own sees the host's coherently (GH200): there host memory is more
        memory, and `CU_DEVICE_ATTRIBUTE_INTEGRATED` is 0. Access to pageable memory and the use of the host's page
        tables do not tell the two apart.
        """
        attribute = self._bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
        return bool(self.call("cuDeviceGetAttribute", attribute, device, what=f"whose memory device {device} has"))

    def create_stream(self) -> int:
        """A stream that does not synchronise with the legacy default stream."""
        flags = int(self._bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.call("cuStreamCreate", flags, what="a new stream"))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; its queued work is still done."""
        self.call("cuStreamDestroy", stream, what=f"stream {stream:#x}")

    def create_event(self, *, timed: bool = False) -> int:
        """An event; without a time stamp it is the cheapest to wait for."""
        flags = 0 if timed else int(self._bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return int(self.call("cuEventCreate", flags, what="a new event"))

    def destroy_event(self, event: int) -> None:
        """Destroy an event; waits for it that are queued stay."""
        self.call("cuEventDestroy", event, what=f"event {event:#x}")

    def record(self, event: int, stream: int) -> None:
        """Let `event` stand for everything queued on `stream` so far."""
        self.call("cuEventRecord", event, stream, what=f"record of event {event:#x} on stream {stream:#x}")

    def wait_event(self, stream: int, event: int) -> None:
        """Let what is queued on `stream` from now on wait for `event` as last recorded. The host does not wait."""
        self.call("cuStreamWaitEvent", stream, event, 0, what=f"stream {stream:#x} waiting for event {event:#x}")

    def is_done(self, event: int) -> bool:
        """Whether `event` has happened; if so the host has observed it. Does not wait."""
        what = f"event {event:#x}"
        (result,) = self._made(self._function("cuEventQuery", what), (event,), "cuEventQuery", what)
        if int(result) != 0 and _name(result) != _NOT_READY:
            raise self._fault("cuEventQuery", result, what, 1)
        return int(result) == 0

    def elapsed_ns(self, first: int, last: int) -> int | None:
        """Time from one timed event to another; None if they have not both happened. Does not wait."""
        what = f"the time from event {first:#x} to {last:#x}"
        result, *rest = self._made(
            self._function("cuEventElapsedTime", what), (first, last), "cuEventElapsedTime", what
        )
        if _name(result) == _NOT_READY:
            return None
        if int(result) != 0:
            raise self._fault("cuEventElapsedTime", result, what, 1)
        return int(rest[0] * 1e6)

    def synchronize_event(self, event: int) -> None:
        """Let the host wait until `event` has happened. Not for planned steps."""
        self.call("cuEventSynchronize", event, what=f"the host waiting for event {event:#x}")

    def copy_to_device(self, address: int, host_address: int, nbytes: int, stream: int) -> None:
        """Queue a copy of pinned host memory to the device."""
        what = f"copy of {format_nbytes(nbytes)} from the host's {host_address:#x} to {address:#x}"
        self.call("cuMemcpyHtoDAsync", address, host_address, nbytes, stream, what=what)

    def copy_to_host(self, host_address: int, address: int, nbytes: int, stream: int) -> None:
        """Queue a copy of device memory to pinned host memory."""
        what = f"copy of {format_nbytes(nbytes)} from {address:#x} to the host's {host_address:#x}"
        self.call("cuMemcpyDtoHAsync", host_address, address, nbytes, stream, what=what)

    def copy_on_device(self, address: int, source_address: int, nbytes: int, stream: int) -> None:
        """Queue a copy within the device."""
        what = f"copy of {format_nbytes(nbytes)} from {source_address:#x} to {address:#x}"
        self.call("cuMemcpyDtoDAsync", address, source_address, nbytes, stream, what=what)

    def _function(self, name: str, what: str) -> Callable[..., tuple[Any, ...]]:
        function: Callable[..., tuple[Any, ...]] | None = getattr(self._bindings, name, None)
        if function is None:
            raise CudaFault(
                f"{what}: {name} is not in the CUDA bindings {self._bindings!r}.\n  Options: a newer cuda-bindings.",
                call=name,
                result_name="missing",
                result_code=0,
                num_attempts=0,
            )
        return function

    def _made(
        self, function: Callable[..., tuple[Any, ...]], arguments: tuple[Any, ...], name: str, what: str
    ) -> tuple[Any, ...]:
        try:
            answer = function(*arguments)
            if int(answer[0]) == _INVALID_CONTEXT and self._context is not None and int(self._context):
                self._bindings.cuCtxSetCurrent(self._context)  # if it fails, so does what follows
                answer = function(*arguments)
            return answer
        except (RuntimeError, ImportError, OSError) as error:
            # The bindings load the driver library at the first call, and raise where it is missing.
            raise CudaFault(
                f"{what}: {name} could not be called: {error}.\n"
                "  Options: install the NVIDIA driver (a container is started with --gpus all); a driver as new as "
                "the bindings; device='cpu'.",
                call=name,
                result_name=type(error).__name__,
                result_code=0,
                num_attempts=1,
            ) from error

    def _fault(self, call: str, result: Any, what: str, num_attempts: int) -> CudaFault:
        name = _name(result)
        meaning, options = _EXPLANATIONS.get(name) or (self._driver_text(result), "look at dmesg and nvidia-smi -q")
        attempts = f" after {num_attempts} attempts" if num_attempts > 1 else ""
        return CudaFault(
            f"{what}: {call} answered {name} ({int(result)}){attempts}: {meaning}.\n  Options: {options}.",
            call=call,
            result_name=name,
            result_code=int(result),
            num_attempts=num_attempts,
        )

    def _driver_text(self, result: Any) -> str:
        """The driver's own words for a result that we have none for."""
        explain = getattr(self._bindings, "cuGetErrorString", None)
        if explain is None:
            return "no explanation is known"
        code, text = explain(result)
        return text.decode(errors="replace") if int(code) == 0 and text else "no explanation is known"


def _name(result: Any) -> str:
    return str(getattr(result, "name", f"CUresult {int(result)}"))
