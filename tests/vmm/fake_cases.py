"""What tests of the fake CUDA driver share: arguments of its calls, their answers, and memory that is mapped."""

from __future__ import annotations

from typing import Any

from vmm.testing.fake_cuda import CUresult, FakeCuda, names

GRANULE = 2 << 20
OK = CUresult.CUDA_SUCCESS


def value(answer: tuple[Any, ...]) -> int:
    """The number in the answer of a call that succeeded."""
    assert answer[0] == OK
    return int(answer[1])


def properties() -> names.CUmemAllocationProp:
    made = names.CUmemAllocationProp()
    made.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return made


def access(flags: int = 3) -> list[names.CUmemAccessDesc]:
    made = names.CUmemAccessDesc()
    made.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.flags = names.CUmemAccess_flags(flags)
    return [made]


class Mapped:
    """Four handles, and eight places of which the first four show them."""

    def __init__(self, fake: FakeCuda) -> None:
        self.handles = [value(fake.cuMemCreate(GRANULE, properties(), 0)) for _ in range(4)]
        self.address = value(fake.cuMemAddressReserve(8 * GRANULE, 0, 0, 0))
        for place, handle in enumerate(self.handles):
            assert fake.cuMemMap(self.at(place), GRANULE, 0, handle, 0) == (OK,)
        assert fake.cuMemSetAccess(self.address, 4 * GRANULE, access(), 1) == (OK,)

    def at(self, place: float) -> int:
        return self.address + int(place * GRANULE)
