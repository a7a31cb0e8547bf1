"""Streams and events of the fake: what is queued runs late, in any order that streams and events allow."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from vmm.testing.fake_cuda.names import CallRefused, CUresult
from vmm.testing.fake_cuda.races import Clock, joined

__all__ = ["FakeAct", "FakeEvent", "FakeStream", "Work"]

LEGACY_STREAM = 0


class FakeAct:
    """Something queued on a stream: steps to run, after other acts."""

    __slots__ = ("after", "id", "is_done", "name", "steps", "stream", "tick")

    def __init__(
        self, act_id: int, name: str, tick: int, steps: Sequence[Callable[[], object]], stream: FakeStream
    ) -> None:
        self.id = act_id
        self.stream = stream
        self.name = name
        self.tick = tick
        self.steps = deque(steps)
        self.after: list[FakeAct] = []
        self.is_done = False


class FakeStream:
    """A queue of acts. The clock is that of the last one."""

    __slots__ = ("agent", "awaited", "clock", "handle", "is_blocking", "last", "queue")

    def __init__(self, handle: int, agent: int, *, is_blocking: bool) -> None:
        self.handle = handle
        self.agent = agent
        self.is_blocking = is_blocking
        self.clock: Clock = {}
        self.queue: deque[FakeAct] = deque()
        self.last: FakeAct | None = None
        self.awaited: list[FakeAct] = []  # what the next act must wait for


class FakeEvent:
    """The last record of an event: what it stands for, and what has happened before it."""

    __slots__ = ("act", "at_ns", "clock", "is_timed")

    def __init__(self, *, is_timed: bool) -> None:
        self.act: FakeAct | None = None
        self.at_ns = 0
        self.clock: Clock = {}
        self.is_timed = is_timed


class Work:
    """All streams, events and host threads.

    Args:
        seed: Of the random order.
        eagerness: Chance, after each driver call, that one more step of queued work runs; 0: none
            runs before somebody asks for it.
    """

    def __init__(self, *, seed: int, eagerness: float) -> None:
        if not 0 <= eagerness < 1:
            raise ValueError(f"eagerness={eagerness}: must be in [0, 1)")
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._num_agents = 0
        self._num_acts = 0
        self._num_handles = 0
        self._thread = threading.local()
        self._host_clocks: dict[int, Clock] = {}
        legacy = FakeStream(LEGACY_STREAM, self._new_agent(), is_blocking=True)
        self.streams: dict[int, FakeStream] = {LEGACY_STREAM: legacy}
        self._ending: list[FakeStream] = []  # destroyed, with work left
        self.events: dict[int, FakeEvent] = {}

    def _new_handle(self) -> int:
        """A number that no handle has had."""
        self._num_handles += 1
        return 0x1000 + 0x10 * self._num_handles

    def _new_act_id(self) -> int:
        """A number that no act has had."""
        self._num_acts += 1
        return self._num_acts

    def stream(self, handle: object) -> FakeStream:
        """The stream with this handle."""
        stream = self.streams.get(int(handle))  # type: ignore[call-overload]
        if stream is None:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        return stream

    def event(self, handle: object) -> FakeEvent:
        """The event with this handle."""
        event = self.events.get(int(handle))  # type: ignore[call-overload]
        if event is None:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        return event

    def create_stream(self, *, is_blocking: bool) -> int:
        """A new stream."""
        handle = self._new_handle()
        self.streams[handle] = FakeStream(handle, self._new_agent(), is_blocking=is_blocking)
        return handle

    def destroy_stream(self, stream: FakeStream) -> None:
        """Forget a stream; its work is still done."""
        if stream.handle == LEGACY_STREAM:
            raise CallRefused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        del self.streams[stream.handle]
        if stream.queue:
            self._ending.append(stream)

    def create_event(self, *, is_timed: bool) -> int:
        """A new event, never recorded: to wait for it is to wait for nothing."""
        handle = self._new_handle()
        self.events[handle] = FakeEvent(is_timed=is_timed)
        return handle

    @property
    def host_agent(self) -> int:
        """The calling thread."""
        agent: int | None = getattr(self._thread, "agent", None)
        if agent is None:
            agent = self._thread.agent = self._new_agent()
            self._host_clocks[agent] = {}
        return agent

    @property
    def host_clock(self) -> Clock:
        """What the calling thread knows to have happened. A thread begins with knowing nothing."""
        return self._host_clocks[self.host_agent]

    def host_act(self) -> tuple[int, int]:
        """Count an act of the calling thread: its id and tick."""
        agent, clock = self.host_agent, self.host_clock
        clock[agent] = clock.get(agent, 0) + 1
        return self._new_act_id(), clock[agent]

    def host_learns(self, clock: Clock) -> None:
        """The calling thread has observed that this has happened."""
        self._host_clocks[self.host_agent] = joined(self.host_clock, clock)

    def enqueue(self, stream: FakeStream, name: str, steps: Sequence[Callable[[], object]] = ()) -> FakeAct:
        """Queue an act behind the stream's last, and behind what the stream was told to wait for."""
        self._meet_legacy(stream)
        stream.clock = joined(stream.clock, self.host_clock)
        tick = stream.clock[stream.agent] = stream.clock.get(stream.agent, 0) + 1
        act = FakeAct(self._new_act_id(), name, tick, steps, stream)
        act.after, stream.awaited = stream.awaited, []
        stream.queue.append(act)
        stream.last = act
        return act

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        """Let the event stand for all of the stream so far."""

        def stamp() -> None:
            event.at_ns = time.monotonic_ns()

        event.act = self.enqueue(stream, "record", [stamp])
        event.clock = stream.clock  # a stream's clock is replaced, never changed

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Let what comes on the stream wait for the event's last record, if it has one."""
        if event.act is not None:
            stream.awaited.append(event.act)
            stream.clock = joined(stream.clock, event.clock)

    def _meet_legacy(self, stream: FakeStream) -> None:
        """The legacy default stream waits for every blocking stream, and each of them for it."""
        legacy = self.streams[LEGACY_STREAM]
        others = [it for it in self.streams.values() if it.is_blocking] if stream is legacy else [legacy]
        for other in others if stream.is_blocking else ():
            if other is not stream and other.last is not None:
                stream.awaited.append(other.last)
                stream.clock = joined(stream.clock, other.clock)

    def progress(self) -> None:
        """Run as much of the queued work as chance has it."""
        while self._random.random() < self._eagerness and self.step():
            pass

    def step(self) -> bool:
        """Run one step of any act that may run now. Whether there was one."""
        ready = [it for it in (*self.streams.values(), *self._ending) if it.queue and _may_run(it.queue[0])]
        if not ready:
            return False
        self._advance(self._random.choice(ready))
        return True

    def _advance(self, stream: FakeStream) -> None:
        """Run one step of the stream's first act, which may run."""
        act = stream.queue[0]
        if act.steps:
            act.steps.popleft()()
        if not act.steps:
            act.is_done = True
            stream.queue.popleft()
            if not stream.queue and stream in self._ending:
                self._ending.remove(stream)

    def require(self, act: FakeAct) -> None:
        """Run `act` and what streams and events put before it, and nothing else: the rest stays late."""
        wanted = [act]
        while wanted:
            if wanted[-1].is_done:
                wanted.pop()
                continue
            first = wanted[-1].stream.queue[0]
            missing = next((it for it in first.after if not it.is_done), None)
            if missing is not None:
                wanted.append(missing)
            else:
                self._advance(first.stream)

    def finish(self, act: FakeAct | None) -> None:
        """Run until `act` is done; of the rest whatever chance picks on the way."""
        while act is not None and not act.is_done:
            self.step()  # there is one: acts wait only for earlier acts

    def cut(self, nbytes: int) -> int:
        """Where to cut something in two."""
        return self._random.randrange(nbytes) if nbytes else 0

    def _new_agent(self) -> int:
        self._num_agents += 1
        return self._num_agents


def _may_run(act: FakeAct) -> bool:
    return all(other.is_done for other in act.after)
