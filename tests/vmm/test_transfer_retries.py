"""Calls that a signal cut short (EINTR) or that come too early (EAGAIN) are made again; other errors are not."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmm.memory_cases import Memory
from vmm.transfers import Direction, TransferEngine, TransferError

MIB = 1 << 20
NBYTES = MIB


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(4 * MIB)
    made[:NBYTES] = random.Random(1).randbytes(NBYTES)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    with open(tmp_path / "data", "wb+", buffering=0) as opened:
        yield opened.fileno()


def round_trip(engine: TransferEngine, memory: Memory, file: int) -> None:
    """Write and read back; raises what either raises."""
    write = engine.submit_write(file, 0, [(memory.address, NBYTES)])
    engine.wait(engine.submit_read(file, 0, [(memory.address + NBYTES, NBYTES)], after=[write]))
    assert memory[NBYTES : 2 * NBYTES] == memory[:NBYTES]


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
@pytest.mark.parametrize("num_failures", [1, 12])
def test_a_call_is_made_again(error: int, direction: Direction, num_failures: int, memory: Memory, file: int) -> None:
    with TransferEngine(num_writers=1, num_readers=1) as engine:
        engine.inject_faults(fail_call=1, error=error, direction=direction, num_failures=num_failures)
        round_trip(engine, memory, file)
        assert engine.statistics(direction).num_calls == 1 + num_failures
        assert engine.statistics(direction).nbytes == NBYTES


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_it_goes_on_in_the_middle_of_a_partial_transfer(error: int, memory: Memory, file: int) -> None:
    with TransferEngine(num_writers=1, num_readers=1) as engine:
        engine.inject_faults(fail_call=3, error=error, num_failures=2, call_nbytes=100_000)
        round_trip(engine, memory, file)
        calls = sum(engine.statistics(way).num_calls for way in ("write", "read"))
        assert calls == 2 * -(-NBYTES // 100_000) + 2


def test_a_device_that_never_takes_it_is_a_failure(memory: Memory, file: int) -> None:
    with TransferEngine(num_writers=1, num_readers=1) as engine:
        engine.inject_faults(fail_call=1, error=errno.EAGAIN, direction="write", num_failures=1 << 40)
        with pytest.raises(TransferError) as raised:
            round_trip(engine, memory, file)
        assert raised.value.errno == errno.EAGAIN
        engine.inject_faults()
        round_trip(engine, memory, file)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_other_errors_are_told_at_once(error: int, memory: Memory, file: int) -> None:
    with TransferEngine(num_writers=1, num_readers=1) as engine:
        engine.inject_faults(fail_call=1, error=error)
        with pytest.raises(TransferError) as raised:
            round_trip(engine, memory, file)
        assert raised.value.errno == error
        assert engine.statistics("write").num_calls == 1
