"""Compile the package's C++ on first use into a per-user cache.

Two of our parts must run without the GIL: the transfer engine and torch's allocator. They are
small C++ files, compiled in about a second on first use rather than shipped as wheels, because
the allocator must match the c10 headers of the torch that is installed. The file name carries a
hash of everything that decides the result, so a stale library is never loaded; and a file beside
each library has its size and hash, so a damaged one (a full disk, a copy cut short) is built again
instead of ending the process by a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vmm.machine import memory_room
from vmm.printable import printable
from vmm.sizes import format_exactly

__all__ = [
    "BuildFailed",
    "CompilerMissing",
    "NativeBuildError",
    "build",
    "cache_directory",
    "find_compiler",
]

_log = logging.getLogger(__name__)

_CXX_RUNTIME = ("libstdc++.so", "libgcc_s.so")
_CANDIDATES = ("g++", "c++", "clang++")
_BASE_FLAGS = ("-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
_HEADER_SUFFIXES = frozenset({".h", ".hh", ".hpp", ".inc"})
_NUM_OUTPUT_LINES = 30
_MOST_LOOKS, _LOOK_S = 20, 0.01
"""How often, and how far apart, a killed compiler is looked for; as a zombie it may stay for ever."""

_fallback_directory: Path | None = None
"""Private directory of this process, used when no cache can be written; removed at exit."""


class NativeBuildError(RuntimeError):
    """A native library could not be had."""


class CompilerMissing(NativeBuildError):
    """No C++ compiler was found.

    Attributes:
        searched: The commands that were looked for.
    """

    def __init__(self, message: str, *, searched: tuple[str, ...]) -> None:
        super().__init__(message)
        self.searched = searched


class BuildFailed(NativeBuildError):
    """The compiler ran and failed.

    Attributes:
        command: The compiler's command line.
        output: All that it printed.
    """

    def __init__(self, message: str, *, command: tuple[str, ...], output: str) -> None:
        super().__init__(message)
        self.command = command
        self.output = output


def build(
    name: str,
    sources: Sequence[Path],
    *,
    include_dirs: Sequence[Path | str] = (),
    library_dirs: Sequence[Path | str] = (),
    libraries: Sequence[str] = (),
    extra_flags: Sequence[str] = (),
    cache_key: str = "",
    meets_torch: bool = False,
    memory_nbytes: int = 0,
    is_optional: bool = False,
) -> Path:
    """The path of a shared library made from `sources`, compiled now if it was not before.

    Safe against other processes and threads that build the same library at the same time: one of
    them compiles, the others wait and use its result. A half-written file is never visible, and one
    that was damaged since is built again.

    Args:
        name: Stem of the file name; letters, digits, `_` and `-`.
        sources: C++ files to compile. Headers among them are hashed but not compiled.
        include_dirs: Directories for `-I`.
        library_dirs: Directories for `-L`, also recorded as run-time search path.
        libraries: Names for `-l`.
        extra_flags: Flags that come after ours and so override them (`-std=c++20`).
        cache_key: What else decides the result, such as the version of the headers.
        meets_torch: Whether the library exchanges C++ objects with torch, which is loaded. Then it is linked against
            the C++ runtime that torch uses ([Note: one C++ runtime]).
        memory_nbytes: What compiling takes; where less is to be had, nothing is started. 0: whatever is there.
        is_optional: Whether the caller goes on without the library. Then a failure is remembered in the cache, and not
            tried again before a file is removed that the error names.

    Returns:
        The library, in the cache directory (`cache_directory`), or in a directory private to this
        process where the cache cannot be written. It must not be deleted while it is loaded.

    Raises:
        CompilerMissing: No compiler; the message says how to install one.
        BuildFailed: The compiler failed; the message has the command and the last of its output.
        NativeBuildError: There is too little memory for it, or it failed before (`is_optional`).
    """
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"name={name!r}: letters, digits, '_' and '-' are allowed")
    compiler = find_compiler()
    runtime = _loaded_cxx_runtime() if meets_torch else ()
    arguments = (*_arguments(sources, include_dirs, library_dirs, libraries, extra_flags), *map(str, runtime))
    digest = _digest(sources, (*compiler, *arguments, _compiler_version(compiler), cache_key))
    file_name = f"{name}-{digest}.so"
    wants = _Wants(memory_nbytes=memory_nbytes, is_optional=is_optional)
    try:
        return _build_in(cache_directory(), file_name, compiler, arguments, wants)
    except OSError as error:
        directory = _private_directory()
        _log.warning("cannot cache %s in %s (%s); building in %s", name, cache_directory(), error, directory)
        return _build_in(directory, file_name, compiler, arguments, wants)


def cache_directory() -> Path:
    """Where libraries are kept: $OOC_CACHE_DIR, else $XDG_CACHE_HOME/ooc, else ~/.cache/ooc."""
    own = os.environ.get("OOC_CACHE_DIR")
    if own:
        return Path(own)
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path(os.path.expanduser("~")) / ".cache") / "ooc"


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler's command: $CXX if set (it may hold arguments), else the first found.

    Raises:
        CompilerMissing: There is none.
    """
    own = os.environ.get("CXX", "").strip()
    if own:
        try:
            command = tuple(shlex.split(own))
        except ValueError as error:
            raise CompilerMissing(
                f"no C++ compiler: CXX={own!r} cannot be read as a command: {str(error).lower()}.\n"
                "  Options: quote it as for a shell, such as CXX='ccache g++' or CXX='\"/a path/g++\" -m64'; "
                "or unset it to use g++.",
                searched=(own,),
            ) from None
        if shutil.which(command[0]) is None:
            raise CompilerMissing(
                f"no C++ compiler: CXX={own!r} is set, but {command[0]!r} is not a program that can be run.\n"
                "  Options: set CXX to a C++17 compiler, or unset it to use g++.",
                searched=(command[0],),
            )
        return command
    for candidate in _CANDIDATES:
        path = shutil.which(candidate)
        if path is not None:
            return (path,)
    raise CompilerMissing(
        f"no C++ compiler: looked for {', '.join(_CANDIDATES)} on PATH={os.environ.get('PATH', '')!r}.\n"
        "  ooc compiles a few small files on first use.\n"
        "  Options: apt install g++ (Debian, Ubuntu, Raspberry Pi OS), dnf install gcc-c++ (Fedora),\n"
        "  apk add g++ (Alpine), conda install gxx; or set CXX to a C++17 compiler.",
        searched=_CANDIDATES,
    )


# [Note: one C++ runtime]
# Some compilers put a copy of the C++ runtime into each library (-static-libstdc++, by their configuration or a
# wrapper). Two copies in one process share some symbols and not others: the first number that is written into a text
# ended the process, and what is thrown by one and caught by the other may. Named before the compiler's own, the runtime
# that is there already leaves nothing to be copied.
def _loaded_cxx_runtime() -> tuple[Path, ...]:
    """The C++ runtime's shared libraries that this process has loaded; none where it cannot be told."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    found = (Path(path) for name in _CXX_RUNTIME for path in paths if Path(path).name.startswith(name))
    return tuple(path for path in found if path.exists())


def _arguments(
    sources: Sequence[Path],
    include_dirs: Sequence[Path | str],
    library_dirs: Sequence[Path | str],
    libraries: Sequence[str],
    extra_flags: Sequence[str],
) -> tuple[str, ...]:
    """The compiler's arguments, less the output file."""
    compiled = [str(source) for source in sources if Path(source).suffix not in _HEADER_SUFFIXES]
    if not compiled:
        raise ValueError(f"sources={[str(s) for s in sources]}: nothing to compile")
    return (
        *_BASE_FLAGS,
        *extra_flags,
        *(f"-I{directory}" for directory in include_dirs),
        *compiled,
        *(f"-L{directory}" for directory in library_dirs),
        *(f"-Wl,-rpath,{directory}" for directory in library_dirs),
        *(f"-l{library}" for library in libraries),
    )


def _digest(sources: Sequence[Path], rest: tuple[str, ...]) -> str:
    """16 hex digits over the sources' bytes and everything else that decides the result."""
    state = hashlib.sha256()
    for part in (*(Path(source).read_bytes() for source in sources), *(text.encode() for text in rest)):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()[:16]


def _compiler_version(compiler: tuple[str, ...]) -> str:
    """What the compiler says of itself; part of the hash. Raises `CompilerMissing` if it cannot be started."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerMissing(
            f"no C++ compiler: {shlex.join(compiler)} cannot be started: {error}.\n"
            "  Options: set CXX to a C++17 compiler, or unset it to use g++.",
            searched=(compiler[0],),
        ) from error
    return done.stdout + done.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wants:
    """`build`'s arguments of these names."""

    memory_nbytes: int
    is_optional: bool

    def check(self, failure: Path) -> None:
        """Raise `NativeBuildError` where nothing is to be compiled."""
        if self.is_optional and failure.exists():
            raise NativeBuildError(f"it could not be compiled before; {failure} says why: remove it to try again")
        if not self.memory_nbytes:
            return
        room = memory_room()
        if room.available_nbytes < self.memory_nbytes:
            raise NativeBuildError(
                f"compiling it takes {format_exactly(self.memory_nbytes)} of memory, and there is less: "
                f"{room.explanation}"
            )


def _build_in(
    directory: Path, file_name: str, compiler: tuple[str, ...], arguments: tuple[str, ...], wants: _Wants
) -> Path:
    """Compile into `directory` unless the file is there, undamaged. OSError if the directory is unusable."""
    target = directory / file_name
    if _is_whole(target):
        return target
    failure = target.with_suffix(".failed")
    wants.check(failure)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(directory / f"{file_name}.lock"):
        if _is_whole(target):  # another process made it while we waited
            return target
        if target.exists():
            _log.warning("%s is damaged, or was never finished; building it again", target)
        partial = directory / f"{file_name}.{os.getpid()}.partial"
        seal = partial.with_suffix(".seal")
        try:
            _compile((*compiler, *arguments, "-o", str(partial)), partial)
            seal.write_text(_seal_of(partial))
            # Replaced, never written over: processes that have loaded the old library go on with it.
            seal.replace(_seal_path(target))
            partial.replace(target)
        except BuildFailed as error:
            if wants.is_optional:
                failure.write_text(str(error))
            raise
        finally:
            partial.unlink(missing_ok=True)
            seal.unlink(missing_ok=True)
    return target


def _is_whole(library: Path) -> bool:
    """Whether a library is what was once built: of the size and hash that the file beside it says."""
    try:
        return _seal_path(library).read_text() == _seal_of(library)
    except (OSError, UnicodeDecodeError):
        return False


def _seal_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.seal")


def _seal_of(library: Path) -> str:
    content = library.read_bytes()
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}\n"


def _compile(command: tuple[str, ...], result: Path) -> None:
    _log.info("compiling: %s", shlex.join(command))
    code, output = _run_compiler(command)
    if code == 0 and result.exists() and result.stat().st_size > 0:
        return
    output = printable(output)
    lines = output.splitlines()
    shown = "\n".join(f"    {line}" for line in lines[-_NUM_OUTPUT_LINES:])
    what = f"failed with exit code {code}" if code else "said that all is well, and wrote nothing"
    raise BuildFailed(
        f"the C++ compiler {what}.\n"
        f"  command: {shlex.join(command)}\n"
        f"  last {min(len(lines), _NUM_OUTPUT_LINES)} of {len(lines)} lines of output:\n{shown}\n"
        "  Options: another compiler through CXX (g++ 9 or newer, clang++ 10 or newer); free disk space and memory;\n"
        "  if neither helps, please report this output.",
        command=command,
        output=output,
    )


def _run_compiler(command: tuple[str, ...]) -> tuple[int, str]:
    """The compiler's exit code and output. Interrupted, it takes its own children and files with it."""
    with (
        tempfile.TemporaryDirectory(prefix="ooc-compiling-", ignore_cleanup_errors=True) as scratch,
        # By a thread, which no Ctrl-C interrupts: it would lose a process that has just begun.
        ThreadPoolExecutor(1) as starter,
    ):
        starting = starter.submit(
            subprocess.Popen[str],
            [*command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            env={**os.environ, "TMPDIR": scratch},
            process_group=0,
        )
        try:
            process = starting.result()
            output, _ = process.communicate()
        except BaseException:
            process = starting.result()
            _kill_group(process.pid)
            process.wait()
            raise
        return process.returncode, output


def _kill_group(group: int) -> None:
    """End a process and its children, and wait a moment for them: they write files until they are gone."""
    for _ in range(_MOST_LOOKS):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes and threads. The file stays."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # closing drops the lock


def _private_directory() -> Path:
    """A temporary directory of this process alone, removed when it exits."""
    global _fallback_directory
    if _fallback_directory is None or not _fallback_directory.is_dir():
        _fallback_directory = Path(tempfile.mkdtemp(prefix="ooc-native-"))
        atexit.register(_remove_private_directory, _fallback_directory, os.getpid())
    return _fallback_directory


def _remove_private_directory(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child that exits must not remove its parent's files
        shutil.rmtree(directory, ignore_errors=True)
