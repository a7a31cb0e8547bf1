"""Python processes for tests, forked from one that has imported torch.

A process that trains spends three seconds on imports (torch, and its compiler as soon as there is an optimizer) and
a tenth of a second on what a test is about. `run` stands in for `subprocess.run`: a server, started once for each
environment, has imported torch and nothing of ours, and forks for each command a child that becomes it: its own
`__main__`, arguments, directory, environment and standard files, its own interpreter shutdown and exit status.

What is about a process itself (signals from outside, control groups, peaks of memory) starts real ones.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
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


def run(
    words: Sequence[str], *, env: Mapping[str, str], cwd: str | Path | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python script.py`, `python -m module` or `python -c code` to the end, as `subprocess.run` would.

    Args:
        words: The command line; its first word is `sys.executable`.
        env: The whole environment. One thread in ops (`OMP_NUM_THREADS=1`), since the server must have no others.
        cwd: Where to run it; None: here.
        timeout: Seconds, after which the process is killed.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    if words[0] != sys.executable or env.get("OMP_NUM_THREADS") != "1":
        raise ValueError(f"a forked process is {sys.executable} with OMP_NUM_THREADS=1, not {words[0]}")
    server = _server(tuple(sorted((k, v) for k, v in env.items() if k.startswith(_READ_AT_START))))
    request = json.dumps({"words": list(words[1:]), "env": dict(env), "cwd": str(cwd or Path.cwd())}).encode()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        files = [nothing.fileno(), output.fileno(), errors.fileno()]
        server.settimeout(None)
        socket.send_fds(server, [request], files)
        pid = int(server.recv(64))
        try:
            server.settimeout(timeout)
            status = int(server.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.settimeout(None)
            server.recv(64)
            raise subprocess.TimeoutExpired(list(words), timeout) from None
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
        while True:
            try:
                body, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST_NBYTES, 3)
            except KeyboardInterrupt:  # for the tests, in a terminal
                os._exit(130)
            if not body:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                break
            for file in files:
                os.close(file)
            connection.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return functools.partial(_become, **json.loads(body))


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
