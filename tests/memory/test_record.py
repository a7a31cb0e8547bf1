"""A variable's record: every transition from every state, a small model of it, and that nobody goes around them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ooc
from ooc.errors import InconsistentRecord
from ooc.memory.record import State, VariableRecord
from vmm.addresses import Reservation

PACKAGE = Path(ooc.__file__ or "").parent
RUNS = ((3, 2), (8, 1))
OTHER_RUNS = ((0, 3),)
WRITE: Any = object()
READ: Any = object()
RESIDENT, LOADING, AWAY, DISCARDED = State.RESIDENT, State.LOADING, State.AWAY, State.DISCARDED

# Name, call, and for each state that it may follow the state it leads to. The rest is refused.
TRANSITIONS: dict[str, tuple[Callable[[VariableRecord], None], dict[State, State]]] = {
    "born": (lambda r: r.born(OTHER_RUNS), dict.fromkeys(State, RESIDENT)),
    "released": (lambda r: r.released(WRITE), {RESIDENT: AWAY}),
    "trimmed": (lambda r: r.trimmed(OTHER_RUNS), {RESIDENT: RESIDENT}),
    "restored": (lambda r: r.restored(OTHER_RUNS), {AWAY: RESIDENT}),
    "write_started": (lambda r: r.write_started(WRITE), {RESIDENT: RESIDENT}),
    "write_ended": (lambda r: r.write_ended(), {RESIDENT: RESIDENT, AWAY: AWAY}),
    "write_failed": (lambda r: r.write_failed(), {RESIDENT: RESIDENT, AWAY: AWAY}),
    "discarded": (lambda r: r.discarded(), {RESIDENT: DISCARDED, AWAY: DISCARDED}),
    "recomputed": (lambda r: r.recomputed(OTHER_RUNS), {DISCARDED: RESIDENT, AWAY: RESIDENT}),
    "load_started": (lambda r: r.load_started(OTHER_RUNS, READ), {AWAY: LOADING}),
    "loaded": (lambda r: r.loaded(), {LOADING: RESIDENT}),
    "load_failed": (lambda r: r.load_failed(), {LOADING: AWAY}),
    "load_undone": (lambda r: r.load_undone(), {RESIDENT: AWAY}),
    "written": (lambda r: r.written(), {state: state for state in State}),
}
GUARDED_ATTRIBUTES = ("state", "runs", "stored", "transfer", "pins", "exports", "seen")


def record_in(state: State, *, stored: bool = True) -> VariableRecord:
    """A record brought to a state by the shortest way there, with chunks `RUNS` where it holds any."""
    record = VariableRecord(nbytes=5 << 16, reservation=Reservation(1 << 20, 3, 5 << 16), serial=7)
    assert (record.state, record.runs, record.stored, record.transfer) == (AWAY, (), False, None)
    record.born(RUNS)
    if stored or state is not RESIDENT:
        record.write_started(WRITE)
        record.write_ended()
    if state is not RESIDENT:
        record.released()
    if state is LOADING:
        record.load_started(RUNS, READ)
    if not stored:
        record.written()
    if state is DISCARDED:
        record.discarded()
        stored = False
    assert (record.state, record.stored) == (state, stored)
    return record


def snapshot(record: VariableRecord) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in GUARDED_ATTRIBUTES)


def legal_from(name: str, record: VariableRecord) -> bool:
    return record.state in TRANSITIONS[name][1] and (name != "released" or record.stored)


@pytest.mark.parametrize(("name", "state", "stored"), list(product(TRANSITIONS, State, (True, False))))
def test_every_transition_from_every_state(name: str, state: State, stored: bool) -> None:
    """It leads where the table says; or it is refused by name, and nothing has changed."""
    record = record_in(state, stored=stored)
    call, leads_to = TRANSITIONS[name]
    before = snapshot(record)
    if legal_from(name, record):
        call(record)
        assert record.state is leads_to[state]
        assert bool(record.runs) == record.state.holds_chunks
        return
    with pytest.raises(InconsistentRecord, match="bug in ooc") as refused:
        call(record)
    assert snapshot(record) == before
    assert (refused.value.transition, refused.value.state) == (name, state.value)
    for part in (name, state.value, "VariableRecord 7"):
        assert part in str(refused.value)


def test_chunks_and_transfers_follow_the_transitions() -> None:
    record = record_in(RESIDENT, stored=False)
    record.write_started(WRITE)
    assert (record.runs, record.stored, record.transfer) == (RUNS, True, WRITE)
    record.released(record.transfer)
    assert (record.runs, record.stored, record.transfer) == ((), True, WRITE)
    record.write_failed()
    assert (record.stored, record.transfer) == (False, None)
    record.restored(RUNS)
    assert (record.runs, record.stored) == (RUNS, False)
    record.write_started(WRITE)
    record.write_ended()
    record.released()
    assert (record.stored, record.transfer) == (True, None)
    record.load_started(OTHER_RUNS, READ)
    assert (record.runs, record.stored, record.transfer) == (OTHER_RUNS, True, READ)
    record.loaded()
    assert (record.runs, record.stored, record.transfer) == (OTHER_RUNS, True, None)
    record.written()
    assert not record.stored
    record.born(RUNS)
    assert (record.runs, record.stored, record.transfer) == (RUNS, False, None)


@pytest.mark.parametrize("state", State)
def test_pins_and_exports_are_counted_in_every_state(state: State) -> None:
    record = record_in(state)
    with pytest.raises(InconsistentRecord, match="unpin"):
        record.unpin()
    with pytest.raises(InconsistentRecord, match="end_export"):
        record.end_export()
    with pytest.raises(InconsistentRecord, match="cancel_export"):
        record.cancel_export()
    record.pin()
    record.pin()
    record.export()
    record.export()
    assert (record.pins, record.exports, record.seen) == (2, 2, False)
    record.unpin()
    record.cancel_export()
    assert (record.pins, record.exports, record.stored) == (1, 1, state is not DISCARDED)
    record.end_export()  # what was written through it is in the chunks, or in the store's file
    assert (record.exports, record.stored) == (0, state is AWAY)
    record.note_seen()
    assert record.seen


@given(st.lists(st.sampled_from(sorted(TRANSITIONS))))
def test_any_sequence_keeps_bytes_somewhere(names: list[str]) -> None:
    """Against a model that knows only where good bytes are: whatever is accepted never leaves them nowhere."""
    record = record_in(RESIDENT, stored=False)
    in_chunks, in_store = True, False
    for name in names:
        was_legal, was_loading = legal_from(name, record), record.state is LOADING
        try:
            TRANSITIONS[name][0](record)
        except InconsistentRecord:
            assert not was_legal
            continue
        assert was_legal
        match name:
            case "born" | "restored" | "loaded" | "recomputed":
                in_chunks = True
            case "released" | "load_undone" | "discarded":
                in_chunks = False
        if name in ("born", "restored", "written", "write_failed", "discarded"):
            in_store = False
        elif name == "write_started":
            in_store = True
        assert in_chunks == (record.state is RESIDENT)
        assert in_store == record.stored
        assert (record.runs == ()) == (not record.state.holds_chunks)
        assert not (was_loading and name.startswith("write_"))
        if name == "released":
            assert in_store


def assigned_attributes(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """`(line, owner as written, attribute)` of each attribute that is assigned, deep in a target, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.lineno, ast.unparse(node.value), node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)  # no other is one of these, and few are
            and ast.unparse(node.func) in ("setattr", "object.__setattr__")
        ):
            name = node.args[1]
            yield node.lineno, ast.unparse(node.args[0]), name.value if isinstance(name, ast.Constant) else "?"


def findings(source: str, *, where: str) -> list[str]:
    """What only transitions (for the pool: the residency manager; for the step position: vmm.table) may do."""
    names, tree = {*GUARDED_ATTRIBUTES, *(f"_{name}" for name in GUARDED_ATTRIBUTES)}, ast.parse(source)
    found = [
        f"{where}:{node.lineno}: {ast.unparse(node)}"  # read or assigned: vmm.table has the names for it
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "position" and ast.unparse(node.value).endswith("state")
    ]
    for line, owner, attribute in assigned_attributes(tree):
        # A residency's `transfer` and a draft's `seen` are their own; `self` is whoever the class is.
        is_records = attribute in names and owner != "self" and not owner.endswith(("residency", "drafts[index]"))
        is_pool = attribute in ("pool", "_pool") and owner.endswith("manager")
        if is_records or is_pool:
            found.append(f"{where}:{line}: {owner}.{attribute}")
    return found


def test_nobody_else_assigns_what_transitions_change() -> None:
    own = {PACKAGE / "memory" / "record.py"}
    others = {  # not a record: attributes of these names on other things
        "tracing/observed.py": "self.drafts[self.live[address]].seen",
        "fragmentation/": "",
    }
    found = []
    for path in sorted(set(PACKAGE.rglob("*.py")) - own):
        where = path.relative_to(PACKAGE).as_posix()
        lines = findings(path.read_text(), where=where)
        found += [line for line in lines if not any(where.startswith(o) and what in line for o, what in others.items())]
    assert found == []


@pytest.mark.parametrize(
    "statement",
    [
        "record.state = State.AWAY",
        "variable.record.stored = False",
        "record.runs, record.pins = (), 0",
        "record._seen = True",
        "record.pins += 1",
        "setattr(record, 'exports', 0)",
        "self._manager.pool = pool",
        "manager._pool = pool",
        "self._allocator.state.position = 2 * index",
        "inside = state.position % 2 == 1",
    ],
)
def test_the_scan_finds_an_assignment(statement: str) -> None:
    assert findings(statement, where="a file")
