"""CuPy's side of the pool, with a stand-in for CuPy's three classes: there is no CuPy without a GPU."""

from __future__ import annotations

import pytest

import ooc
from tests.cuda.test_hosted import run

CUPY = """
import sys, types
class Stream: ptr = 0
class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id
class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset
cupy = types.ModuleType("cupy")
cupy.cuda = types.SimpleNamespace(
    UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, get_current_stream=lambda: Stream
)
sys.modules["cupy"] = cupy
device = HostedDevice(num_chunks=64)
"""


def test_arrays_live_in_the_budget_and_in_order() -> None:
    run(
        CUPY
        + """
with ooc.Session(64 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, plan_cache=False) as session:
    allocate = session.cupy_allocator()
    Stream.ptr = session.engine.memory.new_stream()
    fake, table = device.fake, cuda_table()
    first = allocate(3 * CHUNK_NBYTES)
    assert first.mem.device_id == 0 and first.mem.size == 3 * CHUNK_NBYTES
    assert not session.engine.memory.driver.arena[0] <= first.ptr < session.engine.memory.driver.arena[1]
    assert table.numbers()["small"]["nbytes"]["current"] == 3 * CHUNK_NBYTES
    written = []
    fake.launch(Stream.ptr, lambda: written.append(1), writes=[(first.ptr, 3 * CHUNK_NBYTES)], name="CuPy's kernel")
    try:
        allocate(2 * CHUNK_NBYTES)
    except torch.OutOfMemoryError as error:
        assert "no room for a CuPy array of 128.0 KiB" in str(error) and "256.0 KiB" in str(error), error
    else:
        raise AssertionError("more than the part that is always mapped")
    address = first.ptr
    del first
    session.engine.memory.kernel("an op", writes=[(address, 3 * CHUNK_NBYTES)])  # torch has the block now
    assert written == [1]
    empty = allocate(0)
    again = allocate(CHUNK_NBYTES)
    assert len({empty.ptr, again.ptr}) == 2
    assert fake.races == (), fake.races[0]
    stream, Stream.ptr = Stream.ptr, 0
    del empty, again
    fake.cuStreamDestroy(stream)
    kept = allocate(100)
assert len([it for it in fake.left() if "handle" in it]) == session.engine.memory.driver.num_fixed_chunks
del kept
gc.collect()
assert table.numbers()["small"]["num_blocks"]["current"] == 0
assert not any("handle" in it for it in fake.left()), fake.left()
"""
    )


def test_only_on_a_gpu() -> None:
    with ooc.Session("1MiB") as session, pytest.raises(ValueError, match="not on a GPU"):
        session.cupy_allocator()
