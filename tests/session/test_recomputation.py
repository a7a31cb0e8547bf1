"""Plans that recompute are played: bit for bit, within the budget, on the plan and off it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from ooc.memory.record import State, VariableRecord
from tests.session.program_reruns import counted_reruns
from tests.session.recomputed import (
    CASES,
    CHUNK_NBYTES,
    Hook,
    Training,
    compare,
    digest,
    many_images,
    node_at,
    noted,
    saved_tensors,
)

AT = 4
"""The step in which something unexpected happens: one that is replayed from a plan."""


SLOW = {"convolutions_dtr", "encoder_autocast"}
"""Cases whose model, policy and type of numbers are those of others each."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_equal_to_in_core(name: str) -> None:
    """With dropout, batch norm, in-place ops, autocast, attention and embeddings; debug mode compares each re-run."""
    run = compare(CASES[name])
    last = noted(run, "steps")[-1]
    assert last["mode"] == "planned"
    assert last["num_reruns"] > 0 and last["recomputed_nbytes"] > 0 and last["recompute_s"] > 0
    assert noted(run, "report")["peak_nbytes"] <= CASES[name].num_chunks * CHUNK_NBYTES


def _discarded(training: Training) -> list[VariableRecord]:
    """The records of variables whose bytes are nowhere now; in core none."""
    if training.session is None:
        return []
    return [r for r in training.session.engine.live_records() if r.state is State.DISCARDED]


def _expect_discards(training: Training, index: int) -> None:
    if training.session is not None and index == AT:
        assert _discarded(training), "nothing is discarded where it should be: the test tests nothing"
        training.notes.append(("discarded", len(_discarded(training))))


def _extra_op(training: Training, index: int, output: Tensor) -> None:
    _expect_discards(training, index)
    if index == AT:
        largest = max(saved_tensors(output), key=Tensor.numel)
        training.digests.append((digest(largest.detach().sin()),))


def _all_saved(training: Training, index: int, output: Tensor) -> None:
    _expect_discards(training, index)
    if index == AT:
        training.digests.append(tuple(digest(tensor) for tensor in saved_tensors(output)))


def _numpy(training: Training, index: int, output: Tensor) -> None:
    _expect_discards(training, index)
    if index == AT:
        arrays = [t.detach().numpy() for t in saved_tensors(output) if t.dtype.is_floating_point]
        training.digests.append(tuple(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays))


def _written_through_numpy(training: Training, index: int, output: Tensor) -> None:
    """The batch, which re-runs read, is changed by code that no op tells of; what was computed from it must not be."""
    _expect_discards(training, index)
    source = next(t for t in saved_tensors(output) if t.shape[1:] == (3, 32, 32)).detach()  # an op: in each step
    if index == AT:
        source.numpy()[:] *= 0.5


def _exception(training: Training, index: int, output: Tensor) -> None:
    _expect_discards(training, index)
    if index == AT:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        node_at(output, 12).register_prehook(fail)


def _before_backward(training: Training, index: int, _: Tensor) -> None:
    _expect_discards(training, index)
    if index == AT:
        raise ZeroDivisionError


def _in_a_thread(work: Callable[[Tensor], object]) -> Hook:
    def hook(training: Training, index: int, output: Tensor) -> None:
        _expect_discards(training, index)
        if index != AT:
            return
        tensors = saved_tensors(output)
        found: list[str] = []

        def run() -> None:
            found.extend(str(work(tensor.detach())) for tensor in tensors if tensor.dtype.is_floating_point)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        training.digests.append(tuple(found))

    return hook


def _fork(training: Training, index: int, output: Tensor) -> None:
    _expect_discards(training, index)
    if index != AT:
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            arrays = [t.detach().numpy() for t in saved_tensors(output) if t.dtype.is_floating_point]
            os.write(writing, hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest().encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    training.digests.append((os.read(reading, 100).decode(),))
    os.close(reading)


def _larger_budget(training: Training, index: int, _: Tensor) -> None:
    """(A smaller one: `test_smaller_in_mid_step.py`.)"""
    _expect_discards(training, index)
    if training.session is not None and index == AT:
        training.session.set_budget(CASES["convolutions"].num_chunks * 2 * CHUNK_NBYTES)


def _backward_twice(training: Training, index: int, output: Tensor) -> None:
    """The first backward pass fails in the middle, and is taken again from the beginning."""
    if index != AT:
        return

    def fail(*_: object) -> None:
        handle.remove()
        raise ZeroDivisionError

    handle = node_at(output, 6).register_prehook(fail)
    with contextlib.suppress(ZeroDivisionError):
        output.float().sum().backward(retain_graph=True)
    _expect_discards(training, index)


def _interrupted_twice(training: Training, index: int, output: Tensor) -> None:
    """Ctrl-C in the middle of a backward pass, which is taken again from the beginning: all that it read is there."""
    if index != AT:
        return

    def interrupt(*_: object) -> None:
        handle.remove()
        signal.raise_signal(signal.SIGINT)

    handle = node_at(output, 6).register_prehook(interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    try:
        with pytest.raises(KeyboardInterrupt):
            output.float().sum().backward(retain_graph=True)
    finally:
        signal.signal(signal.SIGINT, before)
    _expect_discards(training, index)


WITHOUT_REMAKES = {"exception_before_backward", "exception_within_backward"}
"""There all that was discarded is freed."""

HOOKS: dict[str, Hook] = {
    "backward_twice": _backward_twice,
    "ctrl_c_and_backward_again": _interrupted_twice,
    "an_op_that_the_plan_does_not_have": _extra_op,
    "every_saved_tensor_read": _all_saved,
    "numpy": _numpy,
    "written_through_numpy": _written_through_numpy,
    "exception_within_backward": _exception,
    "exception_before_backward": _before_backward,
    "thread_reads": _in_a_thread(digest),
    "thread_writes": _in_a_thread(lambda tensor: digest(tensor.data.mul_(1.0))),
    "fork": _fork,
    "larger_budget": _larger_budget,
}


@pytest.mark.parametrize("debug", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HOOKS)
def test_off_plan_while_variables_are_discarded(name: str, debug: bool) -> None:
    with counted_reruns() as counts:
        run = compare(CASES["convolutions"], hook=HOOKS[name], num_steps=AT + 2, debug=debug)
    assert counts[0] > 0
    if name not in WITHOUT_REMAKES:
        assert counts[1] > 0 and noted(run, "steps")[AT]["mode"] != "planned"
    if "budget" not in name:
        assert noted(run, "report")["peak_nbytes"] <= CASES["convolutions"].num_chunks * CHUNK_NBYTES


def test_another_batch_shape() -> None:
    """Smaller ones fit into the plan, re-runs included; a larger one leaves it."""
    case = replace(CASES["convolutions"], batch=many_images, num_chunks=60)
    run = compare(case, sizes=[8, 8, 8, 8, 5, 7, 12, 8], num_steps=8)
    steps = noted(run, "steps")
    assert [step["mode"] for step in steps[3:]] == ["planned", "planned", "planned", "off_plan", "planned"]
    assert all(step["num_reruns"] > 0 for step in (*steps[3:6], steps[7]))


def test_a_smaller_batch_leaves_noise_behind_its_own_bytes() -> None:
    """Debug mode compares what was made again as far as the storage reaches, not as far as the plan has room."""
    run = compare(CASES["convolutions"], sizes=[8, 8, 8, 8, 6, 8])
    assert noted(run, "num_reruns") > 0


def test_recompute_can_be_switched_off() -> None:
    run = compare(CASES["convolutions_auto"], recompute=False)
    assert noted(run, "num_reruns") == 0
    assert noted(run, "steps")[-1]["mode"] == "planned"
