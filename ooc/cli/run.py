"""`ooc run`: runs an unmodified script within a budget, as `python script.py` would run it.

The script becomes `__main__` of this process, with its own `sys.argv` and `sys.path[0]`. What ends it (an exception,
`sys.exit`, Ctrl-C) reaches the interpreter's own top level, which prints and exits as usual; only the frames of `ooc`
are taken out of the traceback. Nothing is written to stdout.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import logging
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ooc.session
from ooc.cli.own_ranks import OwnRanks
from ooc.errors import BudgetTooSmall, OocError
from ooc.interop.step_in_backward import every_optimizer_in_backward
from ooc.output_files import is_special
from ooc.replay.given_plan import read_plan
from ooc.reporting.hints import trains_elsewhere, went_on_without
from ooc.reporting.report import summary, write_json
from ooc.telemetry.progress import rank
from vmm.driver import MemoryFault
from vmm.native_build import NativeBuildError
from vmm.printable import printable
from vmm.store import StoreError

if TYPE_CHECKING:
    from ooc.fragmentation.live import Recording
    from ooc.fragmentation.page_faults import PageFaultWatch

_log = logging.getLogger(__name__)

USAGE_EXIT_CODE = 2

DIAGNOSED_STEPS = 3
"""Optimizer steps that `--diagnose` records: the first makes the optimizer's state, the others are the
steady state; a step of a thousand ops takes about 1 MB of recording."""

_ON_PURPOSE = (OocError, StoreError, MemoryFault, NativeBuildError)
"""Errors that `ooc` raises on purpose, with the reason in the message: a full disk, a budget that is too small."""

_OWN_DIRECTORIES = tuple(
    str(Path(module.__file__ or "").parent) + os.sep for module in (ooc, sys.modules["vmm.driver"])
)


class RunError(Exception):
    """Raised when the script cannot be started. `exit_code` is what Python itself would exit with."""

    def __init__(self, message: str, *, exit_code: int = USAGE_EXIT_CODE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `ooc run`.

    Attributes:
        budget, device, host_budget, store, policy, window, chunk, threshold, debug, progress, recompute: As
            `Session`'s arguments; None: its default.
        plan: File of a plan to replay (`ooc.replay.given_plan`); also gives the budget and the chunk size, where those
            are not given.
        step_in_backward: Whether optimizers run inside the backward pass (`ooc.interop.step_in_backward`).
        micro_batches: The most backward passes that a step has; None: as many as the first step.
        report: File for the JSON report, written also when the script fails. Of several ranks each writes its own:
            run.json, run.rank1.json, ...; run.main.json is that of a process that only starts them.
    """

    budget: int | str | None = None
    device: str | None = None
    host_budget: int | str | None = None
    store: str | None = None
    policy: str | None = None
    window: int | str | None = None
    chunk: int | str | None = None
    threshold: int | str | None = None
    debug: bool = False
    step_in_backward: bool = False
    micro_batches: int | None = None
    recompute: bool | None = None
    progress: str | None = None
    plan: str | None = None
    report: str | None = None

    def session_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `Session`."""
        given = {
            "device": self.device,
            "host_budget": self.host_budget,
            "store": self.store,
            "policy": self.policy,
            "window_nbytes": self.window,
            "chunk_nbytes": self.chunk,
            "threshold_nbytes": self.threshold,
            "progress": self.progress,
            "recompute": self.recompute,
        }
        flags = {"debug": self.debug}
        return {**flags, **{name: value for name, value in given.items() if value is not None}}

    def in_backward(self) -> contextlib.AbstractContextManager[object]:
        """Within it, optimizers run inside the backward pass, if that was asked for."""
        if not self.step_in_backward:
            return contextlib.nullcontext()
        return every_optimizer_in_backward(micro_batches=self.micro_batches)


def run(target: str, arguments: Sequence[str], *, options: RunOptions, is_module: bool = False) -> None:
    """Run a script, a directory or archive with a `__main__.py`, or (`is_module`) a module, as `__main__`.

    Returns when the script has ended. The session remains open for the script's `atexit`
    functions and is closed after them. To be called once in a process, by its main thread.

    Args:
        target: Path of the script, or the module's dotted name.
        arguments: What follows it on the command line: the script's `sys.argv[1:]`.
        options: The session's arguments and the reports to write.
        is_module: Run a module, as `python -m` does.

    Raises:
        RunError: There is no such script, or the session cannot be opened. Nothing has run.
        BaseException: Whatever the script raises, as it was raised. The report is written by then,
            and `sys.excepthook` takes `ooc`'s frames out when the interpreter prints it.
    """
    report_path = _report_path(options.report)
    try:
        program = _find_module(target) if is_module else _find_script(target)
        budget, session_arguments = options.budget, options.session_arguments()
        if options.plan is not None:
            plan = read_plan(options.plan)
            budget = plan.machine.budget_nbytes if budget is None else budget
            session_arguments = {"chunk_nbytes": plan.machine.chunk_nbytes, **session_arguments, "plan": plan}
        if budget is None:
            raise ValueError("no budget. Options: --budget SIZE, such as --budget 2GiB; OOC_BUDGET; --plan FILE.")
        session = ooc.session.Session(budget, step_boundary="optimizer", **session_arguments)
    except (ValueError, TypeError, OocError, StoreError, MemoryFault, NativeBuildError) as error:
        raise RunError(str(error)) from error
    process = os.getpid()
    as_rank = functools.partial(_as_rank, budget, session_arguments, options, report_path)
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    ranks = OwnRanks(
        session,
        words if is_module else [*words[:-1], os.path.abspath(target)],
        as_rank if session.engine.manager.is_host else None,
    )
    try:
        with options.in_backward(), ranks.started():
            _execute(program, target, arguments)
    except BaseException as error:
        session.engine.runner.refusals.explain(error)
        sys.excepthook = functools.partial(_print_exception, sys.excepthook, options.debug)
        raise
    finally:
        if os.getpid() == process:  # a forked child that comes here ends as without us: the session is its parent's
            index = "main" if ranks.is_first_elsewhere else rank()
            _tell(session, report_path, index, progress=options.progress, ended_by=sys.exception())


def _as_rank(
    budget: int | str,
    session_arguments: Mapping[str, Any],
    options: RunOptions,
    report_path: Path | None,
    function: Callable[..., Any],
    index: int,
    *arguments: Any,
) -> Any:
    """Call a function within a session like that of `run`, in a process that the script has started for it."""
    session = ooc.session.Session(budget, step_boundary="optimizer", **session_arguments)
    try:
        with options.in_backward():
            return function(index, *arguments)
    except BaseException as error:
        session.engine.runner.refusals.explain(error)
        raise
    finally:  # it is not closed: what it has away would come back to memory, and the process ends
        _tell(session, report_path, index, progress=options.progress, ended_by=sys.exception())


def diagnose(
    target: str,
    arguments: Sequence[str],
    *,
    is_module: bool = False,
    report: str | None = None,
    max_steps: int = DIAGNOSED_STEPS,
) -> None:
    """Run a script as `run` does, but without a session; record its allocations and report on fragmentation.

    Args:
        report: File for the findings as JSON; they are printed to stderr in any case.
        max_steps: Optimizer steps after which the recording stops; the script goes on.

    Raises:
        RunError: There is no such script. Nothing has run.
        BaseException: Whatever the script raises, as it was raised; what was recorded until then is reported.
    """
    from ooc.fragmentation.live import Recording
    from ooc.fragmentation.page_faults import PageFaultWatch

    report_path = _report_path(report)
    program = _find_module(target) if is_module else _find_script(target)
    recording = Recording(max_steps=max_steps)
    watch = PageFaultWatch(lambda: recording.is_recording)
    recording.start()
    watch.start()
    try:
        _execute(program, target, arguments)
    except BaseException:
        sys.excepthook = functools.partial(_print_exception, sys.excepthook, False)
        raise
    finally:
        watch.stop()
        recording.stop()
        typed = " ".join(["-m", target] if is_module else [target])
        _tell_diagnosis(recording, watch if recording.device == "cpu" else None, target, typed, report_path)
        recording.close()


def _tell_diagnosis(
    recording: Recording, watch: PageFaultWatch | None, name: str, typed: str, report_path: Path | None
) -> None:
    """Report the findings. An error in that does not hide how the script ended."""
    from rich.console import Console
    from rich.markup import escape

    from ooc.fragmentation.errors import BadFile
    from ooc.fragmentation.planned import roomy_budget_nbytes
    from ooc.fragmentation.report import to_document
    from ooc.fragmentation.show import PIPE_WIDTH, show

    faults = None if watch is None else watch.report()
    try:
        found = recording.report()
        if report_path is not None:
            pages = None if faults is None else faults.document()
            write_json(_with_rank(report_path, rank()), {**to_document(found), "page_faults": pages})
    except BadFile as error:
        print(f"ooc run --diagnose: nothing to tell: {printable(error.reason)}", file=sys.stderr)
        return
    except OSError as error:
        print(f"ooc run --diagnose: cannot write {report_path}: {error}", file=sys.stderr)
    if rank() != 0:
        return
    console = Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)
    console.print(f"\nooc run --diagnose: {recording.num_steps} optimizer steps were recorded", highlight=False)
    show(found, console, name)
    if faults is not None:
        console.print("\n[bold]Memory given back and taken again[/]", highlight=False)
        for line in faults.lines(typed, roomy_budget_nbytes(found.stream)):
            console.print(escape(printable(line)), soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """The program that becomes `__main__`.

    Attributes:
        code: Compiles the source; called when everything else is set.
        path_entry: Its `sys.path[0]`.
        argv0: Its `sys.argv[0]`.
        attributes: The attributes of its module.
    """

    code: Callable[[], types.CodeType]
    path_entry: str
    argv0: str
    attributes: Mapping[str, Any]


def _find_script(path: str) -> _Script:
    importer: Any = pkgutil.get_importer(os.path.abspath(path))  # None for a plain file
    spec = importer.find_spec("__main__") if importer is not None else None
    if spec is not None:
        return _from_spec(spec, path_entry=os.path.abspath(path), argv0=path, package="")
    if os.path.isdir(path):
        raise RunError(f"can't find '__main__' module in {os.path.abspath(path)!r}", exit_code=1)
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        text = f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {os.strerror(error.errno or 0)}"
        raise RunError(text) from error
    return _Script(
        code=lambda: compile(source, os.path.abspath(path), "exec", dont_inherit=True),
        path_entry=os.path.dirname(os.path.realpath(path)),
        argv0=path,
        attributes={
            "__file__": os.path.abspath(path),
            "__cached__": None,
            "__package__": None,
            "__spec__": None,
            "__loader__": importlib.machinery.SourceFileLoader("__main__", path),
        },
    )


def _find_module(name: str) -> _Script:
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # so that it is found as `python -m` would find it
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ImportError as error:
        raise RunError(f"Error while finding module specification for {name!r} ({error})", exit_code=1) from error
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        raise RunError(f"No module named {name}", exit_code=1)
    return _from_spec(spec, path_entry=os.getcwd(), argv0=spec.origin or name, package=spec.parent or "")


def _from_spec(spec: importlib.machinery.ModuleSpec, *, path_entry: str, argv0: str, package: str) -> _Script:
    loader: Any = spec.loader

    def code() -> types.CodeType:
        found: types.CodeType | None = loader.get_code(spec.name)
        if found is None:
            raise ImportError(f"no code object for {spec.name}")
        return found

    return _Script(
        code=code,
        path_entry=path_entry,
        argv0=argv0,
        attributes={
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__package__": package,
            "__spec__": spec,
            "__loader__": loader,
        },
    )


def _execute(program: _Script, target: str, arguments: Sequence[str]) -> None:
    """Run the script as `__main__`, in place of this program."""
    module = types.ModuleType("__main__")
    vars(module).update(program.attributes, __builtins__=__builtins__)
    if "__annotations__" in vars(sys.modules["__main__"]):  # as CPython makes it, to 3.13
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    sys.argv[:] = [program.argv0, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = program.path_entry
    _log.debug("running %s as __main__", target)
    exec(program.code(), vars(module))


def _tell(
    session: ooc.session.Session,
    report_path: Path | None,
    index: int | str,
    *,
    progress: str | None,
    ended_by: BaseException | None,
) -> None:
    """Write the report, print the summary, and the hint if there is one: that goes to files, too, where nobody watches.

    Of ranks, whose `index` this is, each has its report (`_with_rank`), and the first prints. An error in any of it
    does not hide how the script ended.
    """
    may_hint = progress != "never" and sys.stderr is not None and index == 0
    wants_summary = may_hint and (progress == "always" or sys.stderr.isatty())
    if report_path is None and not may_hint:
        return
    report = session.report(with_timeline=report_path is not None)
    if ended_by is not None and not (isinstance(ended_by, SystemExit) and not ended_by.code):
        report["ended_by"] = {"type": type(ended_by).__name__, "message": str(ended_by)}
    if report_path is not None:
        report_path = _with_rank(report_path, index)
        try:
            write_json(report_path, report)
        except OSError as error:
            print(f"ooc run: cannot write the report to {report_path}: {error}", file=sys.stderr)
    if wants_summary:
        print(f"ooc run: {summary(report)}", file=sys.stderr)
    if may_hint and not _is_of_budget(ended_by) and (told := went_on_without(report)) is not None:
        print(f"ooc run: {told}", file=sys.stderr)
    has_failed = isinstance(ended_by, Exception)  # before the first step ended, that says enough
    has_trained = report["steps"] or ((report["in_core_peak_nbytes"] or trains_elsewhere(report)) and not has_failed)
    if report["hint"] and (wants_summary or (may_hint and has_trained)):
        print(f"ooc run: {report['hint']}", file=sys.stderr)


def _is_of_budget(error: BaseException | None) -> bool:
    """Whether this error is a `BudgetTooSmall`, or has come of one, or was one before TorchScript made it another."""
    return any(
        isinstance(each, BudgetTooSmall)
        or any(BudgetTooSmall.__name__ in note for note in getattr(each, "__notes__", ()))
        for each in _chain(error)
    )


def _report_path(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).absolute()  # the script may change directory
    if not path.parent.is_dir():
        raise RunError(f"--report {text}: there is no directory {path.parent}")
    if path.is_dir():
        raise RunError(f"--report {text}: is a directory")
    return path


def _with_rank(path: Path, index: int | str) -> Path:
    """A rank's own file: `run.json` of the first, `run.rank1.json`, ...; `main` is who only starts ranks.

    By `rank`, they can be told apart only once the script has joined its process group.
    """
    if index == 0 or is_special(path):
        return path
    own = f"rank{index}" if isinstance(index, int) else index
    return path.with_name(f"{path.stem}.{own}{path.suffix}")


# -- tracebacks


def _print_exception(
    print_it: Callable[..., Any],
    show_all: bool,
    kind: type[BaseException],
    error: BaseException,
    traceback: types.TracebackType | None,
) -> None:
    """`sys.excepthook`: prints the traceback as it would be without `ooc`."""
    if not show_all and not _is_our_bug(error, traceback):
        traceback = without_our_frames(traceback)
        error.__traceback__ = traceback  # from 3.13 on, what is printed is the exception's own
        for chained in _chain(error.__cause__ or error.__context__):
            chained.__traceback__ = without_our_frames(chained.__traceback__)
    print_it(kind, error, traceback)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it has come of, each once: a program may have chained them in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_our_bug(error: BaseException, traceback: types.TracebackType | None) -> bool:
    """Whether `ooc`'s own code raised it by mistake: then its frames must be shown."""
    if traceback is None or isinstance(error, (*_ON_PURPOSE, KeyboardInterrupt, SystemExit)):
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return _is_ours(traceback.tb_frame.f_code.co_filename) and traceback.tb_frame.f_code is not _execute.__code__


def without_our_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A copy of a traceback without what `ooc run` puts around the script and under its ops."""
    kept: list[types.TracebackType] = []
    is_under_us = False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is _execute.__code__:
            kept.clear()  # the interpreter's way to the script
            is_under_us = False
        elif _is_ours(code.co_filename):
            is_under_us = True
        elif not (is_under_us and code.co_filename.endswith(os.path.join("torch", "_ops.py"))):
            kept.append(traceback)
            is_under_us = False
        traceback = traceback.tb_next
    result: types.TracebackType | None = None
    for entry in reversed(kept):
        result = types.TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_ours(file_name: str) -> bool:
    return file_name.startswith(_OWN_DIRECTORIES)
