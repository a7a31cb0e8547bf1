"""The command line of `ooc`: parses the arguments and runs the sub-command.

Exit codes: 0 success, 1 failure, 2 the command line is wrong, 130 Ctrl-C; `ooc run` exits as the script
exits. A sub-command's module is imported only when it is chosen.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ooc.cli import plan as planning_cli
from ooc.cli.arguments import add_script_arguments
from ooc.fragmentation import cli as fragmentation
from ooc.html_report import cli as html_report
from ooc.settings import SETTINGS, BadSetting, Resolved, check, check_environment, resolve
from vmm.printable import printable

FAILURE_EXIT_CODE = 1
USAGE_EXIT_CODE = 2
INTERRUPT_EXIT_CODE = 130
_NEEDS_BUDGET = (
    "budget",
    "host_budget",
    "store",
    "policy",
    "window",
    "chunk",
    "threshold",
    "progress",
    "debug",
    "step_in_backward",
)
_BARE = {"--progress": "--progress=auto", "--step-in-backward": "--step-in-backward=first"}
"""Options with an optional value, and what they stand for without."""
_FLAGS = ("debug", "diagnose", "recompute", "no_recompute", "step_in_backward")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own). Returns the exit code.

    What the script of `ooc run` raises is not caught: it reaches the interpreter, as without `ooc`.
    """
    parsed = parser().parse_args(_spelled_out(sys.argv[1:] if arguments is None else arguments))
    if parsed.command == "run":
        return _run(parsed)
    try:
        if parsed.command == "doctor":
            from ooc.cli import doctor

            return doctor.main(store=parsed.store, as_json=parsed.json, device=parsed.device)
        if parsed.command == "fragmentation":
            return fragmentation.run(parsed)
        if parsed.command == "report":
            return html_report.run(parsed)
        if parsed.command in planning_cli.COMMANDS:
            return planning_cli.run(parsed)
        if parsed.device != "cpu":
            from ooc.cli import demo_cuda

            return demo_cuda.main(
                model=parsed.model,
                budget=parsed.budget,
                num_steps=parsed.steps,
                store=parsed.store,
                device=parsed.device,
            )
        from ooc.cli import demo

        return demo.main(
            model=parsed.model,
            budget=parsed.budget,
            num_steps=parsed.steps,
            out=parsed.out,
            store=parsed.store,
            picture=parsed.picture,
        )
    except KeyboardInterrupt:
        print("\nooc: interrupted", file=sys.stderr)
        return INTERRUPT_EXIT_CODE


def parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line. A test freezes its flags."""
    top = argparse.ArgumentParser(
        prog="ooc",
        description="Train PyTorch models larger than memory, under a budget in bytes that is held.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"ooc {own_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_fragmentation(commands)
    _add_report(commands)
    planning_cli.add_commands(commands)
    return top


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """Give `ooc run`'s bare options with an optional value that value: argparse would take SCRIPT for it."""
    if not arguments or arguments[0] != "run":
        return list(arguments)
    with_value = {setting.option for setting in SETTINGS} - _BARE.keys()
    done, rest = [arguments[0]], iter(arguments[1:])
    for word in rest:
        done.append(_BARE.get(word, word))
        if word in with_value:
            done.extend(value for value in [next(rest, None)] if value is not None)
        elif word == "--" or not word.startswith("-"):  # SCRIPT: what follows are its own arguments
            done.extend(rest)
    return done


def own_version() -> str:
    """The installed version; "unknown" from a source tree that was never installed."""
    try:
        return version("ooc")
    except PackageNotFoundError:
        return "unknown"


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run an unmodified training script within a budget",
        description="Run a script as `python SCRIPT ARGS...` would, within a budget. Step boundaries come from the "
        "script's optimizer. Everything after SCRIPT belongs to the script. Each option can also be set by an "
        "environment variable: OOC_BUDGET for --budget, and so on; the option wins.",
        usage="ooc run [options] SCRIPT ARGS...\n       ooc run [options] -m MODULE ARGS...",
        allow_abbrev=False,
    )
    for setting in SETTINGS:
        if setting.name == "progress":  # the bare flag is spelled out by `_spelled_out`
            run.add_argument(
                "--progress",
                metavar="[=WHEN]",
                help="one line a step to stderr: --progress or --progress=auto on a terminal, =always anywhere; "
                "=never: nor a summary and a hint at the end (default: those alone)",
            )
            continue
        metavars = {"device": "NAME", "store": "DIR", "policy": "NAME", "report": "FILE", "plan": "FILE"}
        metavar = metavars.get(setting.name, "SIZE")
        run.add_argument(setting.option, metavar=metavar, help=f"{setting.description} (default: {setting.default})")
    run.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        help="run ops again instead of moving what they made, where that is faster (default: the policy's; "
        "auto does on the CPU where a plan waits for the store)",
    )
    run.add_argument("--debug", action="store_true", help="make each touch of an evicted tensor a fault; slow")
    run.add_argument(
        "--step-in-backward",
        metavar="[=N]",
        type=_num_passes,
        help="apply each gradient inside the backward pass and free it: parameters, gradients and optimizer state pass "
        "through memory once a step; same results, or a refusal (clipping by a global norm, scalers, LBFGS). Where "
        "gradients are accumulated, in the last of as many passes as the first step has; =N: as a step has at most",
    )
    run.add_argument(
        "--diagnose",
        action="store_true",
        help="no budget: record the allocations of a few steps and say where memory goes (--report FILE: as JSON)",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    add_script_arguments(run, metavar="SCRIPT", what="the script, or with -m the module")


def _num_passes(text: str) -> int | Literal["first"]:
    """Backward passes to a step; "first": as many as the first one has."""
    if text == "first":
        return "first"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: backward passes to a step. Options: a number from 1 on; none")
    return int(text)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train in core and out of core, and compare",
        description="Train a model twice, in core and within a budget, each in a process of its own, and compare "
        "losses (to the last bit), memory (as the kernel counts it) and time.",
        allow_abbrev=False,
    )
    demo.add_argument("--model", default="gpt", metavar="NAME", help="gpt, resnet50, vgg16, lstm, bert (default: gpt)")
    demo.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu); cuda makes no plot")
    demo.add_argument("--budget", metavar="SIZE", help="default: a fifth of the in-core step's memory")
    demo.add_argument("--steps", type=int, metavar="N", help="steps of each run (default: by model)")
    demo.add_argument("--out", default="demo-out", metavar="DIR", help="where the picture goes (default: demo-out)")
    demo.add_argument(
        "--picture",
        metavar="FILE",
        help="draw memory over a step into this file, .png or .svg (default: memory-NAME.png in DIR)",
    )
    demo.add_argument("--store", metavar="DIR", help="directory for the file of evicted bytes")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine offers, and what would stop us",
        description="Say what this machine offers, and what would stop us. Exit code 1 if something would.",
        allow_abbrev=False,
    )
    doctor.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:1 (default: cpu)")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    doctor.add_argument("--store", metavar="DIR", help="directory to measure (default: where a session would put it)")


def _add_fragmentation(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    see = commands.add_parser(
        "fragmentation",
        help="see where memory went, and what would have fitted",
        description="Replay a recording of allocations (a PyTorch CUDA memory snapshot, a profiler's Chrome trace, or "
        "our own trace) through models of several allocators. Exit code 1 if it would not fit, 2 for a bad file.",
        allow_abbrev=False,
    )
    fragmentation.add_arguments(see)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="show a run, a trace or a plan: memory, schedule, chunks, what costs most",
        description="Make one HTML page (no network needed) of a run's report, a trace or a plan; two are compared. "
        "Or a timeline for Perfetto. Exit code 2 for a bad file.",
        allow_abbrev=False,
    )
    html_report.add_arguments(report)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.diagnose:
        return _diagnose(parsed)
    found = resolve(vars(parsed))
    if not _settings_are_fine(found):
        return USAGE_EXIT_CODE
    settings: dict[str, Any] = {name: resolved.value for name, resolved in found.items()}
    budget = settings.pop("budget")
    if budget is None and settings["plan"] is None:
        text = "ooc run: no budget. Options: --budget SIZE, such as --budget 2GiB; OOC_BUDGET."
        print(" ".join([text, *_misplaced(parsed)]), file=sys.stderr)
        return USAGE_EXIT_CODE
    from ooc.cli.run import RunError, RunOptions, run

    try:
        run(
            parsed.target,
            parsed.arguments,
            options=RunOptions(
                budget=budget,
                debug=parsed.debug,
                recompute=parsed.recompute,
                step_in_backward=parsed.step_in_backward is not None,
                micro_batches=None if parsed.step_in_backward == "first" else parsed.step_in_backward,
                **settings,
            ),
            is_module=parsed.is_module,
        )
    except RunError as error:
        print(f"ooc run: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def _misplaced(parsed: argparse.Namespace) -> list[str]:
    """What to say where options of ours were typed behind the script, which got them: nothing, or one sentence.

    For a run that has no budget: with one, they may well be the script's own.
    """
    with_value = {setting.option for setting in SETTINGS} | _BARE.keys()
    bare = {f"--{name.replace('_', '-')}" for name in _FLAGS} | _BARE.keys()
    ours: list[str] = []
    words = iter(parsed.arguments)
    for word in words:
        if word == "--":
            break
        if word in bare or word.partition("=")[0] in with_value:
            ours.append(word)
            if word in with_value - bare:
                ours.extend(value for value in [next(words, None)] if value is not None)
    if not ours:
        return []
    target = ["-m", parsed.target] if parsed.is_module else [parsed.target]
    right = printable(shlex.join(["ooc", "run", *ours, *target]))
    return [f"What follows {printable(parsed.target)} is its own; options of ooc run go before it: {right} ..."]


def _settings_are_fine(found: Mapping[str, Resolved]) -> bool:
    """Whether all settings are valid; if not, an error has been printed."""
    try:
        check(found)
        for slip in check_environment():
            print(f"ooc run: {slip}", file=sys.stderr)
    except BadSetting as error:
        print(f"ooc run: {error}", file=sys.stderr)
        return False
    return True


def _diagnose(parsed: argparse.Namespace) -> int:
    from ooc.cli.run import RunError, diagnose

    given = [name for name in vars(parsed) if name in _NEEDS_BUDGET and getattr(parsed, name)]
    if given:
        option = given[0].replace("_", "-")
        print(
            f"ooc run: --diagnose runs the script without a budget; --{option} is for running within one. "
            "Options: one of the two.",
            file=sys.stderr,
        )
        return USAGE_EXIT_CODE
    report = resolve(vars(parsed))["report"]
    if not _settings_are_fine({"report": report}):
        return USAGE_EXIT_CODE
    try:
        diagnose(parsed.target, parsed.arguments, is_module=parsed.is_module, report=report.value)
    except RunError as error:
        print(f"ooc run: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
