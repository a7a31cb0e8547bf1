"""Host memory under its exact budget, and the file behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CHUNK_NBYTES, CudaSession, fixed_speed
from tests.harness import Recipe, assert_equal, num_steps_by_mode, run_in_core, run_out_of_core
from tests.session.test_bitwise import budget_nbytes_of
from vmm.cuda_calls import CudaCalls
from vmm.driver import MemoryFault
from vmm.host_blocks import HostBlocks
from vmm.store import StoreFull
from vmm.testing.fake_cuda import CUresult, FakeCuda

STAGING_NBYTES = 4 * CHUNK_NBYTES


@pytest.mark.parametrize("host_nbytes", [0, 8 * CHUNK_NBYTES, 20 * CHUNK_NBYTES])
def test_what_host_memory_cannot_hold_goes_to_the_file(host_nbytes: int, tmp_path: Path) -> None:
    recipe = Recipe(workload="conv_stack")
    device = FakeCudaDevice(host_budget=host_nbytes + STAGING_NBYTES, staging=STAGING_NBYTES, uses_file=True)
    with fixed_speed():
        run = run_out_of_core(
            recipe,
            budget_nbytes_of(recipe, "quarter"),
            lambda nbytes: CudaSession(nbytes, device=device, store=str(tmp_path)),
        )
    assert_equal(run_in_core(recipe), run)
    assert num_steps_by_mode(run)["planned"] >= 3
    file = device.memory.store.file
    assert file.store.statistics("write").nbytes > 0
    assert file.store.statistics("read").nbytes > 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_host_memory_that_is_too_small_is_an_error_with_options() -> None:
    recipe = Recipe(workload="conv_stack")
    device = FakeCudaDevice(host_budget=4 * CHUNK_NBYTES)
    with fixed_speed(), pytest.raises(StoreFull, match=r"of the 256.0 KiB that are pinned are free.*\n.*host_budget"):
        run_out_of_core(recipe, budget_nbytes_of(recipe, "quarter"), lambda nbytes: CudaSession(nbytes, device=device))


def test_memory_that_cannot_be_pinned_is_an_error_before_training() -> None:
    def prepare(fake: FakeCuda) -> None:
        fake.cuMemHostRegister = lambda *_: (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)  # type: ignore[method-assign]

    device = FakeCudaDevice(prepare=prepare)
    with pytest.raises(MemoryFault, match=r"cannot pin 64.0 MiB \(67108864 bytes\)(.|\n)*ulimit -l"):
        CudaSession(4 << 20, device=device)
    assert device.fake.left() == []


def test_blocks_are_pinned_piece_by_piece_under_an_exact_budget() -> None:
    fake = FakeCuda()
    calls = CudaCalls(fake)
    blocks = HostBlocks(calls, budget_nbytes=1050, block_nbytes=100, piece_nbytes=350)
    assert (blocks.num_blocks, blocks.num_free) == (10, 10)
    assert (fake.num_calls["cuMemHostRegister"], fake.num_calls["cuMemHostAlloc"]) == (4, 0)
    runs = blocks.take(10)
    assert runs is not None
    segments = blocks.segments(runs, 950)
    assert [nbytes for _, nbytes in segments] == [300, 300, 300, 50]
    assert blocks.take(1) is None
    blocks.give(runs)
    assert blocks.num_free == 10
    blocks.close()
    blocks.close()
    assert fake.left() == []
    for fail_call in range(1, 5):
        fake.fail(fail_call, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(
            MemoryFault, match=f" {(fail_call - 1) * 300} B were pinned, {100 if fail_call == 4 else 300} B more"
        ):
            HostBlocks(calls, budget_nbytes=1050, block_nbytes=100, piece_nbytes=350)
        assert fake.left() == []
    fake.close()
