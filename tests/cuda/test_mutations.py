"""Every wait is needed: with any one of them left out, the fake reports a race, a broken rule or other bytes.

`WaitRule` names the waits. Each is disabled in turn, on a training run or on a small scene of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ooc.testing.fake_device import FakeCudaDevice, FakeDeviceMemory
from tests.cuda.cases import CHUNK_NBYTES, CudaSession, fixed_speed
from tests.harness import Recipe, assert_equal, run_in_core, run_out_of_core
from tests.session.test_bitwise import budget_nbytes_of
from vmm.device_streams import DeviceEvent, DeviceStreams, WaitRule
from vmm.ranges import Run
from vmm.testing.fake_cuda import RuleBroken

MIB = 1 << 20


@contextmanager
def without(rule: WaitRule | None) -> Iterator[list[WaitRule]]:
    """Leave the waits of one rule out. Yields the rules whose waits were asked for."""
    asked: list[WaitRule] = []
    wait, observe = DeviceStreams.wait, DeviceStreams.observe

    def quiet_wait(self: DeviceStreams, why: WaitRule, stream: int, event: DeviceEvent) -> None:
        asked.append(why)
        if why is not rule:
            wait(self, why, stream, event)

    def quiet_observe(self: DeviceStreams, why: WaitRule, event: DeviceEvent) -> None:
        asked.append(why)
        if why is not rule:
            observe(self, why, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStreams, "wait", quiet_wait)
        patch.setattr(DeviceStreams, "observe", quiet_observe)
        yield asked


def train(seed: int, model: str, budget: str, *, policy: str = "auto") -> None:
    """A run that must equal the one in core, without a race (`CudaSession` looks)."""
    recipe = Recipe(workload=model)
    expected, budget_nbytes = run_in_core(recipe), budget_nbytes_of(recipe, budget)
    device = FakeCudaDevice(seed=seed, eagerness=0.1)
    with fixed_speed():
        actual = run_out_of_core(recipe, budget_nbytes, lambda n: CudaSession(n, device=device, policy=policy))
    assert_equal(expected, actual)


def test_training_asks_for_the_waits_that_are_disabled_below() -> None:
    with without(None) as asked:
        train(0, "conv_stack", "quarter", policy="window")
        train(0, "encoder", "quarter", policy="window")
    assert set(asked) >= {*IN_TRAINING, WaitRule.HOST_AFTER_TRANSFER}


IN_TRAINING = [
    WaitRule.OP_AFTER_LOAD,
    WaitRule.OP_AFTER_WRITE,
    WaitRule.LOAD_AFTER_USE,
    WaitRule.LOAD_AFTER_HOLDER,
    WaitRule.WRITE_AFTER_USE,
    WaitRule.HOST_AFTER_USE,
    WaitRule.HOST_AFTER_TRANSFER,
]


@pytest.mark.parametrize("rule", IN_TRAINING, ids=lambda rule: rule.name)
def test_training_needs_each_wait(rule: WaitRule) -> None:
    # In the convolutions every load finds its chunks left long ago.
    model = "encoder" if rule is WaitRule.LOAD_AFTER_HOLDER else "conv_stack"
    with without(rule), pytest.raises((AssertionError, RuleBroken)):
        train(0, model, "quarter", policy="window")


def out_and_in(scene: Scene) -> None:
    """A variable comes back while it is still on its way out, and nobody else has its chunks."""
    scene.fill(0, 1)
    slot = scene.store.allocate(CHUNK_NBYTES)
    scene.store.write(slot, [scene.chunk(0)])
    scene.store.read(slot, [scene.chunk(1)]).order()
    scene.expect(1, 1)


def one_goes_one_comes(scene: Scene) -> None:
    """A variable comes into chunks that another is still leaving."""
    slots = []
    for index in range(2):
        scene.fill(index, index + 1)
        slots.append(scene.store.allocate(CHUNK_NBYTES))
    scene.store.write(slots[1], [scene.chunk(1)]).wait()
    leaving = scene.store.write(slots[0], [scene.chunk(0)])
    scene.store.read(slots[1], [scene.chunk(0)], [leaving]).order()
    scene.expect(0, 2)
    scene.store.read(slots[0], [scene.chunk(1)]).order()
    scene.expect(1, 1)


class Scene:
    """The memory of a device session without a session: chunks are touched by kernels of the test."""

    def __init__(self, stack: ExitStack, *, num_host_chunks: int, uses_file: bool, store: Path) -> None:
        device = FakeCudaDevice(
            eagerness=0.0,
            host_budget=(num_host_chunks + 4 * uses_file) * CHUNK_NBYTES,
            staging=4 * CHUNK_NBYTES,
            uses_file=uses_file,
        )
        self.memory: FakeDeviceMemory = device.open(num_chunks=8, chunk_nbytes=CHUNK_NBYTES, store=store)
        stack.callback(self.memory.close)
        self.fake = device.fake
        self.store = self.memory.store

    def chunk(self, index: int, num_chunks: int = 1) -> tuple[int, int]:
        """Its range of the linear view."""
        return self.memory.driver.view_address + index * CHUNK_NBYTES, num_chunks * CHUNK_NBYTES

    def fill(self, index: int, value: int, num_chunks: int = 1) -> None:
        """A kernel that writes a chunk."""
        self.memory.kernel(f"fill with {value}", writes=[self.chunk(index, num_chunks)])
        ctypes.memset(self.chunk(index)[0], value, num_chunks * CHUNK_NBYTES)

    def expect(self, index: int, value: int, num_chunks: int = 1) -> None:
        """A kernel that reads a chunk finds this."""
        self.memory.kernel(f"look for {value}", reads=[self.chunk(index, num_chunks)])
        found = ctypes.string_at(*self.chunk(index, num_chunks))
        if found != bytes([value]) * len(found):
            raise AssertionError(f"{found[0]} .. {found[-1]} instead of {value}")
        assert not self.fake.races, self.fake.races[0]


def switch_streams(scene: Scene) -> None:
    """Ops on two streams of the program, which says nothing about their order."""
    other = scene.memory.new_stream()
    scene.fake.launch(0, int, writes=[scene.chunk(0)], name="late work")
    with scene.memory.on_stream(other):
        scene.fill(0, 3)
    scene.expect(0, 3)


def lend_to_another_library(scene: Scene) -> None:
    """What ops have left is given to CuPy, say, which works on a stream of its own."""
    other = scene.memory.new_stream()
    scene.fake.launch(0, int, writes=[scene.chunk(0)], name="late work")
    scene.memory.streams.lend(other)
    scene.fake.perform(other, writes=[scene.chunk(0)], name="CuPy's kernel")
    assert not scene.fake.races, scene.fake.races[0]
    scene.memory.streams.take_back(other)


def take_back_from_another_library(scene: Scene) -> None:
    """What CuPy has left is given to an op."""
    other = scene.memory.new_stream()
    scene.fake.launch(other, int, writes=[scene.chunk(0)], name="CuPy's late work")
    scene.memory.streams.take_back(other)
    scene.fill(0, 3)
    scene.expect(0, 3)


def reuse_host_blocks(scene: Scene) -> None:
    """A slot is freed while a load out of it is under way; the next slot takes its blocks."""
    scene.fill(0, 1)
    first = scene.store.allocate(CHUNK_NBYTES)
    scene.store.write(first, [scene.chunk(0)]).order()
    load = scene.store.read(first, [scene.chunk(1)])
    scene.store.free(first)
    scene.fill(0, 2)
    second = scene.store.allocate(CHUNK_NBYTES)
    assert second.runs == (Run(0, 1),)
    scene.store.write(second, [scene.chunk(0)]).wait()
    load.order()
    scene.expect(1, 1)


def through_the_file(scene: Scene) -> None:
    """Variables go out and come back, one behind the other; the first is larger than the staging memory."""
    places = ((0, 6), (6, 2))
    slots = []
    for index, (chunk, num_chunks) in enumerate(places):
        scene.fill(chunk, index + 1, num_chunks)
        slots.append(scene.store.allocate(num_chunks * CHUNK_NBYTES))
        assert slots[-1].in_file is not None
        scene.store.write(slots[-1], [scene.chunk(chunk, num_chunks)]).order()
    for chunk, num_chunks in places:
        scene.fill(chunk, 9, num_chunks)
    loads = [scene.store.read(slot, [scene.chunk(*place)]) for slot, place in zip(slots, places, strict=True)]
    scene.store.file.store.wait_all()  # the file is quick: whatever may be filled anew has been
    for index, (load, (chunk, num_chunks)) in enumerate(zip(loads, places, strict=True)):
        load.order()
        scene.expect(chunk, index + 1, num_chunks)


SCENES: list[tuple[WaitRule, Callable[[Scene], None], int]] = [
    (WaitRule.LOAD_AFTER_OWN_WRITE, out_and_in, 1),
    (WaitRule.LOAD_AFTER_HOLDER, one_goes_one_comes, 2),
    (WaitRule.OP_AFTER_OTHER_STREAM, switch_streams, 1),
    (WaitRule.OTHER_AFTER_OPS, lend_to_another_library, 1),
    (WaitRule.OP_AFTER_OTHER, take_back_from_another_library, 1),
    (WaitRule.WRITE_AFTER_READ_OF_BLOCKS, reuse_host_blocks, 1),
    (WaitRule.FILE_AFTER_COPY, through_the_file, 0),
    (WaitRule.STAGING_AFTER_COPY, through_the_file, 0),
]
"""The rule, what shows that it is needed, and the host chunks there; with none, all goes to the file."""


@pytest.mark.parametrize(("rule", "play", "num_host_chunks"), SCENES, ids=lambda it: getattr(it, "name", ""))
def test_each_scene_needs_its_wait(
    rule: WaitRule, play: Callable[[Scene], None], num_host_chunks: int, tmp_path: Path
) -> None:
    def run(disabled: WaitRule | None) -> list[WaitRule]:
        with ExitStack() as stack:
            scene = Scene(stack, num_host_chunks=num_host_chunks, uses_file=not num_host_chunks, store=tmp_path)
            asked = stack.enter_context(without(disabled))
            play(scene)
        return asked

    assert rule in run(None)
    with pytest.raises((AssertionError, RuleBroken)):
        run(rule)


def test_every_rule_is_disabled_somewhere() -> None:
    assert set(WaitRule) == {*IN_TRAINING, *(rule for rule, _, _ in SCENES)}


def test_an_event_that_is_never_recorded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records behind the waits: without them every event has long happened."""
    monkeypatch.setattr("vmm.cuda_calls.CudaCalls.record", lambda self, event, stream: None)
    with pytest.raises((AssertionError, RuleBroken)):
        train(0, "conv_stack", "quarter")
