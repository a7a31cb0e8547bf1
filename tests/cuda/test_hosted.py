"""Training runs through the table behind torch's CUDA allocator, over the fake driver, in processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]

START = """
import faulthandler, gc, torch, ooc
faulthandler.enable()
from tests.cuda.hosted import CHUNK_NBYTES, HostedDevice
from tests.quick_plans import QUICK_PLANS
from vmm.cuda_table import cuda_table

QUICK = {"plan_cache": False, **QUICK_PLANS}

def train(num_steps, session=None, keep=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses = []
    for index in range(num_steps):
        with session.step() if session else torch.enable_grad():
            x = torch.full((512, 256), 0.01 * (index + 1))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            del x, loss
    if keep is not None:
        keep.extend(p.detach() for p in model.parameters())
    return losses

expected_parameters = []
expected = train(7, keep=expected_parameters)
"""


def run(script: str) -> str:
    """Run it after `START`, in a process of its own. What it printed."""
    command = [sys.executable, "-c", START + script]
    done = forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_is_bit_equal_and_every_byte_is_in_the_budget() -> None:
    run("""
device = HostedDevice(num_chunks=96)
before = len(cuda_table().numbers())
kept = []
with ooc.Session(96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    numbers = cuda_table().numbers()
    assert numbers["unmanaged"]["num_blocks"]["allocated"] == 0, numbers
    assert train(7, session, keep=kept) == expected
    modes = [row.mode for row in session.steps.rows]
    assert modes[-2:] == ["planned", "planned"], modes
    assert session.steps.rows[-1].evicted_nbytes > 0
    numbers = cuda_table().numbers()
    assert numbers["small"]["num_blocks"]["peak"] > 10, numbers  # biases and the like
    assert numbers["unmanaged"]["num_blocks"]["allocated"] == 0, numbers
    assert cuda_table().state.num_planned > 50
    assert session.report()["peak_nbytes"] + numbers["small"]["nbytes"]["peak"] <= 96 * CHUNK_NBYTES
    assert all(torch.equal(a, b) for a, b in zip(kept, expected_parameters))
    del kept, numbers
    gc.collect()
assert device.fake.races == (), device.fake.races[0]
assert device.fake.left() == [], device.fake.left()
""")


@pytest.mark.parametrize("debug", [False, True])
def test_steps_of_any_size_share_a_plan(debug: bool) -> None:
    """What is kept has room for the longest batch, in memory and in the store; it outlives them by its own size."""
    run(f"""
lengths = [400, 512, 380, 450, 300, 500, 333, 490, 410, 280, 505, 350]

def train_on(lengths, session=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses, kept = [], []
    for index, length in enumerate(lengths):
        with session.step() if session else torch.enable_grad():
            x = torch.full((length, 256), 0.01 * (index + 1))
            y = model(x)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            kept = [y.detach() * factor for factor in range(8)]
            del x, y, loss
    return losses, kept

losses, tensors = train_on(lengths)
device = HostedDevice(num_chunks=96)
with ooc.Session(
    96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, debug={debug}, **QUICK
) as session:
    found, kept = train_on(lengths, session)
    modes = [row.mode for row in session.steps.rows]
    assert modes[4:].count("planned") >= len(modes[4:]) - 2, modes
    assert session.steps.rows[-1].evicted_nbytes > 0
assert found == losses
assert all(torch.equal(a, b) for a, b in zip(kept, tensors))
del kept
gc.collect()
assert device.unmapped and len(device.unmapped) == len(set(device.unmapped)), device.unmapped
assert device.fake.races == (), device.fake.races[0]
left = device.fake.left()
assert all("addresses" in it for it in left), left
""")


@pytest.mark.parametrize("num_chunks", [96, 200])
def test_what_outlives_its_session_keeps_address_and_bytes(num_chunks: int) -> None:
    """In memory or away: it is unmapped, once, when it is freed, and everything is given back then."""
    run(f"""
device = HostedDevice(num_chunks={num_chunks})
kept = []
with ooc.Session({num_chunks} * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    assert train(7, session, keep=kept) == expected
    addresses = [session.engine.runner.dispatcher.address(t) for t in kept]
    more = torch.ones(60 * CHUNK_NBYTES // 4)  # drives some of them out
assert any(addresses)
held = device.fake.num_calls["cuMemUnmap"]
for tensor, other, address in zip(kept, expected_parameters, addresses):
    assert not address or tensor.data_ptr() == address
    assert torch.equal(tensor, other)
assert more.sum() == more.numel()
assert device.unmapped == []
later = torch.ones(CHUNK_NBYTES)  # no session: from the driver
assert cuda_table().numbers()["unmanaged"]["num_blocks"]["current"] == 1
del tensor, other, more, later, kept
gc.collect()
assert len(device.unmapped) == len(set(device.unmapped)) > 6, device.unmapped
left = device.fake.left()
assert all("addresses" in it for it in left), left
numbers = cuda_table().numbers()
assert [numbers[p]["num_blocks"]["current"] for p in ("large", "small", "unmanaged")] == [0, 0, 0], numbers
""")


@pytest.mark.parametrize(("what", "stays"), [("nothing", False), ("1", True), ("CHUNK_NBYTES", True)])
def test_addresses_of_what_was_given_up_stay(what: str, stays: bool) -> None:
    """A tensor that is alive when its session is closed without it, below the threshold or a variable."""
    run(f"""
device = HostedDevice(num_chunks=96)
with ooc.Session(96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    nothing = 0
    kept = torch.ones({what})
    if not {what}:
        del kept
    session.close(bring_back=False)
left = device.fake.left()
assert [it for it in left if "addresses" not in it] == [], left
assert bool(left) == {stays}, left
kept = None
""")


@pytest.mark.parametrize("leaves_out", ["nothing", "addresses of its own"])
def test_recomputation_needs_addresses_that_torch_has_not_handed_out(leaves_out: str) -> None:
    """torch's pluggable allocator has one entry an address: with two storages at one, freeing the second ends it."""
    script = f"""
from ooc.replay.rerun_device import RerunDevice
from tests.cuda.test_reruns import slow_link
from tests.session.program_reruns import forced_reruns
init = RerunDevice.__init__
def without(self, *args, **kwargs):
    init(self, *args, **kwargs)
    self.has_own_addresses = {leaves_out == "nothing"}
RerunDevice.__init__ = without
device = HostedDevice(num_chunks=96)
with slow_link(), forced_reruns(0):
    options = dict(chunk_nbytes=CHUNK_NBYTES, plan_cache=False, recompute=True)
    with ooc.Session(96 * CHUNK_NBYTES, device=device, **options) as s:
        numbers = cuda_table().numbers()
        assert train(7, s) == expected
        assert [row.mode for row in s.steps.rows][-2:] == ["planned", "planned"], [row.mode for row in s.steps.rows]
        assert s.engine.manager.counters.num_reruns > 7
        gc.collect()
        numbers = cuda_table().numbers()
        assert numbers["large"]["num_blocks"]["current"] == 0, numbers

assert device.fake.races == (), device.fake.races[0]
assert device.fake.left() == [], device.fake.left()
"""
    if leaves_out == "nothing":
        run(script)
    else:
        with pytest.raises(AssertionError, match="Trying to free a pointer not allocated here"):
            run(script)


def test_out_of_memory_is_torchs_own_error_and_counted() -> None:
    run("""
device = HostedDevice(num_chunks=32)
with ooc.Session(32 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    try:
        torch.zeros(64 * CHUNK_NBYTES // 4)
    except torch.OutOfMemoryError as error:
        assert "budget" in str(error), error
    else:
        raise AssertionError("twice the budget was allocated")
    assert cuda_table().numbers()["num_refused"] > 0
    assert torch.ones(4 * CHUNK_NBYTES // 4).sum() == CHUNK_NBYTES
assert device.fake.left() == []
""")


def test_small_blocks_beyond_their_part_take_chunks() -> None:
    run("""
device = HostedDevice(num_chunks=64)
with ooc.Session(64 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    many = [torch.full((4096,), float(i)) for i in range(40)]  # 16 KiB each; 4 chunks of heap hold 16
    numbers = cuda_table().numbers()
    assert numbers["small"]["num_blocks"]["current"] == 16, numbers
    assert all(bool((t == i).all()) for i, t in enumerate(many))
    first = many[0].data_ptr()
    del many[0], many[0], many[0]
    again = torch.empty(7000)  # where three neighbours were freed
    assert again.data_ptr() == first
    del many, again
assert device.fake.left() == []
""")


def test_torchs_own_figures_are_ours() -> None:
    run("""
device = HostedDevice(num_chunks=96)
torch.cuda.memory.is_initialized = lambda: True
torch.cuda.memory._get_device_index = lambda device, optional: 0
with ooc.Session(96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    assert torch.cuda.memory_allocated() == 0
    x = torch.ones(4 * CHUNK_NBYTES // 4)
    y = torch.ones(100)
    assert torch.cuda.memory_allocated() == 4 * CHUNK_NBYTES + 400, torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == 400
    assert torch.cuda.max_memory_allocated() == 4 * CHUNK_NBYTES + 400
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.max_memory_allocated() == 400
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 96 * CHUNK_NBYTES
    accelerator = torch.accelerator.memory
    assert accelerator.memory_allocated(0) == 400 and accelerator.memory_reserved(0) == 96 * CHUNK_NBYTES
    more = torch.ones(2 * CHUNK_NBYTES // 4)
    del more
    assert accelerator.max_memory_allocated(0) == 2 * CHUNK_NBYTES + 400
    accelerator.reset_peak_memory_stats(0)
    accelerator.reset_accumulated_memory_stats(0)
    accelerator.empty_cache()
    assert accelerator.max_memory_allocated(0) == 400
    assert accelerator.memory_stats(0)["allocated.small_pool.current"] == 1
    stats = torch.cuda.memory_stats()
    assert stats["allocation.small_pool.current"] == 1 and stats["num_ooms"] == 0
    torch.cuda.empty_cache()
    del y
assert torch.cuda.memory_reserved() == 0
""")


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_freed_while_its_session_ends_leaves_nothing_behind(when: str) -> None:
    """By the cycle collector or another thread: right before, or right after, it is named as outliving the session."""
    run(f"""
from vmm.cuda_table import CudaTable
device = HostedDevice(num_chunks=96)
kept = []
outlives, freed = CudaTable.outlives, []

def interrupted(self, address, nbytes):
    index = next(i for i, (_, at) in enumerate(kept) if at == address)
    if {when!r} == "before":
        kept[index] = (None, 0)
    found = outlives(self, address, nbytes)
    kept[index] = (None, 0)
    freed.append(found)
    return found

CudaTable.outlives = interrupted
with ooc.Session(96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    for index in range(12):
        tensor = torch.full((10 * CHUNK_NBYTES // 4,), float(index))
        kept.append((tensor, session.engine.runner.dispatcher.address(tensor)))
    del tensor
    states = [session.engine.record_at(at).state.value for _, at in kept]
    assert set(states) == {{"resident", "away"}}, states
assert len(freed) == 12 and set(freed) == {{ {when == "after"} }}, freed
left = device.fake.left()
assert not any("handle" in it or "mapping" in it for it in left), left
numbers = cuda_table().numbers()
assert numbers["large"]["num_blocks"]["current"] == 0, numbers
after = torch.ones(CHUNK_NBYTES)  # from the driver again
del after
assert cuda_table().numbers()["unmanaged"]["num_blocks"]["current"] == 0
assert device.fake.races == ()
""")


def test_threads_without_a_context_allocate_and_free() -> None:
    """As autograd's thread of a device does: in a session, after it, and for what outlived it."""
    run("""
import threading

def in_thread(function):
    \"\"\"What it returns, on a thread of its own, on which no context is current.\"\"\"
    found = []
    def work():
        try:
            assert device.torch.current() == 0
            found.append(function())
        except BaseException as error:
            found.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]

device = HostedDevice(num_chunks=64)
with ooc.Session(64 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    full = [torch.full((20 * CHUNK_NBYTES // 4,), float(i)) for i in range(2)]
    made = in_thread(lambda: torch.full((30 * CHUNK_NBYTES // 4,), 7.0))  # drives one of them out
    address = session.engine.runner.dispatcher.address(made)
    assert [bool((t == i).all()) for i, t in enumerate(full)] == [True, True]
    assert bool((made == 7).all())
    del full
kept = [made]
del made
assert device.unmapped == []
in_thread(kept.clear)
assert [at for at, _ in device.unmapped] == [address], device.unmapped
later = [in_thread(lambda: torch.ones(CHUNK_NBYTES))]  # no session: from the driver
assert later[0].sum() == CHUNK_NBYTES
before = device.torch.library.host_memory_num_freed()
in_thread(later.clear)
assert device.torch.library.host_memory_num_freed() == before + 1
""")


def test_a_child_forked_while_another_thread_frees_can_free() -> None:
    """A DataLoader's worker inherits tensors: no mutex may be locked in it for ever."""
    run("""
import ctypes, os, signal, threading, time
from tests.cuda.hosted import HostedTorch
from vmm.cuda_table import DriverPointers

library = HostedTorch().library
names = "memory_allocate memory_free wait_for_fork unmap_nothing context_get context_set".split()
pointers = [ctypes.cast(getattr(library, f"host_{name}"), ctypes.c_void_p).value for name in names]
table = cuda_table()
table.install(DriverPointers(*pointers))
table.begin((1 << 40, (1 << 40) + (1 << 21)), (1 << 41, (1 << 41) + 4096), 0)
block = table.take(512)
assert table.end()  # the block outlives its session: what it is in is unmapped when it is freed
thread = threading.Thread(target=table.give, args=(block,))
thread.start()
while not library.host_is_waiting():
    time.sleep(0.001)
child = os.fork()
if child == 0:
    table.take(512)
    os._exit(0)
thread.join()
for _ in range(6000):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.05)
else:
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child hangs")
assert status == 0, status
""")


def test_a_device_that_shares_the_hosts_memory_evicts_to_the_file() -> None:
    """Pinned host memory would be the same memory: only what transfers pass through is pinned."""
    run("""
import logging
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ooc").addHandler(handler)
device = HostedDevice(num_chunks=96, host_budget_nbytes=None, is_integrated=True)
with ooc.Session(96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    assert train(7, session) == expected
    assert session.steps.rows[-1].evicted_nbytes > 0
    assert session.engine.memory.store.used_host_nbytes == 0 and session.engine.memory.store.file is not None
    pinned = [int(it.split()[0]) for it in device.fake.left() if "pinned" in it]
    assert 0 < sum(pinned) <= 64 << 20, pinned
assert device.fake.races == ()
assert said == [], said
asked = HostedDevice(num_chunks=96, host_budget_nbytes=8 << 20, is_integrated=True)
with ooc.Session(96 * CHUNK_NBYTES, device=asked, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    assert "shares the host's memory" in said[0], said
    assert session.engine.memory.store._blocks.num_blocks > 0
""")


def test_a_budget_that_changes_or_goes_takes_the_part_for_small_blocks_with_it() -> None:
    """Small blocks keep their addresses and bytes; what they do not need is the driver's."""
    run("""
import contextlib
device = HostedDevice(num_chunks=160)
def free():
    return device.fake.cuMemGetInfo()[1] // CHUNK_NBYTES
class Changing(ooc.Session):
    count = 0
    @contextlib.contextmanager
    def step(self):
        self.count += 1
        if self.count in (5, 8):
            with self.yielded():
                assert free() == 160
                assert cuda_table().numbers()["small"]["num_blocks"]["current"] > 5
                try:
                    torch.ones(8) + small
                except ooc.SessionError as error:
                    assert "while session.yielded" in str(error)
                else:
                    raise AssertionError("an op on a small block, whose memory is not there")
        if self.count in (6, 9, 10):
            chunks = {6: 90, 9: 160, 10: 96}[self.count]
            self.set_budget(chunks * CHUNK_NBYTES)
            memory = self.engine.memory
            assert memory.num_chunks + memory.driver.num_fixed_chunks == chunks, memory
            assert cuda_table().reserved_nbytes == chunks * CHUNK_NBYTES
        assert free() == 160 - self.budget_nbytes // CHUNK_NBYTES
        with super().step():
            yield
with Changing(96 * CHUNK_NBYTES, device=device, chunk_nbytes=CHUNK_NBYTES, **QUICK) as session:
    small = torch.arange(100.0)
    kept = []
    found = train(12, session, keep=kept)
    modes = [row.mode for row in session.steps.rows]
    assert modes.count("planned") >= 3, modes
    assert small.tolist() == [float(i) for i in range(100)]
    assert cuda_table().numbers()["unmanaged"]["num_blocks"]["allocated"] == 2  # torch.ones, in the blocks
    with session.yielded():
        session.close()
expected_parameters.clear()
assert found == train(12, keep=expected_parameters)
assert all(torch.equal(a, b) for a, b in zip(kept, expected_parameters))
assert small.tolist() == [float(i) for i in range(100)]
assert device.fake.races == (), device.fake.races[0]
del kept, small, found, session
gc.collect()
left = device.fake.left()
assert all("addresses" in it for it in left), left
""")
