"""What jobs of several processes do with collectives of their own, as `tests.distributed.cases`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ooc
from tests.distributed.cases import CASES, NUM_STEPS, Rank, add
from tests.harness import SessionLike


def _late(debug: bool) -> None:
    sizes: dict[str, tuple[int, ...]] = {"sizes": (2,)} if debug else {"sizes": (3,), "slow_sizes": (2,)}

    @add("late rank, debug" if debug else "late rank", "2MiB", debug=debug, **sizes)
    def late_rank(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
        """`all_reduce(async_op=True)`, and ops that need its room, while another rank has not joined yet."""
        weights = [torch.randn(512, 512) for _ in range(4)]  # 1 MiB each
        for step in range(NUM_STEPS):
            with session.step():
                if rank.index == 1:
                    time.sleep(0.1)
                tensor = torch.full((512, 512), float(rank.index + step))
                work = dist.all_reduce(tensor, async_op=True)
                for weight in weights:
                    weight.mul_(1.5)
                assert work is not None
                work.wait()
                weights[0].add_(tensor)
            yield [tensor, *weights]


_late(False)
_late(True)


@add("every collective", "3MiB", sizes=(3,), slow_sizes=(2,))
def every_collective(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """Each one launched, then ops that need its room, then the wait."""
    weights = [torch.randn(256, 256) for _ in range(12)]  # 256 KiB each
    size, index = rank.size, rank.index
    for step in range(NUM_STEPS):
        found: list[Tensor] = []

        def between() -> None:
            for weight in weights:
                weight.mul_(1.01)

        def some(seed: int, rows: int = 256, step: int = step) -> Tensor:
            return torch.randn(rows, 256, generator=torch.Generator().manual_seed(100 * step + 10 * seed + index))

        with session.step():
            for launch in _LAUNCHES:
                if index == 0:
                    time.sleep(0.005)
                work, results = launch(some, index, size)
                between()
                work.wait()
                del work
                weights[0].add_(results[0].reshape(-1)[: 256 * 256].view(256, 256), alpha=0.01)
                found += results
                del results
        yield [*found, *weights]
        found.clear()


@add("scattered late", "6MiB")
def scattered_late(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """Gloo reduces and scatters in a copy of its own, which no op names before the program's wait. One rank comes late,
    so that the other's copy is not reduced yet when ops want its room.
    """
    weights = [torch.randn(512, 256) for _ in range(12)]  # 512 KiB each
    mine, out = torch.empty(1024, 256), torch.empty(512, 256)  # together a quarter of the budget
    for step in range(NUM_STEPS):
        with session.step():
            if rank.index == 1:
                time.sleep(0.1)
            mine.fill_(rank.index + step)
            work = dist.reduce_scatter_tensor(out, mine, async_op=True)
            assert work is not None
            for weight in 4 * weights:
                weight.mul_(1.1)
            work.wait()
            del work
            weights[0].add_(out)
        yield [out, *weights]


@add("kept scatters", "4MiB")
def kept_scatters(_rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """More than fit at once, each with Gloo's copy, before the first is waited for; the last lives on into the step's
    end.
    """
    operands = [torch.randn(512, 256) for _ in range(10)]  # 512 KiB each
    results = [torch.zeros(256, 256) for _ in range(10)]
    for _ in range(NUM_STEPS):
        with session.step():
            works = [dist.reduce_scatter_tensor(b, a, async_op=True) for a, b in zip(operands, results, strict=True)]
            for work in works:
                assert work is not None
                work.wait()
            del works
            for operand, result in zip(operands, results, strict=True):
                operand[:256].add_(result, alpha=0.01)
        yield [*operands, *results]


@add("in a step, before a message", "3MiB")
def room_before_a_message(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """Half of the budget is in flight, and the other rank joins after a message: who moved it would wait for ever."""
    weights = [torch.randn(256, 256) for _ in range(16)]
    message = torch.zeros(16)
    for step in range(NUM_STEPS):
        with session.step():
            tensor = torch.full((1536, 256), float(rank.index + step))
            if rank.index == 0:
                work = dist.all_reduce(tensor, async_op=True)
                for weight in weights:
                    weight.mul_(1.01)
                dist.send(message, 1)
                assert work is not None
                work.wait()
                del work
            else:
                for weight in weights:
                    weight.mul_(1.01)
                dist.recv(message, 0)
                dist.all_reduce(tensor)
            weights[0].add_(tensor[:256])
            del tensor
        yield weights


@add("over a step's end, before a message", "3MiB", num_planned=0)
def before_a_message(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """A collective that the other rank joins in the next step, after a message that this one sends there: whoever
    waited for it before that step began would wait for ever.
    """
    weights = [torch.randn(256, 256) for _ in range(16)]
    message = torch.zeros(16)
    tensor, work = torch.zeros(256, 256), None
    for step in range(NUM_STEPS):
        with session.step():
            for weight in weights:
                weight.mul_(1.01)
            if step:
                if rank.index == 0:
                    dist.send(message, 1)
                    assert work is not None
                    work.wait()
                else:
                    dist.recv(message, 0)
                    dist.all_reduce(tensor)
                weights[0].add_(tensor)
            tensor = torch.full((256, 256), float(rank.index + step))
            work = dist.all_reduce(tensor, async_op=True) if rank.index == 0 else None
            for weight in weights:
                weight.mul_(1.01)
        yield weights
    if rank.index == 1:
        dist.all_reduce(tensor)
    elif work is not None:
        work.wait()
    yield [tensor]


def _all_gather(some: Any, _index: int, size: int) -> Any:
    out = [torch.empty(256, 256) for _ in range(size)]
    return dist.all_gather(out, some(1), async_op=True), out


def _all_gather_single(some: Any, _index: int, size: int) -> Any:
    out = torch.empty(256 * size, 256)
    return dist.all_gather_into_tensor(out, some(2), async_op=True), [out]


def _reduce_scatter(some: Any, _index: int, size: int) -> Any:
    out = torch.empty(256, 256)
    return dist.reduce_scatter_tensor(out, some(3, 256 * size), async_op=True), [out]


def _broadcast(some: Any, _index: int, _size: int) -> Any:
    tensor = some(4)
    return dist.broadcast(tensor, 1, async_op=True), [tensor]


def _reduce(some: Any, _index: int, _size: int) -> Any:
    tensor = some(5)
    work = dist.reduce(tensor, 0, async_op=True)
    return work, [tensor if dist.get_rank() == 0 else some(5)]  # elsewhere it is undefined


def _all_to_all(some: Any, _index: int, size: int) -> Any:
    out = torch.empty(256 * size, 256)
    return dist.all_to_all_single(out, some(6, 256 * size), async_op=True), [out]


def _gather(some: Any, index: int, size: int) -> Any:
    out = [torch.empty(256, 256) for _ in range(size)] if index == 0 else None
    tensor = some(7)
    return dist.gather(tensor, out, 0, async_op=True), out or [tensor]


def _scatter(some: Any, index: int, size: int) -> Any:
    out = torch.empty(256, 256)
    parts = [some(8 + i) for i in range(size)] if index == 0 else None
    return dist.scatter(out, parts, 0, async_op=True), [out]


_LAUNCHES = [_all_gather, _all_gather_single, _reduce_scatter, _broadcast, _reduce, _all_to_all, _gather, _scatter]


@add("functional, scattered late", "6MiB")
def functional_scattered_late(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """As above. Here torch's registry keeps the copy, and no op ever names it."""
    import torch.distributed._functional_collectives as funcol

    weights = [torch.randn(512, 256) for _ in range(12)]
    mine = torch.empty(1024, 256)
    for step in range(NUM_STEPS):
        with session.step():
            if rank.index == 1:
                time.sleep(0.1)
            mine.fill_(rank.index + step)
            out = funcol.reduce_scatter_tensor(mine, "sum", 0, dist.group.WORLD)
            for weight in 4 * weights:
                weight.mul_(1.1)
            weights[0].add_(out)
        yield [mine, *weights]
        del out


@add("functional", "2MiB")
def functional(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """Functional collectives, which end in `wait_tensor`."""
    import torch.distributed._functional_collectives as funcol

    weights = [torch.randn(256, 256) for _ in range(10)]
    for step in range(NUM_STEPS):
        with session.step():
            if rank.index == 1:
                time.sleep(0.05)
            mine = torch.full((256, 256), float(rank.index + step))
            total = funcol.all_reduce(mine, "sum", dist.group.WORLD)
            whole = funcol.all_gather_tensor(mine, 0, dist.group.WORLD)
            for weight in weights:
                weight.mul_(1.01)
            weights[0].add_(total).add_(whole[:256]).add_(whole[256:])
            del total, whole
        yield [mine, *weights]


@add("send and receive", "3MiB", sizes=(3,), slow_sizes=(2,))
def send_and_receive(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """Around a ring. Nobody but the program ends a send or receive: until it waits they are not complete."""
    weights = [torch.randn(256, 256) for _ in range(12)]
    for step in range(NUM_STEPS):
        with session.step():
            sent = torch.full((256, 256), float(rank.index + step))
            received = torch.empty(256, 256)
            works = [
                dist.isend(sent, (rank.index + 1) % rank.size),
                dist.irecv(received, (rank.index - 1) % rank.size),
            ]
            for weight in weights:
                weight.mul_(1.01)
            assert not any(work.is_completed() for work in works if work is not None)
            for work in works:
                assert work is not None
                work.wait()
            weights[0].add_(received)
        yield [sent, received, *weights]


@add("set_budget", "3MiB", num_planned=0, evicts=False)
def set_budget(rank: Rank, session: SessionLike) -> Iterator[list[Tensor]]:
    """While a collective is under way it is waited for; while a receive is, refused: only the program may wait."""
    weights = [torch.randn(256, 256) for _ in range(14)]
    sent, received = torch.full((256, 256), float(rank.index)), torch.empty(256, 256)
    works = [dist.isend(sent, 1 - rank.index), dist.irecv(received, 1 - rank.index)]
    if isinstance(session, ooc.Session):
        with pytest.raises(ooc.SessionError, match=r"recv_.* not over"):
            session.set_budget("2MiB")
        with pytest.raises(ooc.SessionError, match=r"close: .*recv_.* not over"):
            session.close()
    for work in works:
        assert work is not None
        work.wait()
    total = torch.full((256, 256), 3.0)
    if rank.index == 1:
        time.sleep(0.1)
    pending = dist.all_reduce(total, async_op=True)
    if isinstance(session, ooc.Session):
        session.set_budget("2MiB")
    assert pending is not None
    pending.wait()
    for weight in weights:
        weight.add_(total)
    yield [sent, received, total, *weights]


ALL_CASES = CASES
"""Of both files."""
