"""How long compute work takes on a device: events with time stamps, for which the host never waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vmm import device_timer
from vmm.cuda_calls import CudaCalls, CudaFault
from vmm.device_streams import DeviceStreams
from vmm.device_timer import DeviceTimer, OpTimer
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


def test_ops_are_told_their_times_in_one_go(fake: FakeCuda, streams: DeviceStreams) -> None:
    timer, times = OpTimer(streams), dict[str, int]()
    for name in "abc":
        begun = timer.begin()
        fake.perform(0, name=name)
        timer.end(begun, lambda ns, name=name: times.setdefault(name, ns))  # type: ignore[misc]
    assert times == {} and streams.num_host_waits == 0
    timer.settle()
    assert list(times) == ["a", "b", "c"] and min(times.values()) > 0
    timer.settle()
    assert len(times) == 3


def test_waiting_for_memory_is_no_part_of_an_op(fake: FakeCuda, streams: DeviceStreams) -> None:
    timer, times = OpTimer(streams), list[int]()
    for waits in (False, True):
        begun = timer.begin()
        for _ in range(50):
            fake.perform(0, name="a wait")
        if waits:
            timer.begin_again()
        fake.perform(0, name="the op")
        timer.end(begun, times.append)
    timer.begin_again()  # no op is under way
    timer.settle()
    assert times[1] < times[0]


def test_failed_ops_and_a_driver_that_refuses_keep_no_events(
    streams: DeviceStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, times = OpTimer(streams), list[int]()
    for _ in range(5):
        timer.end(timer.begin(), None)
    monkeypatch.setattr(device_timer, "_MOST_PENDING", 3)
    for _ in range(6):
        timer.end(timer.begin(), times.append)  # the third and the sixth ask for all
    assert len(times) == 6
    assert len(streams._events) <= 6
    with monkeypatch.context() as patch:
        patch.setattr(streams, "stamp", _refuse)
        begun = timer.begin()
        assert begun is None
        timer.end(begun, times.append)
    begun = timer.begin()
    with monkeypatch.context() as patch:
        patch.setattr(streams, "stamp", _refuse)
        timer.end(begun, times.append)
    timer.settle()
    assert len(times) == 6


def _refuse(_event: object) -> int:
    raise CudaFault("refused", call="cuEventRecord", result_name="refused", result_code=1, num_attempts=1)
