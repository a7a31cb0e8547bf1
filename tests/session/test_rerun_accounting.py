"""What a session says of its memory while variables are discarded: never more than there is, and true of each one."""

from __future__ import annotations

from torch import Tensor

from tests.session.recomputed import CASES, Training, compare, saved_tensors


def _held_chunks(training: Training) -> list[int]:
    """The chunks of all live records, one by one."""
    assert training.session is not None
    records = training.session.engine.live_records()
    return [chunk for r in records if r.state.holds_chunks for first, n in r.runs for chunk in range(first, first + n)]


def test_statistics_and_explain_while_variables_are_discarded() -> None:
    """Resident, away and discarded bytes add up to what is alive, and no two variables share a chunk."""
    discarded: list[int] = []
    texts: list[str] = []

    def look(training: Training, _: int, output: Tensor) -> None:
        if training.session is None:
            return
        session = training.session
        stats = session.memory_stats()
        held = _held_chunks(training)
        assert len(set(held)) == len(held)
        assert stats["resident_bytes.all.current"] == len(held) * session.chunk_nbytes <= session.budget_nbytes
        resident = stats["resident_bytes.all.current"] - stats["inactive_bytes.all.current"]
        others = stats["away_bytes.all.current"] + stats["discarded_bytes.all.current"]
        assert resident + others == stats["allocated_bytes.all.current"]
        discarded.append(stats["discarded_bytes.all.current"])
        told = [session.explain(tensor) for tensor in saved_tensors(output)]
        told_discarded = {e.name or str(i): e.nbytes for i, e in enumerate(told) if e.state.startswith("discarded")}
        assert bool(told_discarded) == bool(discarded[-1])
        texts.extend(map(str, told))

    compare(CASES["convolutions"], hook=look, num_steps=4)
    assert max(discarded) > 0
    assert any("recomputed before op" in text and "are run again instead" in text for text in texts)
