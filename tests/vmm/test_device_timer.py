"""How long compute work takes on a device: events with time stamps, for which the host never waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vmm.cuda_calls import CudaCalls, CudaFault
from vmm.device_streams import DeviceStreams
from vmm.device_timer import DeviceTimer
from vmm.testing.fake_cuda import FakeCuda

CHUNK = 64 << 10


@pytest.fixture
def fake() -> FakeCuda:
    made = FakeCuda(granularity=CHUNK, total_nbytes=4 * CHUNK, seed=1, eagerness=0.0)  # nothing runs unasked
    return made


@pytest.fixture
def streams(fake: FakeCuda) -> Iterator[DeviceStreams]:
    made = DeviceStreams(CudaCalls(fake), current=lambda: 0)
    yield made
    made.close()


def test_a_stretch_counts_once_it_has_ended(fake: FakeCuda, streams: DeviceStreams) -> None:
    timer = DeviceTimer(streams)
    with timer.timing():
        fake.perform(0, name="work")
    assert timer.take_ns() == 0
    assert streams.num_host_waits == 0
    fake.cuCtxSynchronize()
    assert timer.take_ns() > 0
    assert timer.take_ns() == 0


def test_events_are_used_again(fake: FakeCuda, streams: DeviceStreams) -> None:
    timer = DeviceTimer(streams)
    for _ in range(20):
        with timer.timing():
            fake.perform(0, name="work")
        fake.cuCtxSynchronize()
        assert timer.take_ns() > 0
    assert len(streams._events) == 2
    streams.close()
    assert not [it for it in fake.left() if "event" in it]


def test_what_raises_does_not_count(fake: FakeCuda, streams: DeviceStreams) -> None:
    timer = DeviceTimer(streams)
    with pytest.raises(KeyError), timer.timing():
        raise KeyError
    fake.cuCtxSynchronize()
    assert timer.take_ns() == 0


def test_a_refusing_driver_costs_the_time_alone(
    fake: FakeCuda, streams: DeviceStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise CudaFault("refused, says the test", call="", result_name="", result_code=1, num_attempts=1)

    timer = DeviceTimer(streams)
    with timer.timing():
        fake.perform(0, name="work")
    fake.cuCtxSynchronize()
    with monkeypatch.context() as patch:
        patch.setattr(CudaCalls, "elapsed_ns", refuse)
        assert timer.take_ns() == 0
    with monkeypatch.context() as patch:
        patch.setattr(CudaCalls, "record", refuse)
        with timer.timing():
            fake.perform(0, name="work")
    assert timer.take_ns() == 0


def test_an_event_without_a_time_stamp_is_refused(streams: DeviceStreams) -> None:
    first, last = streams.calls.create_event(), streams.calls.create_event()
    for event in (first, last):
        streams.calls.record(event, 0)
    with pytest.raises(CudaFault):
        streams.calls.elapsed_ns(first, last)
