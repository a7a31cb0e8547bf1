"""`lms`, `vdnn` and `nntrainer` by hand: what goes away, when it comes back, and what they say when they do not fit."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.budget import BudgetTooSmall
from scheduler.layers import Procedure
from scheduler.plan import Evicted, Loaded, Machine, Plan
from scheduler.planning import make_plan
from scheduler.policies import nntrainer
from scheduler.policies._fixed_gaps import first_backward_op
from scheduler.trace import Op, Trace, Use, Variable
from tests.scheduler.model_traces import conv_net

MIB = 1 << 20
STEPS = Path(__file__).parent.parent / "data" / "steps"


def machine(num_chunks: int) -> Machine:
    return Machine(chunk_nbytes=MIB, num_chunks=num_chunks, latency_ns=0)


def chain(num_layers: int = 3) -> Trace:
    """Forward ops f0..f(n-1), each making one activation of 1 MiB that backward op b(i) reads; alone, not cyclic."""
    ops: list[Op] = []
    uses: list[list[Use]] = [[Use(variable=i, reads=False, writes=True)] for i in range(num_layers)]
    uses += [[Use(variable=i, reads=True, writes=False)] for i in reversed(range(num_layers))]
    births, deaths, tick = {}, {}, 0
    for index, own in enumerate(uses):
        start = tick
        if index < num_layers:
            births[index] = start + 1
            tick += 3
            name = "aten.convolution" if index % 2 == 0 else "aten.relu"
        else:
            tick += 2
            name = "aten.some_backward"
        ops.append(Op(name=name, start_tick=start, stop_tick=tick, duration_ns=1_000_000, uses=tuple(own)))
        if index >= num_layers:
            deaths[own[0].variable] = tick
            tick += 1
    variables = tuple(
        Variable(nbytes=MIB, birth_tick=births[i], death_tick=deaths[i], label=f"activation {i}")
        for i in range(num_layers)
    )
    return Trace(ops=tuple(ops), variables=variables, num_ticks=tick + 1, cyclic=False)


def loads(plan: Plan) -> dict[int, int]:
    """Variable to the op before which it is loaded."""
    return {r.variable: r.start.before_op for r in plan.residencies if isinstance(r.start, Loaded)}


def evictions(plan: Plan) -> dict[int, int]:
    """Variable to the op after which it is written."""
    return {r.variable: r.stop.write_op for r in plan.residencies if isinstance(r.stop, Evicted)}


def test_lms_swaps_what_is_far_and_loads_it_so_many_ops_ahead() -> None:
    """Distances from last use to next: 7 for activation 0, 5, 3, 1."""
    plan = make_plan(chain(4), machine(10), "lms", swapout_threshold=4, swapin_ahead=2)
    assert evictions(plan) == {0: 0, 1: 1}
    assert loads(plan) == {0: 5, 1: 4}  # used by ops 7 and 6


def test_lms_takes_the_largest_threshold_that_fits() -> None:
    everything = make_plan(chain(6), machine(6), "lms")
    assert evictions(everything) == {}
    tight = make_plan(chain(6), machine(4), "lms")
    assert len(evictions(tight)) >= 2
    assert tight.predicted["peak_nbytes"] <= 4 * MIB


def test_lms_says_what_budget_it_needs_where_no_pair_fits() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        make_plan(chain(6), machine(0), "lms")
    needed = caught.value.smallest_budget_nbytes
    make_plan(chain(6), machine(needed // MIB), "lms")
    assert needed == MIB


def test_vdnn_prefetches_one_layer_ahead() -> None:
    """Offloaded are 0, 1, 2, 3; ops 4 to 7 need 3, 2, 1, 0. Activation 3 is used by the next op and has no gap."""
    plan = make_plan(chain(4), machine(10), "vdnn", offload="all")
    assert evictions(plan) == {0: 0, 1: 1, 2: 2}
    assert loads(plan) == {0: 6, 1: 5, 2: 4}


def test_vdnn_conv_offloads_what_convolutions_read_only() -> None:
    trace = conv_net(num_blocks=3)
    offloaded = {form: evictions(make_plan(trace, machine(5000), "vdnn", offload=form)) for form in ("conv", "all")}
    assert offloaded["conv"].keys() < offloaded["all"].keys()
    read = {u.variable for op in trace.ops if op.name == "conv" for u in op.uses if u.reads}
    assert offloaded["conv"].keys() <= read


def test_vdnn_infeasible_names_the_op_and_what_would_do() -> None:
    trace = conv_net(num_blocks=6)
    with pytest.raises(BudgetTooSmall, match="Options: budget >= ") as caught:
        make_plan(trace, machine(64), "vdnn")
    needed = caught.value.smallest_budget_nbytes
    make_plan(trace, machine(-(-needed // MIB)), "vdnn")


@pytest.mark.parametrize(("policy", "bad"), [("vdnn", {"offload": "most"}), ("nntrainer", {"mode": "reactive"})])
def test_bad_parameters_are_refused_with_the_options(policy: str, bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="Options: "):
        make_plan(chain(), machine(10), policy, **bad)


def test_the_backward_pass_begins_where_ops_are_named_so() -> None:
    assert first_backward_op(chain(4)) == 4
    unnamed = chain(4)
    unnamed = replace(unnamed, ops=tuple(replace(op, name="op") for op in unnamed.ops))
    assert first_backward_op(unnamed) == 3  # there the most is alive


def test_nntrainers_procedures_of_a_recorded_step() -> None:
    """Each trainable layer has a forward, and gradients that are applied after they were computed."""
    trace = Trace.from_json(gzip.decompress((STEPS / "vgg16.json.gz").read_bytes()).decode())
    orders = nntrainer.orders_of(trace)
    assert [o.first_op for o in orders[1:]] == [o.stop_op for o in orders[:-1]]
    assert (orders[0].first_op, orders[-1].stop_op) == (0, len(trace.ops))
    kinds = [o.procedure for o in orders]
    assert set(kinds) == {Procedure.FORWARD, Procedure.GRADIENT, Procedure.DERIVATIVE, Procedure.APPLY}
    assert kinds.index(Procedure.GRADIENT) > max(i for i, k in enumerate(kinds) if k is Procedure.FORWARD)


def test_nntrainers_modes_order_memory_and_time_as_in_figures_12_and_13() -> None:
    """Peak: on demand <= reduced <= proactive; time: proactive <= reduced <= on demand."""
    trace = Trace.from_json(gzip.decompress((STEPS / "vgg16.json.gz").read_bytes()).decode())
    device = Machine(chunk_nbytes=4096, num_chunks=1 << 16, latency_ns=0)
    plans = {
        mode: make_plan(trace, device, "nntrainer", mode=mode, lookahead=2)
        for mode in ("on_demand", "reduced", "proactive")
    }
    peaks = [plans[mode].predicted["peak_nbytes"] for mode in ("on_demand", "reduced", "proactive")]
    times = [plans[mode].predicted["duration_ns"] for mode in ("proactive", "reduced", "on_demand")]
    moved = [plans[mode].predicted["loaded_nbytes"] for mode in ("reduced", "on_demand")]
    assert peaks == sorted(peaks)
    assert times == sorted(times)
    assert peaks[0] < peaks[-1] < trace.peak_nbytes() * 1.01
    assert moved[0] <= moved[1]  # "exactly the same performance": caption of figure 12


def test_a_lookahead_per_order_is_not_slower_than_none_and_fits() -> None:
    trace = conv_net(num_blocks=6)
    device = Machine(chunk_nbytes=MIB, num_chunks=200, load_bytes_per_s=3e9, evict_bytes_per_s=3e9)
    reduced = make_plan(trace, device, "nntrainer", mode="reduced")
    chosen = make_plan(trace, device, "nntrainer", mode="proactive", lookahead=nntrainer.PER_ORDER)
    assert chosen.predicted["peak_nbytes"] <= device.budget_nbytes
    assert chosen.predicted["duration_ns"] < reduced.predicted["duration_ns"]
