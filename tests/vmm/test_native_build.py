"""Building native libraries on first use: cached, atomic, and clear about what is missing."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vmm import native_build
from vmm.native_build import BuildFailed, CompilerMissing, NativeBuildError, build

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="no C++ compiler on PATH"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("OOC_CACHE_DIR", str(directory))
    monkeypatch.delenv("CXX", raising=False)
    return directory


def write_source(directory: Path, value: int) -> Path:
    source = directory / "answer.cpp"
    source.write_text(f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {value}; }}\n')
    return source


def libraries_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in (".lock", ".seal"))


@needs_compiler
def test_builds_once_and_again_when_something_changes(cache: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path, 41)
    first = build("answer", [source])
    assert ctypes.CDLL(str(first)).answer() == 41
    made = first.stat().st_mtime_ns
    assert build("answer", [source]) == first
    assert first.stat().st_mtime_ns == made

    other_key = build("answer", [source], cache_key="another version")
    other_flags = build("answer", [source], extra_flags=["-O1"])
    write_source(tmp_path, 42)
    other_source = build("answer", [source])
    assert len({first, other_key, other_flags, other_source}) == 4
    assert ctypes.CDLL(str(other_source)).answer() == 42
    assert len(libraries_in(cache)) == 4
    assert cache.stat().st_mode & 0o077 == 0


@needs_compiler
@pytest.mark.usefixtures("cache")
def test_headers_count_in_the_hash_but_are_not_compiled(tmp_path: Path) -> None:
    source = tmp_path / "uses.cpp"
    source.write_text('#include "value.h"\nextern "C" __attribute__((visibility("default"))) int v() { return V; }\n')
    header = tmp_path / "value.h"
    header.write_text("#define V 7\n")
    first = build("uses", [source, header], include_dirs=[tmp_path])
    header.write_text("#define V 8\n")
    second = build("uses", [source, header], include_dirs=[tmp_path])
    assert (ctypes.CDLL(str(first)).v(), ctypes.CDLL(str(second)).v()) == (7, 8)
    with pytest.raises(ValueError, match="nothing to compile"):
        build("uses", [header])


@needs_compiler
@pytest.mark.usefixtures("cache")
def test_libraries_are_linked(tmp_path: Path) -> None:
    inner = build("inner", [write_source(tmp_path, 5)])
    (tmp_path / "libinner.so").symlink_to(inner)
    outer = tmp_path / "outer.cpp"
    outer.write_text(
        'extern "C" int answer();\n'
        'extern "C" __attribute__((visibility("default"))) int twice() { return 2 * answer(); }\n'
    )
    path = build("outer", [outer], library_dirs=[tmp_path], libraries=["inner"])
    assert ctypes.CDLL(str(path)).twice() == 10


@needs_compiler
def test_a_compiler_that_copies_its_runtime_into_libraries_does_not_bring_a_second_one(
    cache: Path, tmp_path: Path
) -> None:
    """As seen on an image for GPUs, whose g++ is a wrapper: each refused allocation ended the process."""
    source = tmp_path / "digits.cpp"
    source.write_text(
        "#include <sstream>\n"
        'extern "C" __attribute__((visibility("default"))) unsigned long digits(unsigned long number) {\n'
        "  std::ostringstream text;\n"
        "  text << number;\n"
        "  return text.str().size();\n"
        "}\n"
    )
    script = (
        "import ctypes, pathlib, torch\n"  # torch brings the runtime
        "from vmm.native_build import build\n"
        f"digits = ctypes.CDLL(str(build('digits', [pathlib.Path({str(source)!r})], meets_torch=True))).digits\n"
        "digits.argtypes = [ctypes.c_ulong]\n"
        "assert digits(12345) == 5, digits(12345)\n"
    )
    environment = {**os.environ, "CXX": "g++ -static-libstdc++ -static-libgcc", "OOC_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("cache")
def test_no_compiler_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(CompilerMissing, match=r"apt install g\+\+") as caught:
        build("answer", [write_source(tmp_path, 1)])
    assert "g++" in caught.value.searched
    assert str(empty) in str(caught.value)


@pytest.mark.usefixtures("cache")
def test_a_wrong_cxx_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        build("answer", [write_source(tmp_path, 1)])


@needs_compiler
def test_cxx_may_hold_arguments(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build("answer", [write_source(tmp_path, 3)])
    monkeypatch.setenv("CXX", "g++ -DUNUSED=1")
    other = build("answer", [write_source(tmp_path, 3)])
    assert other != plain
    assert other.parent == cache


@needs_compiler
def test_broken_source_shows_command_and_output_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(BuildFailed, match="undeclared_name") as caught:
        build("broken", [source])
    assert str(source) in caught.value.command
    assert "-shared" in str(caught.value)
    assert libraries_in(cache) == []


@needs_compiler
@needs_compiler
def test_what_is_optional_is_not_tried_again_after_a_failure(cache: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path, 41)
    source.write_text("int answer( { return 1; }\n")
    with pytest.raises(BuildFailed):
        build("answer", [source], is_optional=True)
    (reason,) = cache.glob("*.failed")
    assert "expected" in reason.read_text()
    with pytest.raises(NativeBuildError, match=str(reason)) as raised:
        build("answer", [source], is_optional=True)
    assert not isinstance(raised.value, BuildFailed)
    with pytest.raises(BuildFailed):  # who needs it tries again
        build("answer", [source])


@needs_compiler
def test_nothing_is_compiled_where_memory_is_short(cache: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path, 41)
    with pytest.raises(NativeBuildError, match=r"\(1152921504606846976 bytes\) of memory, and there is less"):
        build("answer", [source], memory_nbytes=1 << 60)
    assert not cache.exists()
    made = build("answer", [source], memory_nbytes=1 << 20)
    assert build("answer", [source], memory_nbytes=1 << 60) == made  # it is there


def test_unwritable_cache_falls_back_to_a_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "a-file"
    in_the_way.write_text("not a directory")  # unusable for root too, unlike a mode of 0500
    monkeypatch.setenv("OOC_CACHE_DIR", str(in_the_way / "cache"))
    path = build("answer", [write_source(tmp_path, 6)])
    assert ctypes.CDLL(str(path)).answer() == 6
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "cannot cache answer" in caplog.text
    assert build("answer", [write_source(tmp_path, 6)]) == path


@needs_compiler
def test_private_directory_is_removed_at_exit_by_its_owner_alone(tmp_path: Path) -> None:
    in_the_way = tmp_path / "a-file"
    in_the_way.write_text("not a directory")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom vmm.native_build import build\n"
        "path = build('answer', [Path(sys.argv[1])])\n"
        "child = os.fork()\nif child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\nassert path.exists()\n"
    )
    environment = {**os.environ, "OOC_CACHE_DIR": str(in_the_way / "x"), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", script, str(write_source(tmp_path, 1))]
    subprocess.run(command, check=True, env=environment, cwd=repository())
    assert list(temporary.iterdir()) == []


@needs_compiler
def test_two_processes_at_once_compile_once(cache: Path, tmp_path: Path) -> None:
    counter = tmp_path / "compilations"
    compiler = tmp_path / "counting-compiler"
    # --version is asked on every call; only real compilations count. The sleep makes them overlap.
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {counter}; sleep 0.5;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    script = (
        "import sys\nfrom pathlib import Path\nfrom vmm.native_build import build\n"
        "print(build('answer', [Path(sys.argv[1])]))\n"
    )
    command = [sys.executable, "-c", script, str(write_source(tmp_path, 9))]
    environment = {**os.environ, "CXX": str(compiler)}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=repository())
        for _ in range(2)
    ]
    outputs = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1]
    assert counter.read_text().splitlines() == ["x"]
    assert ctypes.CDLL(outputs[0]).answer() == 9
    assert libraries_in(cache) == [Path(outputs[0]).name]


def test_cache_directory_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OOC_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert native_build.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("OOC_CACHE_DIR")
    assert native_build.cache_directory() == tmp_path / "xdg" / "ooc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native_build.cache_directory() == tmp_path / "home" / ".cache" / "ooc"


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b"])
def test_names_that_are_no_file_stem_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name="):
        build(name, [write_source(tmp_path, 1)])


def repository() -> Path:
    return Path(__file__).resolve().parents[2]
