"""What the READMEs and design notes name exists: files, links, modules and their names, tests."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_FOLDERS = ("benchmarks", "ooc", "scheduler", "tests", "vmm")
DOCUMENTS = sorted(
    path.relative_to(_ROOT).as_posix()
    for path in (*_ROOT.glob("*.md"), *(path for name in _FOLDERS for path in (_ROOT / name).rglob("*.md")))
)
_SOURCES = r"py|cpp|h|js|css|md"
"""A bare name with one of these suffixes is a file of ours; with others (`run.json`) it may be the user's."""
_IS_THE_USERS = {"train.py", "script.py"}
_PATH = re.compile(rf"(?!/)[\w.*-]+\.(?:{_SOURCES})|(?!/)[\w.*-]+(?:/[\w.*-]+)*/(?:[\w*-]+(?:\.[\w*-]+)+)?")
_MODULE = re.compile(r"((?:ooc|vmm|scheduler|benchmarks|tests)(?:\.\w+)+)(?:\(.*\))?")
_TEST = re.compile(r"(test_\w+)::(test_\w+?)(?:_?\.\.\.)?")


def _spans(document: str) -> list[str]:
    """What stands between backticks in the running text and the tables."""
    text = re.sub(r"```.*?```", "", (_ROOT / document).read_text(), flags=re.DOTALL)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", text)]


def _missing_paths(document: str) -> list[str]:
    bases = ((_ROOT / document).parent, _ROOT)
    names = {span for span in _spans(document) if _PATH.fullmatch(span)} - _IS_THE_USERS
    return sorted(name for name in names if not any(any(base.glob(name.rstrip("/"))) for base in bases))


def _has(name: str) -> bool:
    """Whether a module, or a name in one, can be imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # what it imports is missing, not the module itself
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document: str) -> None:
    assert _missing_paths(document) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_a_document_lead_somewhere(document: str) -> None:
    text = re.sub(r"```.*?```", "", (_ROOT / document).read_text(), flags=re.DOTALL)
    targets = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    assert [target for target in sorted(targets) if not ((_ROOT / document).parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_tests_that_a_document_names_exist(document: str) -> None:
    spans = _spans(document)
    modules = {found[1] for span in spans if (found := _MODULE.fullmatch(span)) and not _PATH.fullmatch(span)}
    assert [name for name in sorted(modules) if not _has(name)] == []
    for span in spans:
        if found := _TEST.fullmatch(span):
            (path,) = (_ROOT / "tests").rglob(f"{found[1]}.py")
            assert f"def {found[2]}" in path.read_text(), span


def test_this_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "`gone.py`, `gone/`, `a/gone.csv` and `there.py`; not `run.json`, `/proc/gone`, `train.py` or `ooc run x.py`"
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "there.py").touch()
    monkeypatch.setattr("tests.test_documents._ROOT", tmp_path)
    assert _missing_paths("README.md") == ["a/gone.csv", "gone.py", "gone/"]
    assert _has("vmm.driver.Driver")
    assert not _has("vmm.driver.Gone")
    assert not _has("vmm.gone")
