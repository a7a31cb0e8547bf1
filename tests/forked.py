"""Python processes for tests, forked from one that has imported torch.

A process that trains spends three seconds on imports (torch, and its compiler as soon as there is an optimizer) and
a tenth of a second on what a test is about. `run` stands in for `subprocess.run`, and `start` for
`subprocess.Popen`: a server, started once for each environment, has imported torch and nothing of ours, and forks for
each command a child that becomes it: its own `__main__`, arguments, directory, environment and standard files, its own
interpreter shutdown and exit status.

What is about a process itself (control groups, peaks of memory, how it starts) starts real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_START = "import sys; from tests.forked import serve; serve(int(sys.argv[1]))()"
_MAX_REQUEST_NBYTES = 1 << 18
_READ_AT_START = ("OMP_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH", "LD_", "MALLOC_")
"""Beginnings of variables that the interpreter or a library reads once: a server serves one set of them."""


class Forked:
    """A running process, as `start` gives it; what one needs of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], channel: socket.socket) -> None:
        self._words, self._channel = list(words), channel
        self.pid = int(channel.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, as `subprocess.Popen.wait`'s.

        Raises:
            subprocess.TimeoutExpired: It takes longer; it goes on.
        """
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = int(self._channel.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._words, timeout or 0) from None
            self._channel.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing if it has been waited for."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and nobody has waited
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def start(
    words: Sequence[str], *, env: Mapping[str, str], files: Sequence[Any], cwd: str | Path | None = None
) -> Forked:
    """Begin to run `python script.py`, `python -m module` or `python -c code`. Many may run at once.

    Args:
        words: The command line; its first word is `sys.executable`.
        env: The whole environment. One thread in ops (`OMP_NUM_THREADS=1`), since the server must have no others.
        files: Its standard input, output and error; they stay the caller's, too.
        cwd: Where to run it; None: here.
    """
    if words[0] != sys.executable or env.get("OMP_NUM_THREADS") != "1":
        raise ValueError(f"a forked process is {sys.executable} with OMP_NUM_THREADS=1, not {words[0]}")
    server = _server(tuple(sorted((k, v) for k, v in env.items() if k.startswith(_READ_AT_START))))
    request = json.dumps({"words": list(words[1:]), "env": dict(env), "cwd": str(cwd or Path.cwd())}).encode()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        socket.send_fds(server, [request], [its.fileno(), *(file.fileno() for file in files)])
    return Forked(words, ours)


def run(
    words: Sequence[str], *, env: Mapping[str, str], cwd: str | Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to the end, as `subprocess.run` would; arguments as of `start`.

    Raises:
        subprocess.TimeoutExpired: It took longer, and was killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        process = start(words, env=env, files=(nothing, output, errors), cwd=cwd)
        try:
            status = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(words), status, output.read(), errors.read())


@functools.cache
def _server(variables: tuple[tuple[str, str], ...]) -> socket.socket:
    """A connection to the server for these variables, started on first use; it ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rest = {k: v for k, v in os.environ.items() if not k.startswith(_READ_AT_START)}
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(its.fileno())],
        env={**rest, **dict(variables)},
        cwd=_ROOT,
        pass_fds=[its.fileno()],
    )
    its.close()

    @atexit.register
    def close() -> None:
        ours.close()
        process.wait()

    return ours


# -- in the server, and in its children


def serve(descriptor: int) -> Callable[[], Any]:
    """Fork a child for each request, until the other side is closed.

    Returns only in a child: with what it has to do, so that it ends as any interpreter does.
    """
    for name in ("torch", "torch._dynamo", "torch.utils.data"):
        importlib.import_module(name)
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"{num_threads} threads after the imports: a fork would lose all but one"
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        try:
            body, files = _serve(connection)
        except KeyboardInterrupt:  # for the tests, in a terminal
            os._exit(130)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return functools.partial(_become, **json.loads(body))


def _serve(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Fork, and tell how children end. Returns only in a child: its request, and its standard files."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.data is not None:
                    waiting.unregister(key.fileobj)
                    _tell_end(key.fd, *key.data)
                    continue
                body, received, _, _ = socket.recv_fds(connection, _MAX_REQUEST_NBYTES, 4)
                if not body:
                    os._exit(0)
                channel, *files = received
                pid = os.fork()
                if pid == 0:
                    for other in waiting.get_map().values():
                        if other.data is not None:
                            os.close(other.fd)
                            other.data[1].close()
                    os.close(channel)
                    return body, files
                for file in files:
                    os.close(file)
                child = (pid, socket.socket(fileno=channel))
                child[1].send(str(pid).encode())
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, child)


def _tell_end(descriptor: int, pid: int, channel: socket.socket) -> None:
    """A child has ended: say how, to whom it was started for."""
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    with channel, contextlib.suppress(BrokenPipeError):
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(words: list[str], env: dict[str, str], cwd: str) -> None:
    """Be the process of a command line. What it raises goes on to the interpreter's top level."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.excepthook = _print_exception
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.path[0] = cwd
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[0] = cwd
        main.__dict__["__builtins__"] = __builtins__
        exec(compile(words[1], "<code>", "exec", dont_inherit=True), main.__dict__)
        return
    path = words[0]
    sys.argv[:] = words
    sys.path[0] = str(Path(path).resolve().parent)
    main.__file__ = str(Path(path).absolute())
    main.__dict__["__builtins__"] = __builtins__
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _print_exception(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
    """As the interpreter does, without the frames of this file and of the server's start above the program's own."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<string>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, value.with_traceback(trace), trace)
