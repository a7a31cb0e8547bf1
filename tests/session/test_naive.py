"""What breaks the naive version: DESIGN.md section 8's list, one test a line.

Each program is run in core and under a session at a budget at which variables move, and compared to
the last bit; each test fails if its remedy is taken out (the docstring says which).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ooc
from ooc.tracing import op_semantics as ops
from scheduler.plan import Evicted, Kept, Loaded, Machine, Residency
from scheduler.policies import POLICIES, Policy, on_demand
from scheduler.trace import Trace

NUMEL = 65536  # 256 KiB of float32: four chunks
BUDGET = "2MiB"

Step = Callable[[], contextlib.AbstractContextManager[None]]
Program = Callable[[Step], list[Any]]


pytestmark = pytest.mark.usefixtures("one_thread")


def compare(program: Program, *, budget: str = BUDGET, debug: bool = True, **options: Any) -> ooc.Session:
    """Run in core and in a session; the results must be equal. Returns the session, closed."""
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session(budget, debug=debug, **options) as session:
        found = program(session.step)
    assert found == expected
    return session


def modes(session: ooc.Session) -> list[str]:
    return [row.mode for row in session.steps.rows]


def layers(num: int = 10) -> list[torch.Tensor]:
    return [torch.randn(NUMEL) for _ in range(num)]


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(NUMEL)
    for tensor in tensors:
        result = result + tensor
    return result


def test_a_free_that_comes_later_than_in_the_trace() -> None:
    """Remedy: `PlannedAlloc.dead_start` and `ExecutableResidency.dead`, looked at before chunks are reused."""

    def program(step: Step) -> list[Any]:
        weights, out, kept = layers(), [], []
        for index in range(10):
            with step():
                halves = [w * 0.5 for w in weights]
                if index in (6, 8):
                    kept.append(halves[0])  # from here on it lives longer than planned
                value = halves.pop(0) * 3
                squares = [h * h for h in halves]
                del halves
                out.append((total(squares) + value).sum().item())
                del squares, value
        return [*out, *(k.sum().item() for k in kept)]

    session = compare(program)
    assert modes(session)[6] != "learning"
    assert modes(session)[-1] == "planned"


def test_a_storage_that_grows_before_what_it_follows_is_freed() -> None:
    """FSDP's gathered weights get their bytes between two ops, and Gloo's threads free a copy sooner or later."""

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        grown = torch.empty(0)
        for index in range(12):
            with step():
                squares = [w * w for w in weights]
                first = squares.pop(0)
                value = first.sum()
                late = first if index in (6, 8, 9) else None
                del first
                grown.untyped_storage().resize_(4 * NUMEL)
                grown.set_(grown.untyped_storage(), 0, (NUMEL,))  # type: ignore[call-overload]
                grown.copy_(weights[1])
                del late
                out.append((total(squares) + value + grown).sum().item())
                del squares
                grown.untyped_storage().resize_(0)
        return out

    assert modes(compare(program))[3:] == ["planned"] * 9


def test_a_cycle_is_freed_by_the_collector_only() -> None:
    """As above, with Python's cycle collector as the one who is late."""

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        gc.disable()
        try:
            for index in range(9):
                with step():
                    doubled = [w * 2 for w in weights]
                    if index == 6:
                        cycle: list[Any] = [doubled[0]]
                        cycle.append(cycle)
                        del cycle
                    out.append(total(doubled).sum().item())
                    del doubled
                    if index == 7:
                        gc.collect()
        finally:
            gc.enable()
        return out

    assert modes(compare(program))[-1] == "planned"


def test_sizes_that_depend_on_data() -> None:
    """Remedy: `serve_planned` takes the next entry that is large enough; larger ones leave the plan."""

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        for index in range(12):
            with step():
                bound = (0.0, 0.0, 0.0, 0.0, 0.0, 0.3, -0.3, 0.1, 2.0, 0.0, 0.0, 0.0)[index]
                picked = [torch.masked_select(w, w > bound) for w in weights]
                out.append(sum(p.sum().item() * p.numel() for p in picked))
                del picked
        return out

    session = compare(program)
    assert "planned" in modes(session)[5:8]
    assert modes(session)[-1] == "planned"


def test_sizes_near_the_threshold_do_not_shift_the_count() -> None:
    """Remedy: an operand below the threshold is harmless; entries are matched by size within an op."""

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        numbers = [16500, 16500, 16500, 16500, 16300, 16500, 16380, 16390]  # 64 KiB is 16,384
        for count in numbers:
            with step():
                parts = [w[:count].clone() for w in weights]
                out.append(sum((p * 2).sum().item() for p in parts))
        return out

    assert modes(compare(program))[-1] == "planned"


def test_storages_that_change_under_a_tensor() -> None:
    """resize_, set_, .data =, swap_tensors: a variable is a storage, not a tensor."""

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        for index in range(8):
            with step():
                grown = weights[0].clone()
                grown.resize_(2 * NUMEL)
                grown[NUMEL:] = 1
                other = torch.empty(0)
                other.set_(weights[1])
                weights[2].data = weights[2] * 1.5
                a, b = weights[3] + index, weights[4] - index
                torch.utils.swap_tensors(a, b)
                out.append((total(weights) + grown[:NUMEL] + other + a - b).sum().item() + grown[NUMEL:].sum().item())
                del grown, other, a, b
        return out

    compare(program)


def test_opaque_code_brings_its_operands_in() -> None:
    """Remedy: `ooc.opaque`. Without it the kernel below touches what is away, and debug mode faults."""

    @ooc.opaque
    def add_one_behind_the_back(tensor: torch.Tensor) -> None:
        ctypes.c_float.from_address(tensor.data_ptr()).value += 1.0

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        for _ in range(7):
            with step():
                for weight in weights:
                    add_one_behind_the_back(weight)
                doubled = [w * 2 for w in weights]
                out.append(total(doubled).sum().item())
                del doubled
        return out

    assert modes(compare(program))[-1] == "planned"


def test_debug_mode_finds_writes_that_nobody_declared() -> None:
    """Remedy: `ResidencyManager.check_clean`, a checksum at every drop that relies on the store's copy."""
    with ooc.Session(BUDGET, debug=True) as session:
        weights = layers()
        total(weights)
        weights[0].sum()  # evicted before, so this brings it in: the store has a copy
        record = session.engine.manager.records[session.engine.runner.dispatcher.address(weights[0])]
        assert record.stored
        assert record.runs
        # By way of the linear view: neither an op nor an export.
        address = session.engine.manager.segments(record.runs, record.nbytes)[0][0]
        ctypes.c_float.from_address(address).value += 1.0
        with pytest.raises(ooc.HiddenWrite, match="behind the dispatcher"):
            total(3 * weights[1:])  # it is not wanted again, and so goes first


def test_mutations_that_the_schema_hides() -> None:
    """Remedy: `ops._HIDDEN_WRITES`: batch norm's running statistics."""

    def program(step: Step) -> list[Any]:
        channels = 32768
        norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(4))
        x, out = torch.randn(4, channels), []
        for _ in range(8):
            with step():
                y = x
                for norm in norms:
                    y = norm(y)
                y.sum().backward()
                out.append(sum(norm.running_mean.double().sum().item() for norm in norms))
                for parameter in norms.parameters():
                    parameter.grad = None
                del y
        return out

    assert modes(compare(program, budget="3MiB"))[-1] == "planned"


def test_the_table_of_hidden_mutations_is_complete_for_aten() -> None:
    """Every ATen op with running statistics is known to write them, by schema or by our table."""
    missing = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            arguments = {a.name for a in func._schema.arguments}
            if not {"running_mean", "running_var"} <= arguments or "backward" in name or "no_stats" in name:
                continue
            if "functional" in name or "elemt" in name or name in _READS_STATISTICS_ONLY:
                continue
            written = ops.written_arguments(func) or ()
            if not {"running_mean", "running_var"} <= {n for _, n in written}:
                missing.append(str(func))
    assert not missing


def test_ops_that_keep_random_state_in_an_operand_are_known_to_write_it() -> None:
    """cuDNN's recurrent networks with dropout: a state that was evicted as clean would draw the same numbers again."""
    names = ("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward")
    keeping = [getattr(torch.ops.aten, name).default for name in names]
    for func in keeping:
        written = {name for _, name in ops.written_arguments(func) or ()}
        assert {a.name for a in func._schema.arguments} & {"dropout_state", "reserve"} <= written, func


_READS_STATISTICS_ONLY = {
    # Composite: decomposed before the dispatch mode sees it.
    "batch_norm",
    "instance_norm",
    "_batch_norm_impl_index",
    # Inference, or not training by name.
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "quantized_batch_norm",
}


def test_allocations_between_ops_and_by_other_threads() -> None:
    """Remedy: the table serves the thread that executes op i, inside op i; others get unshared chunks."""
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            tensor = torch.full((NUMEL,), 7.0)
            assert float(tensor[0]) == 7.0
            assert float(tensor.sum()) == 7.0 * NUMEL
            del tensor

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        for _ in range(12):
            with step():
                bare = torch.UntypedStorage(4 * NUMEL)
                doubled = [w * 2 for w in weights]
                out.append(total(doubled).sum().item())
                del doubled, bare
        return out

    thread = threading.Thread(target=allocate)
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session("4MiB") as session:
        thread.start()
        try:
            assert program(session.step) == expected
        finally:
            stop.set()
            thread.join()


def test_compiled_code_does_not_become_eager_unannounced() -> None:
    """Remedy: `Exports.announce_uncompiled`."""
    with ooc.Session(BUDGET), pytest.warns(RuntimeWarning, match="torch.compile does nothing"):
        torch.compile(lambda x: x + 1, backend="eager")


def test_list_ops_run_as_parts_that_fit() -> None:
    """Remedy: `ops.run_list_op`: a list op over the whole model does not set the smallest budget."""

    def program(step: Step) -> list[Any]:
        weights = layers(24)  # 6 MiB; three lists of them 18 MiB
        grads = [w * 0.1 for w in weights]
        moments = [torch.zeros_like(w) for w in weights]
        out = []
        for _ in range(7):
            with step():
                torch._foreach_mul_(moments, 0.9)
                torch._foreach_add_(moments, grads)
                torch._foreach_addcdiv_(
                    weights, grads, [m.abs() + 1 for m in moments[:24]], [0.01 * i for i in range(24)]
                )
                norms = torch._foreach_norm(weights)
                out.append(torch.stack(norms).sum().item())
        return out

    assert modes(compare(program, budget="12MiB"))[-1] == "planned"


def test_an_evaluation_pass_between_steps() -> None:
    """A sequence with an evaluation in it is another sequence; training goes back to its plan."""

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        for index in range(12):
            with step():
                doubled = [w * 2 for w in weights]
                out.append(total(doubled).sum().item())
                for w in weights:
                    w.mul_(0.99)
                del doubled
            if index in (5, 8):
                with torch.no_grad():
                    out.append(max(w.abs().max().item() for w in weights))
        return out

    session = compare(program)
    assert modes(session)[7] == "planned"
    assert modes(session)[-1] == "planned"


def test_an_op_that_raises_half_way_counts_as_a_write() -> None:
    """Remedy: `Executor.fail` and the same on demand: a drop must not bring older bytes back."""

    class Half(RuntimeError):
        pass

    @ooc.opaque
    def write_then_fail(tensor: torch.Tensor, fail: bool) -> None:
        tensor.add_(1)
        if fail:
            raise Half

    def program(step: Step) -> list[Any]:
        weights, out = layers(), []
        for index in range(10):
            with step(), contextlib.suppress(Half):
                out.append(total([w * 2 for w in weights]).sum().item())
                write_then_fail(weights[0], index in (1, 6, 7))
                out.append(total([w * 2 for w in weights]).sum().item())
        return out

    compare(program)


def test_parameters_and_optimizer_state_that_are_replaced() -> None:
    """Remedy: `Sequences.learn` gives up a plan whose variables will not come back."""

    def program(step: Step) -> list[Any]:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        optimizer = torch.optim.AdamW(model.parameters())
        x, out = torch.randn(64, 256), []
        for index in range(14):
            if index == 6:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
                optimizer = torch.optim.AdamW(model.parameters())
            with step():
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                out.append(loss.item())
        return out

    session = compare(program, budget="3MiB")
    assert modes(session)[5] == "planned"
    assert modes(session)[-1] == "planned"


def _schedule_over_the_boundary(trace: Trace, machine: Machine) -> tuple[Residency, ...]:
    """Like `on_demand`, but all leaves before the last op, and what the first ops need is loaded under it."""
    stays: dict[int, list[Residency]] = {}
    for residency in on_demand.schedule(trace, machine, wrap=False):
        stays.setdefault(residency.variable, []).append(residency)
    last_op = len(trace.ops) - 1
    busy = {use.variable for use in trace.ops[last_op].uses}
    room = machine.num_chunks - sum(machine.chunks_of(trace.variables[v].nbytes) for v in busy)
    for index, mine in stays.items():
        start, stop = mine[0].start, mine[-1].stop
        if not isinstance(stop, Evicted) or index in busy:
            continue
        mine[-1] = replace(mine[-1], stop=Evicted(stop.write_op, min(stop.release_op, last_op)))
        num_chunks = machine.chunks_of(trace.variables[index].nbytes)
        if isinstance(start, Loaded) and start.before_op <= 3 and num_chunks <= room:
            room -= num_chunks
            mine[0] = replace(mine[0], start=Kept())
            mine.append(Residency(variable=index, start=Loaded(before_op=last_op), stop=Kept()))
    return tuple(residency for mine in stays.values() for residency in mine)


@pytest.mark.parametrize("debug", [False, True])
def test_a_load_under_way_when_the_step_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    """Remedy: `ExecutablePlan._loaded_for_next_step`: its first op in the next step awaits it."""
    monkeypatch.setitem(POLICIES, "boundary", Policy(name="boundary", schedule=_schedule_over_the_boundary))
    sessions: list[ooc.Session] = []

    def program(step: Step) -> list[Any]:
        weights = [torch.randn(256, 256) / 16 for _ in range(7)]
        results = []
        for index in range(8):
            if sessions and index == 4:
                sessions[0].engine.memory.store.engine.inject_faults(delay_ns=20_000_000)
            with step():
                x = torch.full((32, 256), 1.0 + index)
                for weight in weights:
                    x = (x @ weight).tanh()
                for weight in weights:
                    weight.mul_(1 + 1e-3 * index)
                results.append(x.sum().item())
        return [*results, *(w.sum().item() for w in weights)]

    torch.manual_seed(0)
    expected = program(contextlib.nullcontext)
    torch.manual_seed(0)
    with ooc.Session("1MiB", policy="boundary", plan_cache=False, debug=debug) as session:
        sessions.append(session)
        found = program(session.step)
    assert found == expected
    plan = session.plan()
    assert plan is not None
    assert any(isinstance(r.start, Loaded) and isinstance(r.stop, Kept) for r in plan.residencies)
    assert modes(session)[-3:] == ["planned"] * 3
