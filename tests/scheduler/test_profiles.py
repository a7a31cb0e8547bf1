"""Device profiles: what comes with the package, what a file must have, times and energy worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.profiles import (
    Energy,
    Profile,
    ProfileError,
    energy_j,
    load_profile,
    op_costs,
    profile_from_json,
    profile_names,
    retimed,
)
from scheduler.trace import Op, Trace, Use, Variable
from tests.scheduler.model_traces import conv_net

BOARDS = ("mkr1000", "nrf52840", "rpi4", "jetson_tx2")


def one_op(flops: int = 4_000, nbytes: int = 1_000) -> Trace:
    return Trace(
        ops=(
            Op(
                name="op",
                start_tick=0,
                stop_tick=2,
                duration_ns=7,
                uses=(Use(variable=0, reads=False, writes=True),),
            ),
        ),
        variables=(Variable(nbytes=100, birth_tick=1, death_tick=2),),
        num_ticks=3,
        cyclic=False,
        metadata={"costs": {"flops": [flops], "nbytes": [nbytes]}},
    )


def profile(**changes: Any) -> Profile:
    base = Profile(
        name="toy",
        description="",
        source="",
        memory_nbytes=1000,
        flops_per_s=1e9,
        memory_bytes_per_s=1e9,
        op_overhead_ns=10,
        load_bytes_per_s=1e6,
        evict_bytes_per_s=2e6,
        shared_bytes_per_s=None,
        load_latency_ns=5,
        evict_latency_ns=9,
        energy=Energy(flops_per_j=1000.0, compute_w=2.0, idle_w=0.5, load_w=3.0, evict_w=4.0),
    )
    return replace(base, **changes)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_says_where_it_is_from_and_survives_json(name: str) -> None:
    found = load_profile(name)
    assert found.name == name
    assert len(found.source) > 40
    assert profile_from_json(found.to_json()) == found


def test_the_boards_of_poet_and_three_generations_of_pcie_are_there_and_boards_have_energy() -> None:
    assert {*BOARDS, "pcie3", "pcie4", "pcie5"} <= set(profile_names())
    assert all(load_profile(name).energy is not None for name in BOARDS)


def test_poets_cost_of_a_convolution_on_the_a72() -> None:
    """Its instance: 901,120 flop take 0.45056 ms and 22.46 mJ; paging in 65,536 bytes takes 0.2168 mJ."""
    board = load_profile("rpi4")
    assert board.flops_per_s is not None
    assert 901_120 / board.flops_per_s == pytest.approx(0.00045056)
    energy = board.require_energy()
    assert energy.flops_per_j is not None
    assert 901_120 / energy.flops_per_j == pytest.approx(0.022462974)
    paging_j = energy.load_w * (board.load_latency_ns / 1e9 + 65_536 / board.load_bytes_per_s)
    assert paging_j == pytest.approx(0.000216817, rel=1e-4)


def test_op_times_are_the_slower_of_arithmetic_and_memory_and_the_overhead() -> None:
    assert profile().op_ns(4_000, 1_000) == 4_010
    assert profile().op_ns(1_000, 4_000) == 4_010
    assert profile().op_ns(0, 0) == 10
    with pytest.raises(ProfileError, match="no 'flops_per_s'"):
        profile(flops_per_s=None).op_ns(1, 0)


def test_retimed_gives_another_devices_times_and_refuses_a_trace_without_work() -> None:
    trace = retimed(one_op(), profile())
    assert [op.duration_ns for op in trace.ops] == [4_010]
    assert trace.fingerprint() == one_op().fingerprint()
    with pytest.raises(ProfileError, match="does not say how much its ops compute"):
        retimed(conv_net(num_blocks=1), profile())
    assert op_costs(replace(one_op(), metadata={"costs": {"flops": [1, 2], "nbytes": [1]}})) is None


def test_energy_by_hand() -> None:
    """4,000 flop at 1,000 a joule; 2 s of waiting; 1 MB in at 1 MB/s; 4 MB out at 2 MB/s."""
    trace = retimed(one_op(), profile())
    predicted = {
        "duration_ns": trace.duration_ns + 2_000_000_000,
        "stall_ns": 2_000_000_000,
        "loaded_nbytes": 1_000_000,
        "evicted_nbytes": 4_000_000,
    }
    assert energy_j(trace, predicted, profile()) == pytest.approx(4 + 2 * 0.5 + 1 * 3 + 2 * 4)
    recomputed = {**predicted, "duration_ns": predicted["duration_ns"] + trace.duration_ns}
    assert energy_j(trace, recomputed, profile()) == pytest.approx(2 * 4 + 2 * 0.5 + 1 * 3 + 2 * 4)
    by_time = profile(energy=replace(profile().require_energy(), flops_per_j=None))
    assert energy_j(trace, predicted, by_time) == pytest.approx(2 * 4.010e-6 + 1 + 3 + 8)


def test_energy_without_figures_names_profiles_that_have_them() -> None:
    with pytest.raises(ProfileError, match=r"'toy' has no energy figures.*rpi4"):
        energy_j(one_op(), {}, profile(energy=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_bytes_per_s": -1}, "'load_bytes_per_s' is -1; it must be a number of at least 1"),
        ({"memory_nbytes": "8GiB"}, "'memory_nbytes' is '8GiB'"),
        ({"op_overhead_ns": True}, "'op_overhead_ns' is True"),
        ({"flops_per_s": 0}, "'flops_per_s' is 0"),
        ({"energy": 3}, "'energy' is 3; it must be an object or null"),
        ({"energy": {"compute_w": 1}}, "lacks 'energy.evict_w', lacks 'energy.flops_per_j'"),
        ({"speed": 3}, "has an unknown 'speed'"),
        ({"schema": "ooc.plan"}, "not an ooc profile"),
        ({"schema_version": 9}, "schema version 9; this version of ooc reads 1"),
    ],
)
def test_files_that_are_not_profiles_are_refused_with_what_is_wrong(change: dict[str, Any], message: str) -> None:
    document = {**json.loads(profile().to_json()), **change}
    with pytest.raises(ProfileError, match=message):
        profile_from_json(json.dumps(document))


def test_nan_is_no_rate() -> None:
    with pytest.raises(ProfileError, match="'memory_bytes_per_s' is nan"):
        profile(memory_bytes_per_s=float("nan"))


def test_a_missing_field_not_json_no_file_and_no_such_name(tmp_path: Path) -> None:
    document = json.loads(profile().to_json())
    del document["source"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"mine\.json: not a complete profile: it lacks 'source'"):
        load_profile(str(path))
    path.write_text("{")
    with pytest.raises(ProfileError, match="not JSON"):
        load_profile(str(path))
    with pytest.raises(ProfileError, match="cannot read the profile"):
        load_profile(str(tmp_path / "none.json"))
    with pytest.raises(ProfileError, match=r"there is no profile 'rpi5'\. Options: desktop, jetson_tx2"):
        load_profile("rpi5")


def test_the_machine_of_a_profile_counts_the_larger_latency() -> None:
    machine = profile().machine(chunk_nbytes=64, num_chunks=3)
    assert (machine.latency_ns, machine.budget_nbytes, machine.load_bytes_per_s) == (9, 192, 1e6)
