"""Steps in micro-batches: what the repeated trace holds, which size is chosen, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from scheduler.micro_batch import CrossSampleLayers, choose_micro_batch, in_micro_batches, optimizer_op
from scheduler.plan import Machine, PlanError
from scheduler.planning import make_plan
from scheduler.trace import Op, Trace, Use, Variable
from tests.scheduler.model_traces import transformer

_ADD = 3e9
_MIB = 1 << 20


def step_of(size: int, *, overhead_ns: int = 0, name: str = "forward") -> Trace:
    """Two layers on `size` samples, 1 ms a sample and op: parameters, activations, gradients, and an optimizer."""

    def op(name: str, start: int, stop: int, *uses: tuple[int, str], duration_ns: int | None = None) -> Op:
        own = tuple(Use(variable=v, reads="r" in how, writes="w" in how) for v, how in uses)
        duration_ns = size * 1_000_000 + overhead_ns if duration_ns is None else duration_ns
        return Op(name=name, start_tick=start, stop_tick=stop, duration_ns=duration_ns, uses=own, replayable=True)

    nbytes = size * _MIB
    return Trace(
        ops=(
            op("load batch", 0, 2, (2, "w")),
            op(name, 2, 4, (0, "r"), (2, "r"), (3, "w")),
            op("forward", 4, 6, (1, "r"), (3, "r"), (4, "w")),
            op("backward", 6, 8, (3, "r"), (4, "r"), (5, "w")),
            op("backward", 9, 11, (2, "r"), (3, "r"), (6, "w")),
            op("norm", 13, 14, (5, "r"), (6, "r"), duration_ns=1_000),
            op("update", 14, 15, (0, "rw"), (5, "r"), duration_ns=1_000),
            op("update", 15, 16, (1, "rw"), (6, "r"), duration_ns=1_000),
        ),
        variables=(
            Variable(nbytes=_MIB, birth_tick=None, death_tick=None, becomes=0, kind="parameter"),
            Variable(nbytes=_MIB, birth_tick=None, death_tick=None, becomes=1, kind="parameter"),
            Variable(nbytes=nbytes, birth_tick=1, death_tick=11),
            Variable(nbytes=nbytes, birth_tick=3, death_tick=12),
            Variable(nbytes=nbytes, birth_tick=5, death_tick=8),
            Variable(nbytes=_MIB, birth_tick=7, death_tick=16),
            Variable(nbytes=_MIB, birth_tick=10, death_tick=17),
        ),
        num_ticks=18,
    )


def machine_of(num_chunks: int, *, rate: float = 1e8) -> Machine:
    return Machine(
        chunk_nbytes=_MIB, num_chunks=num_chunks, load_bytes_per_s=rate, evict_bytes_per_s=rate, latency_ns=0
    )


def test_the_optimizer_begins_where_only_gradients_are_read() -> None:
    assert optimizer_op(step_of(4)) == 5
    trace = step_of(4)
    with pytest.raises(ValueError, match="no op of the step changes a parameter"):
        optimizer_op(replace(trace, variables=tuple(replace(v, kind="other") for v in trace.variables)))


def test_passes_run_once_for_each_part_and_the_optimizer_once() -> None:
    trace = step_of(4)
    whole = in_micro_batches(trace, 3, add_bytes_per_s=_ADD)
    names = Counter(op.name for op in whole.ops)
    assert names == {"load batch": 3, "forward": 6, "backward": 6, "norm": 1, "update": 2, "add up gradients": 4}
    added_ns = 4 * round(3 * _MIB / _ADD * 1e9)
    assert whole.duration_ns == 3 * sum(op.duration_ns for op in trace.ops[:5]) + 3_000 + added_ns
    for op in whole.ops:
        if op.name == "add up gradients":
            summed, part = op.uses
            assert (summed.variable in (5, 6), summed.reads, summed.writes) == (True, True, True)
            assert whole.variables[part.variable].death_tick == op.stop_tick
    # The largest moment of a part, and both sums: what one more batch would need, but for the gradients.
    assert whole.peak_nbytes() == trace.peak_nbytes() + 2 * _MIB
    assert in_micro_batches(trace, 1, add_bytes_per_s=_ADD) is trace


def test_old_gradients_go_before_the_first_part_and_batches_with_the_last() -> None:
    """Gradients that the passes free without a use, and a variable from before that they use and free."""
    trace = step_of(2)
    old = Variable(nbytes=_MIB, birth_tick=None, death_tick=1)
    before = Variable(nbytes=_MIB, birth_tick=None, death_tick=5)
    shifted = replace(
        trace,
        cyclic=False,
        ops=tuple(
            replace(
                op,
                start_tick=op.start_tick + 2,
                stop_tick=op.stop_tick + 2,
                uses=(*op.uses, Use(variable=8, reads=True, writes=False)) if i == 0 else op.uses,
            )
            for i, op in enumerate(trace.ops)
        ),
        variables=(
            *(
                replace(
                    v,
                    becomes=None,
                    birth_tick=None if v.birth_tick is None else v.birth_tick + 2,
                    death_tick=None if v.death_tick is None else v.death_tick + 2,
                )
                for v in trace.variables
            ),
            old,
            before,
        ),
        num_ticks=trace.num_ticks + 2,
    )
    whole = in_micro_batches(shifted, 2, add_bytes_per_s=_ADD)
    starts = [op.start_tick for op in whole.ops if op.name == "load batch"]
    assert whole.variables[7].death_tick is not None
    assert whole.variables[7].death_tick < starts[0]
    assert whole.variables[8].death_tick is not None
    assert whole.variables[8].death_tick > starts[1]


@pytest.mark.parametrize("policy", ["melon", "auto", "on_demand"])
def test_repeated_steps_are_planned_like_any_other(policy: str) -> None:
    whole = in_micro_batches(transformer(layers=2), 2, add_bytes_per_s=_ADD)
    in_core = -(-whole.peak_nbytes() // _MIB) + 40
    plan = make_plan(whole, machine_of(in_core, rate=5e9), policy)  # verifies
    assert plan.predicted["duration_ns"] >= whole.duration_ns


def test_memory_decides_on_the_size() -> None:
    """Parts cost 2 ms an op more than their samples do, so the whole batch is best where it fits."""
    traces = {size: step_of(size, overhead_ns=2_000_000) for size in (2, 4, 8)}
    ample, tried = choose_micro_batch(traces, machine_of(64), batch_size=8, add_bytes_per_s=_ADD)
    assert (ample.size, ample.count) == (8, 1)
    assert [own.size for own in tried] == [8, 4, 2]
    assert all(own.plan is not None for own in tried)
    tight, tried = choose_micro_batch(traces, machine_of(16), batch_size=8, add_bytes_per_s=_ADD)
    assert tight.size == 4
    assert tight.plan is not None
    assert tried[0].plan is None
    assert "needs" in tried[0].reason
    least, _ = choose_micro_batch(traces, machine_of(11), batch_size=8, add_bytes_per_s=_ADD)
    assert least.size == 2
    with pytest.raises(PlanError, match="no micro-batch fits, not even 2 of 8 samples: op "):
        choose_micro_batch(traces, machine_of(5), batch_size=8, add_bytes_per_s=_ADD)


def test_what_works_across_samples_is_refused() -> None:
    traces = {8: step_of(8), 4: step_of(4, name="aten.native_batch_norm.default")}
    with pytest.raises(CrossSampleLayers, match=r"op 1 \(aten.native_batch_norm.default\) computes over") as caught:
        choose_micro_batch(traces, machine_of(64), batch_size=8, add_bytes_per_s=_ADD)
    assert caught.value.op_index == 1
    evaluated = {4: step_of(4, name="aten._native_batch_norm_legit_no_training.default")}
    choose_micro_batch(evaluated, machine_of(64), batch_size=8, add_bytes_per_s=_ADD)


def test_sizes_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="a batch of 8 does not come in micro-batches of 3"):
        choose_micro_batch({3: step_of(3)}, machine_of(64), batch_size=8, add_bytes_per_s=_ADD)
    with pytest.raises(ValueError, match="no recorded steps"):
        choose_micro_batch({}, machine_of(64), batch_size=8, add_bytes_per_s=_ADD)
    with pytest.raises(ValueError, match="both must be positive"):
        in_micro_batches(step_of(1), 2, add_bytes_per_s=0)
