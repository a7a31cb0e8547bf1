"""A damaged library in the cache is built again, never loaded; a compiler that cannot be used is named."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vmm.test_native_build import cache, needs_compiler, repository, write_source
from vmm.native_build import BuildFailed, CompilerMissing, build
from vmm.printable import printable

__all__ = ["cache"]  # the fixture


def damage(library: Path, way: str) -> None:
    """As a full disk, a copy cut short, or a bad block would; in another file, as the loaded one must stay."""
    content = bytearray(library.read_bytes())
    if way == "empty":
        content.clear()
    elif way == "cut to 3000 bytes":
        del content[3000:]
    elif way == "cut in half":
        del content[len(content) // 2 :]
    elif way == "one bit flipped":
        content[len(content) // 3] ^= 1
    elif way == "without its seal":
        library.with_name(f"{library.name}.seal").unlink()
        return
    elif way == "with a seal of noise":
        library.with_name(f"{library.name}.seal").write_bytes(b"\xff\x00")
        return
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes(content)
    damaged.replace(library)


WAYS = (
    "empty",
    "cut to 3000 bytes",
    "cut in half",
    "one bit flipped",
    "without its seal",
    "with a seal of noise",
)


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_library_is_built_again(way: str, cache: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path, 17)
    library = build("answer", [source])
    good = library.read_bytes()
    assert len(good) > 3000
    damage(library, way)
    inode = library.stat().st_ino
    assert build("answer", [source]) == library
    assert library.stat().st_ino != inode  # another file: who has mapped the old one keeps it
    assert ctypes.CDLL(str(library)).answer() == 17
    made = library.stat().st_mtime_ns
    assert build("answer", [source]) == library
    assert library.stat().st_mtime_ns == made
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".seal", ".so"]


@needs_compiler
def test_two_processes_that_find_it_damaged_mend_it_once(cache: Path, tmp_path: Path) -> None:
    counter, compiler = tmp_path / "compilations", tmp_path / "counting-compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {counter}; sleep 0.5;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    script = (
        "import ctypes, sys\nfrom pathlib import Path\nfrom vmm.native_build import build\n"
        "path = build('answer', [Path(sys.argv[1])])\nprint(ctypes.CDLL(str(path)).answer())\n"
    )
    command = [sys.executable, "-c", script, str(write_source(tmp_path, 9))]
    environment = {**os.environ, "CXX": str(compiler)}
    subprocess.run(command, check=True, env=environment, cwd=repository(), stdout=subprocess.PIPE)
    (library,) = cache.glob("*.so")
    damage(library, "cut to 3000 bytes")
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=repository())
        for _ in range(3)
    ]
    outputs = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert outputs == ["9", "9", "9"]
    assert counter.read_text().split() == ["x", "x"]  # once before, once to mend


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("'g++", "no closing quotation"),
        ('"g++ -m64', "no closing quotation"),
        ("g++ \\", "no escaped character"),
        ("''", "'' is not a program"),
        ("/no/such/g++", "'/no/such/g++' is not a program"),
    ],
)
def test_a_cxx_that_is_no_command_says_so(
    value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", value)
    with pytest.raises(CompilerMissing) as raised:
        build("answer", [write_source(tmp_path, 1)])
    assert said in str(raised.value)
    assert f"CXX={value!r}" in str(raised.value)
    assert "Options:" in str(raised.value)


@needs_compiler
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_cxx_counts_as_not_set(
    value: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", value)
    assert build("answer", [write_source(tmp_path, 1)]).parent == cache


@pytest.mark.usefixtures("cache")
def test_a_cxx_that_cannot_be_started_or_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "not-a-program"
    program.write_bytes(b"\x7fELF but not really")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(CompilerMissing, match="cannot be started"):
        build("answer", [write_source(tmp_path, 1)])
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(BuildFailed, match="wrote nothing"):
        build("answer", [write_source(tmp_path, 1)])


@pytest.mark.usefixtures("cache")
def test_a_compilers_colours_and_noise_do_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "loud"
    compiler.write_text("#!/bin/sh\nprintf '\\033]0;title\\007\\033[31merror\\033[m \\377\\n'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildFailed) as raised:
        build("answer", [write_source(tmp_path, 1)])
    assert r"\x1b]0;title\x07\x1b[31merror\x1b[m" in str(raised.value)
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize("starts_slowly", [False, True])
def test_an_interrupted_compiler_takes_its_children_and_files_with_it(tmp_path: Path, starts_slowly: bool) -> None:
    """Also while it is being started: on a busy machine it may run long before `Popen` returns."""
    temporary, pids = tmp_path / "temporary", tmp_path / "pids"
    temporary.mkdir()
    compiler = tmp_path / "slow"
    # As g++ does: a child that works, and temporary files.
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\n'
        f'sleep 600 &\necho x > "$TMPDIR/cc.s"\necho $$ $! > {pids}.partial\nmv {pids}.partial {pids}\nwait\n'
    )
    compiler.chmod(0o755)
    script = (
        "import signal, sys\nfrom pathlib import Path\nfrom vmm.native_build import build\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        + ("import subprocess, time\nstart = subprocess.Popen.__init__\n" if starts_slowly else "")
        + ("def slowly(*a, **k):\n  start(*a, **k)\n  time.sleep(1)\n" if starts_slowly else "")
        + ("subprocess.Popen.__init__ = slowly\n" if starts_slowly else "")
        + "build('answer', [Path(sys.argv[1])])\n"
    )
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "TMPDIR": str(temporary),
        "OOC_CACHE_DIR": str(tmp_path / "cache"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(write_source(tmp_path, 1))],
        env=environment,
        cwd=repository(),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not pids.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT, errors
    assert list(temporary.iterdir()) == []
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    for pid in pids.read_text().split():
        assert _ends(int(pid))


def _ends(pid: int) -> bool:
    """It has been killed; when it is gone is the kernel's choice."""
    for _ in range(12_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain: \u00e4\u4e2d\n\ttab", "plain: \u00e4\u4e2d\n\ttab"),
        ("\x1b[2J\x07\r", r"\x1b[2J\x07\r"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\ud800", r"\ud800"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
