"""Recording on fake tensors: the same step as a real one, without its memory."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn

from ooc.session import Session
from ooc.tracing.fake_tensors import FakeRecording
from scheduler.profiles import load_profile, op_costs
from scheduler.trace import Trace

MIB = 1 << 20


def net(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(width * 1024, 16)
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    inputs = torch.randn(batch, 3, 32, 32)
    nn.functional.cross_entropy(model(inputs), torch.randint(16, (batch,))).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def record(batch: int = 32, *, width: int = 32, max_steps: int = 8) -> Trace:
    recording = FakeRecording(load_profile("desktop"))
    with recording:
        model = net(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for _ in range(max_steps):
            step(model, optimizer, batch)
            if recording.boundary(optimizer, model):
                break
    assert recording.trace is not None
    return recording.trace


def test_a_fake_step_is_the_real_one_but_for_temporaries() -> None:
    """Sizes, order and life of everything that an op names are as a session records them."""
    with Session("96MiB", plan_cache=False) as session:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for _ in range(5):
            with session.step():
                step(model, optimizer, 32)
        real = session.trace()
    assert real is not None
    fake = record()

    def shape(trace: Trace) -> list[tuple[str, list[tuple[int, bool, bool]]]]:
        """Named uses only: a temporary is written unread and never used again."""
        uses = trace.uses_by_variable()
        found = []
        for op in trace.ops:
            named = [u for u in op.uses if u.reads or len(uses[u.variable]) > 1]
            found.append((op.name, [(trace.variables[u.variable].nbytes, u.reads, u.writes) for u in named]))
        return sorted((name, sorted(own)) for name, own in found if own)

    assert shape(fake) == shape(real)
    assert real.peak_nbytes() >= fake.peak_nbytes() > 0.7 * real.peak_nbytes()


def evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Ops made of others come whole to a mode in inference mode: a linear layer on three dimensions, attention."""
    model.train()
    sequence = torch.randn(8, 64, 64)
    model(sequence).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.inference_mode():
        found = model(sequence)
        nn.functional.scaled_dot_product_attention(found, found, found).transpose(0, 1)
        torch.einsum("abc,cd->abd", found, torch.ones(64, 64))


def test_ops_made_of_others_are_taken_apart_in_inference_mode_as_in_a_session() -> None:
    def names(trace: Trace) -> list[str]:
        """A reshape is another view where the tensor is of a class that dispatches for itself, as a fake one is."""
        return [op.name.replace("_reshape_alias", "view") for op in trace.ops if op.uses]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    with Session("96MiB", plan_cache=False, threshold_nbytes=4096) as session:
        model, optimizer = made()
        for _ in range(6):
            with session.step():
                evaluation(model, optimizer)
        real = session.trace()
    assert real is not None
    recording = FakeRecording(load_profile("desktop"), threshold_nbytes=4096)
    with recording:
        model, optimizer = made()
        for _ in range(8):
            evaluation(model, optimizer)
            if recording.boundary(optimizer, model):
                break
    assert recording.trace is not None
    assert names(recording.trace) == names(real)


def test_a_step_larger_than_memory_is_recorded_in_next_to_none() -> None:
    """Weights and activations of some 250 GiB; the process grows by less than 300 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = record(200_000, width=256)
    assert trace.peak_nbytes() > 200 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB


def test_kinds_names_and_heirs_are_known() -> None:
    trace = record()
    named = {v.label: v for v in trace.variables if v.kind == "parameter"}
    assert named["4.weight"].nbytes == 32 * 1024 * 16 * 4
    assert all(v.becomes == i for i, v in enumerate(trace.variables) if v.kind in ("parameter", "optimizer_state"))
    assert "momentum_buffer of 4.weight" in {v.label for v in trace.variables if v.kind == "optimizer_state"}


def test_work_is_counted_and_gives_the_times() -> None:
    """The matrix product of the last layer: 2 x 32 x 32,768 x 16 flop."""
    trace = record()
    costs = op_costs(trace)
    assert costs is not None
    index = next(i for i, op in enumerate(trace.ops) if op.name == "aten.addmm.default")
    assert costs[0][index] == 2 * 32 * 32 * 1024 * 16
    desktop = load_profile("desktop")
    assert [op.duration_ns for op in trace.ops] == [desktop.op_ns(f, n) for f, n in zip(*costs, strict=True)]


def test_only_ops_without_random_numbers_or_changes_may_be_run_again() -> None:
    by_name = {op.name: op.replayable for op in record().ops}
    assert by_name["aten.relu.default"]
    assert not by_name["aten.convolution.default"]  # its bias is below the threshold, and the optimizer changes it
    random = {"aten.native_dropout.default", "aten.bernoulli_.float"} & by_name.keys()
    assert random
    assert not any(by_name[name] for name in random)
    assert not by_name["aten.add_.Tensor"]


def test_steps_that_differ_give_no_trace() -> None:
    recording = FakeRecording(load_profile("desktop"))
    with recording:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in (8, 16, 24, 32):
            step(model, optimizer, batch)
            assert not recording.boundary(optimizer, model)
    assert recording.trace is None


@pytest.mark.parametrize("made_up", [1.0, False])
def test_values_that_do_not_exist_are_made_up_and_counted(made_up: object) -> None:
    recording = FakeRecording(load_profile("desktop"))
    with recording:
        source = torch.randn(4)
        found = (source.sum() if made_up == 1.0 else (source > 0).all()).item()
    assert found == made_up
    assert recording.num_made_up == 1
