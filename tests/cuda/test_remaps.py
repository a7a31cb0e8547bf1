"""When other chunks may be mapped at a variable's addresses on a device: after all that has used them."""

from __future__ import annotations

from ooc.memory.record import VariableRecord
from ooc.memory.record_transfers import RecordTransfers
from ooc.testing.fake_device import FakeCudaDevice
from vmm.device_space import DeviceSpace

CHUNK_NBYTES = 1 << 16


def _remapped_after_a_read() -> int:
    """Written out, read by an op all the same, evicted and mapped elsewhere: how often the host has stopped."""
    device = FakeCudaDevice(eagerness=0.0)
    memory = device.open(num_chunks=2, chunk_nbytes=CHUNK_NBYTES, store=None)
    try:
        space = memory.space
        reservation = space.reserve(CHUNK_NBYTES)
        space.map(reservation, [(0, 1)])
        record = VariableRecord(nbytes=CHUNK_NBYTES, reservation=reservation, serial=0)
        record.born([(0, 1)])
        place = (record.address, CHUNK_NBYTES)
        transfers = RecordTransfers(space=space, store=memory.store, debug=False, is_host=False)
        memory.kernel("fill", writes=[place])
        transfers.start_write(record)
        memory.kernel("a late read", reads=[place])
        transfers.leave(record, for_ops=True)
        assert isinstance(space, DeviceSpace)
        before = space.num_stops
        space.map(reservation, [(1, 1)])
        memory.streams.observe_all()
        assert not device.fake.races
        return space.num_stops - before
    finally:
        memory.close()


def test_a_remap_waits_for_what_has_read_since_the_write_began() -> None:
    """A step may leave its plan in between: the write's own fence is older than the read. The fake checks it."""
    assert _remapped_after_a_read() == 1
