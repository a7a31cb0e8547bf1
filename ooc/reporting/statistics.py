"""Statistics of a session at this moment: in the form of `torch.cuda.memory_stats()`, and as scalars for plots."""

from __future__ import annotations

from collections import Counter

from ooc.engine import Engine
from ooc.memory.record import State


def session_stats(engine: Engine) -> dict[str, int]:
    """The statistics of `ooc.memory_stats`, for this session."""
    chunk_nbytes = engine.options.chunk_nbytes
    alive = resident = away = discarded = chunks = num_alive = num_resident = 0
    for record in engine.live_records():
        num_alive += 1
        alive += record.nbytes
        if record.state.holds_chunks:
            num_resident += 1
            resident += record.nbytes
            chunks += -(-record.nbytes // chunk_nbytes)
        elif record.state is State.AWAY:
            away += record.nbytes
        else:
            discarded += record.nbytes
    counters = engine.steps.counters()
    modes = Counter(row.mode for row in engine.steps.rows)
    return {
        "allocated_bytes.all.current": alive,
        "allocated_bytes.all.peak": engine.steps.in_core_peak_nbytes,
        "resident_bytes.all.current": chunks * chunk_nbytes,
        "resident_bytes.all.peak": engine.steps.peak_chunks * chunk_nbytes,
        "away_bytes.all.current": away,
        "discarded_bytes.all.current": discarded,
        "inactive_bytes.all.current": chunks * chunk_nbytes - resident,
        "reserved_bytes.all.current": engine.budget_nbytes,
        "reserved_bytes.all.peak": engine.budget_nbytes,
        "active.all.current": num_alive,
        "resident.all.current": num_resident,
        "loaded_bytes.all.total": counters["loaded_nbytes"],
        "evicted_bytes.all.total": counters["evicted_nbytes"],
        "dropped_bytes.all.total": counters["dropped_nbytes"],
        "recomputed_bytes.all.total": counters["recomputed_nbytes"],
        "relocated_bytes.all.total": counters["relocated_nbytes"],
        "recompute_ns.all.total": counters["recompute_ns"],
        "stall_ns.all.total": counters["stall_ns"],
        "num_faults": counters["num_faults"],
        "num_remapped_chunks": counters["num_remapped_chunks"],
        **{f"num_steps.{mode}": modes[mode] for mode in ("learning", "planned", "off_plan")},
    }


def step_metrics(engine: Engine) -> dict[str, float]:
    """The last step as scalars under the keys that a plot shows, such as `ooc/step_duration_s`."""
    if not engine.steps.rows:
        return {}
    row = engine.steps.rows[-1]
    stats = session_stats(engine)
    return {
        "ooc/step_duration_s": row.duration_s,
        "ooc/step_stall_s": row.stall_s,
        "ooc/step_stall_fraction": row.stall_s / row.duration_s if row.duration_s else 0.0,
        "ooc/step_loaded_bytes": row.loaded_nbytes,
        "ooc/step_evicted_bytes": row.evicted_nbytes,
        "ooc/step_dropped_bytes": row.dropped_nbytes,
        "ooc/step_remapped_chunks": row.num_remapped_chunks,
        "ooc/step_faults": row.num_faults,
        "ooc/step_recomputed_bytes": row.recomputed_nbytes,
        "ooc/step_recompute_s": row.recompute_s,
        "ooc/step_relocated_bytes": row.relocated_nbytes,
        "ooc/step_is_planned": float(row.mode == "planned"),
        "ooc/allocated_bytes": stats["allocated_bytes.all.current"],
        "ooc/resident_bytes": stats["resident_bytes.all.current"],
        "ooc/reserved_bytes": stats["reserved_bytes.all.current"],
    }
