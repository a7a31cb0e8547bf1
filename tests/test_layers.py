"""Imports go downward only: those that type checkers alone see, and those inside functions, too."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ooc", "vmm", "scheduler")
MOST_FILES = 14
"""Python files directly in `ooc/`: a fifteenth belongs into a room."""
MOST_LINES = 550
SHARED_NAMES = {
    "BudgetTooSmall": "of an op (ooc), and of a plan (scheduler); both are public",
    "Placement": "of buffers in an arena (scheduler.placement), and of gaps in time (scheduler.policies._placement)",
}
"""Public class names that two modules define, each for a reason."""


def _modules() -> dict[str, Path]:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


MODULES = _modules()


def _imports(name: str) -> Iterator[str]:
    """Our own modules that a module imports, wherever in its text."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            # `from package import module` is the module's; anything else is the package's own.
            found = [
                inner if (inner := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            ]
        else:
            continue
        yield from (imported for imported in found if imported in MODULES and imported != name)


GRAPH = {name: set(_imports(name)) for name in MODULES}


def _rows() -> list[set[str]]:
    """The rows of the contract in pyproject.toml, top first: one place says what lies above what."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [{f"ooc.{name.strip()}" for name in row.replace(":", "|").split("|")} for row in layers]


def test_no_circle() -> None:
    try:
        tuple(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(f"these import each other in a circle: {' -> '.join(error.args[1])}")


def test_rooms_import_only_rooms_below() -> None:
    rank = {room: number for number, row in enumerate(_rows()) for room in row}
    upward = []
    for name, imported in GRAPH.items():
        room = ".".join(name.split(".")[:2])
        for other in imported:
            other_room = ".".join(other.split(".")[:2])
            if room in rank and other_room in rank and room != other_room and rank[room] >= rank[other_room]:
                upward.append(f"{name} -> {other}")
    assert not upward


def test_every_room_has_a_row() -> None:
    """So that nothing new stands outside the contract."""
    rooms = {".".join(name.split(".")[:2]) for name in MODULES if name.startswith("ooc.")}
    assert rooms - set().union(*_rows()) == {"ooc.__main__"}


def test_each_class_name_has_one_owner() -> None:
    owners: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(f"{module}:{node.lineno}")
    shared = {name: places for name, places in owners.items() if len(places) > 1}
    assert not {name: places for name, places in shared.items() if name not in SHARED_NAMES}
    assert shared.keys() == SHARED_NAMES.keys(), "a name in the list has one owner by now"


def test_few_files_at_the_top() -> None:
    assert len(list((ROOT / "ooc").glob("*.py"))) <= MOST_FILES


@pytest.mark.parametrize("suffix", [".py", ".cpp", ".h", ".js"])
def test_no_long_file(suffix: str) -> None:
    folders = (*PACKAGES, "tests", "benchmarks")
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in folders
        for path in (ROOT / folder).rglob(f"*{suffix}")
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert not long
