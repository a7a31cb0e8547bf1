"""What sessions ask of a device's memory, the CPU's has, too: the same calls with the same arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ooc.devices.cpu import CpuDevice, CpuMemory
from ooc.devices.cuda import CudaDevice, CudaMemory
from ooc.devices.protocols import Device, Memory
from ooc.memory.protocols import Space, Store
from ooc.testing.fake_device import FakeCudaDevice, FakeDeviceMemory
from vmm.addresses import AddressSpace
from vmm.device_space import DeviceSpace
from vmm.device_store import DeviceStore
from vmm.store import FileStore


@pytest.mark.parametrize(
    ("seam", "made"),
    [
        (Space, AddressSpace),
        (Space, DeviceSpace),
        (Store, FileStore),
        (Store, DeviceStore),
        (Memory, CpuMemory),
        (Memory, CudaMemory),
        (Memory, FakeDeviceMemory),
        (Device, CpuDevice),
        (Device, CudaDevice),
        (Device, FakeCudaDevice),
    ],
)
def test_what_the_seam_asks_is_there(seam: type[Any], made: type[Any]) -> None:
    asked = [name for name in vars(seam) if not name.startswith("_")]
    assert asked
    for name in asked:
        wanted = vars(seam)[name]
        if seam is Memory and isinstance(wanted, property):
            continue  # attributes of what is made; mypy compares their types
        found = getattr(made, name)
        assert isinstance(wanted, property) == isinstance(found, property), name
        if inspect.isfunction(wanted):
            assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters), name
