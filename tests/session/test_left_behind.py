"""Nothing is left behind: no files, no shared memory, no threads, no growth, however a run ends."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import ooc
from tests import forked
from tests.quick_plans import QUICK_PLANS
from tests.session.continuation import BUDGET, Trainer
from tests.shared_memory import shared_memory, shared_memory_beyond
from tests.vmm.memory_cases import num_threads
from vmm.machine import map_count, process_memory
from vmm.posix import PosixDriver
from vmm.torch_cpu import PlanTables, cpu_allocator

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

SCRIPT = """
import os, signal, sys
import ooc
from tests.session.continuation import BUDGET, Trainer
with ooc.Session(BUDGET, store=sys.argv[1]) as session:
    trainer = Trainer()
    for index in range(5):
        with session.step():
            trainer.step(index)
    print("ready", session.engine.memory.store.file_nbytes, len(os.listdir(sys.argv[1])), flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "exception":
        raise RuntimeError("on purpose")
    if sys.argv[2] == "abandon":
        os._exit(5)
"""


def open_files() -> set[str]:
    """What this process's descriptors point to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def sizes(session: ooc.Session) -> dict[str, int]:
    """Everything of a session that could grow from step to step."""
    executor, sequences, store = session.engine.executor, session.engine.sequences, session.engine.memory.store
    recorder = session.engine.runner.recording.recorder
    session.engine.live_records()  # of what was freed since the last allocation nobody knows yet
    assert session.engine.manager.pool.num_free == session.engine.manager.num_free  # what was ready has gone back
    return {
        "records": len(session.engine.manager.records),
        "resident": len(session.engine.manager._resident),
        "reservations": len(session.engine.memory.space.reservations) - len(session.engine.manager._births._order),
        "mappings": session.engine.memory.driver.num_mappings,
        "slots": store.num_slots,
        "limbo": len(store._limbo),
        "file": store.file_nbytes,
        "events": len(executor.events),
        "recorded ops": len(recorder.ops) if recorder is not None else 0,
        "sequences seen": len(sequences._seen) + len(sequences._sightings),
        "plans": len(sequences._plans),
        "pasts": len(sequences._expectation._predictor),
    }


def test_no_growth_over_a_thousand_steps() -> None:
    with ooc.Session(BUDGET) as session:
        trainer = Trainer()

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                with session.step():
                    trainer.step(0)

        def measure() -> tuple[dict[str, int], int, int]:
            gc.collect()
            # One row a step is meant to stay.
            return sizes(session), len(gc.get_objects()) - len(session.steps.rows), process_memory().anonymous_nbytes

        train(100)
        found = [measure()]
        for _ in range(3):
            train(300)
            found.append(measure())
        assert [(row.mode, row.why) for row in session.steps.rows[-900:] if row.mode != "planned"] == []
        plan = session.plan()
        assert plan is not None
        assert session.engine.memory.allocator.state.num_events < 1000  # those since the last boundary
        # Transfers of the last step at most: how many are under way at its end is a matter of timing.
        assert len(session.engine.executor.acts.writes) + len(session.engine.executor.acts.loads) <= 2 * len(
            plan.residencies
        )
    # What grows does so in each third; something that others have left in this process may go or come in one.
    assert any(earlier == later for (earlier, *_), (later, *_) in pairwise(found))
    assert min(later - earlier for (_, earlier, _), (_, later, _) in pairwise(found)) < 30
    # 300 rows take 0.15 MB; malloc needs some slack.
    assert min(later - earlier for (*_, earlier), (*_, later) in pairwise(found)) < MIB


def test_no_growth_over_many_on_demand_steps() -> None:
    """Other ops each time, so that no sequence repeats and none is planned; and another batch size."""
    with ooc.Session(BUDGET) as session:
        weight = torch.randn(160, 160, requires_grad=True)

        def train(start: int, stop: int) -> None:
            small = torch.ones(8)
            for index in range(start, stop):
                with session.step():
                    for bit in range(10):
                        small = small.relu() if index >> bit & 1 else small.neg()
                    loss = (torch.randn(128 + index, 160) @ weight).relu().sum()
                    loss.backward()
                    weight.grad = None
                    del loss

        train(0, 200)
        before = sizes(session)
        train(200, 600)
        after = sizes(session)
    growing = {"file", "mappings"}  # sizes of batches grow in this test
    changing = {"reservations", "slots", "resident"}  # what is warm, written behind, or in memory, when a step ends
    assert all(after[k] <= before[k] + 4 for k in changing)
    rest = before.keys() - growing - changing
    assert {k: after[k] for k in rest} == {k: before[k] for k in rest}


def test_one_session_after_another() -> None:
    """Counts must be what they were. What grows does so in each third: malloc may come to what it keeps in one."""

    def one() -> None:
        with ooc.Session(BUDGET, **QUICK_PLANS) as session:
            trainer = Trainer()
            for index in range(4):
                with session.step():
                    trainer.step(index)

    def measure() -> tuple[set[str], int, int, int, int]:
        gc.collect()
        return open_files(), num_threads(), map_count(), len(gc.get_objects()), process_memory().anonymous_nbytes

    for _ in range(70):  # until malloc and torch have what they keep: 50 to 90 sessions
        one()
    found = [measure()]
    for _ in range(3):
        for _ in range(10):
            one()
        found.append(measure())
    files, threads, maps, objects, memory = zip(*found, strict=True)
    assert files[-1] <= files[0]
    assert threads[-1] <= threads[0]
    assert maps[-1] <= maps[0] + 20  # malloc's own
    assert min(later - earlier for earlier, later in pairwise(objects)) < 20
    assert min(later - earlier for earlier, later in pairwise(memory)) < MIB


def _normally(session: ooc.Session) -> None:
    session.close()


def _by_exception(session: ooc.Session) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), session:
        raise RuntimeError("on purpose")


def _by_exception_in_step(session: ooc.Session) -> None:
    with pytest.raises(KeyboardInterrupt), session, session.step():
        Trainer().step(0, between=lambda: signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize("end", [_normally, _by_exception, _by_exception_in_step])
def test_nothing_is_open_after_a_session(tmp_path: Path, end: Callable[[ooc.Session], None]) -> None:
    with ooc.Session(BUDGET):  # what is made once in a process
        Trainer().step(0)
    gc.collect()
    files, threads = open_files(), num_threads()
    session = ooc.Session(BUDGET, store=tmp_path)
    assert num_threads() > threads
    trainer = Trainer()
    for index in range(3):
        with session.step():
            trainer.step(index)
    assert list(tmp_path.iterdir()) == []  # the store's file has no name from the start
    end(session)
    assert open_files() == files
    assert num_threads() == threads
    assert list(tmp_path.iterdir()) == []
    del session
    assert trainer.step(3)  # in core, with what the session has left


def test_what_outlives_its_session_does_not_keep_the_pool() -> None:
    """One page of the pool that stays mapped would keep all of its memory, for the life of the process."""
    with ooc.Session("8MiB", chunk_nbytes=MIB):
        resident = torch.full((MIB // 16,), 2.0)  # a quarter of a chunk
        away = torch.full((MIB // 16,), 3.0)
        for value in range(7):  # in turn, so that the first goes
            torch.full((MIB // 4 * 7,), float(value)).add_(1)
    assert not _holds_pool(os.getpid())
    assert resident.unique().tolist() == [2.0]
    assert away.unique().tolist() == [3.0]


def test_a_storage_that_is_freed_while_its_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cycle collector, say, right before it would be noted as one that lives on."""
    disown = PosixDriver.disown

    def free_first(driver: PosixDriver, address: int, num_chunks: int) -> None:
        held.clear()
        disown(driver, address, num_chunks)

    with ooc.Session("4MiB", chunk_nbytes="64KiB") as session:
        held = [torch.full((20_000,), 2.0)]
        address = session.engine.runner.dispatcher.address(held[0])
        monkeypatch.setattr(PosixDriver, "disown", free_first)
    assert not held
    assert address not in cpu_allocator().detached
    assert _permissions_at(address) == "---p"


def test_a_freed_storage_is_not_bound() -> None:
    """Else the next one at its address would be: when that is freed, a variable that is alive would count as dead."""
    is_alive = np.ones(1, dtype=np.uint8)
    tables = PlanTables(variable_alive=is_alive.ctypes.data, num_variables=1)
    with ooc.Session("4MiB", chunk_nbytes="64KiB") as session:
        allocator, address_of = session.engine.memory.allocator, session.engine.runner.dispatcher.address
        first = torch.full((20_000,), 1.0)
        address = address_of(first)
        del first
        assert not allocator.bind(address, 0)
        second = torch.full((20_000,), 1.0)
        assert address_of(second) == address
        allocator.state.plan = ctypes.addressof(tables)
        del second
        allocator.state.plan = None
    assert is_alive[0]


def _permissions_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        first, last = (int(it, 16) for it in place.split("-"))
        if first <= address < last:
            return permissions
    return "a hole"


@pytest.mark.parametrize("way", ["normal", "exception", "abandon", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_by_a_process(tmp_path: Path, way: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    shared_before = shared_memory()
    command, environment = [sys.executable, "-c", SCRIPT, str(store), way], {**os.environ, "OMP_NUM_THREADS": "1"}
    (its_input, our_output), (our_input, its_output) = os.pipe(), os.pipe()
    errors = tmp_path / "errors"
    with open(our_input) as said, open(our_output, "w") as words, errors.open("w") as its_errors:
        with open(its_input) as nothing_yet, open(its_output, "w") as output:
            process = forked.start(command, env=environment, cwd=ROOT, files=(nothing_yet, output, its_errors))
        try:
            word, file_nbytes, num_files = said.readline().split()
            assert word == "ready"
            assert int(file_nbytes) > MIB
            assert int(num_files) == 0
            assert _holds_pool(process.pid)
            if way.startswith("SIG"):
                process.send_signal(getattr(signal, way))
            else:
                print(file=words, flush=True)
            process.wait(600)
        finally:
            process.kill()
            process.wait()
    expected = {"normal": 0, "exception": 1, "abandon": 5}
    assert process.returncode == (expected[way] if way in expected else -getattr(signal, way)), errors.read_text()
    assert list(store.iterdir()) == []
    assert shared_memory_beyond(shared_before) == []
    assert not _holds_pool(process.pid)


def _holds_pool(pid: int) -> bool:
    try:
        return "ooc-chunks" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
