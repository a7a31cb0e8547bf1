"""Settings and where each came from: argument, then `OOC_*` variable, then default; both are checked alike."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ooc.output_files import is_special
from ooc.units import parse_nbytes
from scheduler.policies import POLICIES
from vmm.files import StoreUnavailable, check_directory
from vmm.printable import printable

PROGRESS = ("never", "auto", "always")


class BadSetting(ValueError):
    """A setting's value cannot be meant. The message begins with where it was given: `OOC_BUDGET`, `--budget`.

    Attributes:
        place: That place.
        reason: The message without it.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        self.reason = printable(reason)
        super().__init__(f"{place}: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of `ooc run`.

    Attributes:
        name: As a parameter is named; on the command line with hyphens.
        default: What happens without it, in words.
        description: One line.
    """

    name: str
    default: str
    description: str

    @property
    def option(self) -> str:
        """The option that sets it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"OOC_{self.name.upper()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A setting's value. `value` is None where the default applies; `source` says why it is what it is."""

    setting: Setting
    value: str | None
    source: str

    @property
    def place(self) -> str:
        """Where the value was given, as the user writes it."""
        return self.setting.option if self.source == "argument" else self.setting.variable


SETTINGS: tuple[Setting, ...] = (
    Setting(name="budget", default="none: must be given", description="bytes for all large tensors, such as 400MiB"),
    Setting(name="device", default="cpu", description="whose memory the budget is of: cpu or cuda"),
    Setting(
        name="host_budget",
        default="half of what is free",
        description="with --device cuda, bytes of host memory to pin for what is evicted; the rest goes to the file",
    ),
    Setting(
        name="store",
        default="the first of $TMPDIR, /var/tmp and the current directory that will do",
        description="directory for the file of evicted bytes; on a disk",
    ),
    Setting(name="policy", default="auto", description="who plans"),
    Setting(name="window", default="searched", description="bytes that the policy 'window' looks ahead"),
    Setting(
        name="chunk", default="by budget, 64KiB to 2MiB; cuda: 2MiB to 16MiB", description="size of a piece of memory"
    ),
    Setting(
        name="threshold",
        default="64KiB; cuda: 1MiB",
        description="smaller tensors stay in ordinary memory, not counted",
    ),
    Setting(name="plan", default="none", description="plan to play, as ooc plan writes it; it has its own budget"),
    Setting(name="report", default="none", description="file for the report, as JSON"),
    Setting(
        name="progress",
        default="a summary (on a terminal) and a hint at the end alone; the bare option means auto",
        description="one line a step to stderr: auto (on a terminal), always; never: nor what comes at the end",
    ),
)


def resolve(arguments: Mapping[str, str | None], environment: Mapping[str, str] | None = None) -> dict[str, Resolved]:
    """Every setting by name: from `arguments` where given there, else from its variable, else the default.

    An empty variable counts as not set.
    """
    environment = os.environ if environment is None else environment
    found = {}
    for setting in SETTINGS:
        given, exported = arguments.get(setting.name), environment.get(setting.variable)
        if given is not None:
            found[setting.name] = Resolved(setting=setting, value=given, source="argument")
        elif exported:
            found[setting.name] = Resolved(setting=setting, value=exported, source=setting.variable)
        else:
            found[setting.name] = Resolved(setting=setting, value=None, source="default")
    return found


def check(found: Mapping[str, Resolved]) -> None:
    """Look at each value that was given, wherever it was. Raises `BadSetting` for the first that is wrong."""
    for name, resolved in found.items():
        if resolved.value is None:
            continue
        try:
            _CHECKS[name](resolved.value)
        except (ValueError, StoreUnavailable) as error:
            raise BadSetting(resolved.place, str(error)) from error


def check_environment(environment: Mapping[str, str] | None = None) -> list[str]:
    """Look at the variables that no option has, and at names that are nearly ours.

    Returns:
        What is probably a slip of the pen, a sentence each: other programs may have variables that begin with OOC_.

    Raises:
        BadSetting: A variable's value is not one of those that it can have.
    """
    environment = os.environ if environment is None else environment
    for name, options in _SWITCHES.items():
        text = environment.get(name, "")
        if text and text.strip().lower() not in options:
            where = " OOC_CACHE_DIR says in which directory." if os.sep in text else ""
            raise BadSetting(name, f"{text!r} is neither on nor off. Options: {', '.join(options)}.{where}")
    known = {*(setting.variable for setting in SETTINGS), *_SWITCHES, *_OTHER_VARIABLES}
    slips = []
    for name in environment:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name.startswith("OOC_") and name not in known and near:
            slips.append(f"{printable(name)} is set, and means nothing to ooc. Did you mean {near[0]}?")
    return slips


def is_turned_off(switch: str) -> bool:
    """Whether the environment turns off what is on by default: `OOC_PLAN_CACHE=0`, say."""
    return os.environ.get(switch, "").strip().lower() in ("0", "off", "no", "false")


_SWITCHES = {
    "OOC_PLAN_CACHE": ("0", "1", "off", "on", "no", "yes", "false", "true"),
    "OOC_NVTX": ("0", "1"),
    "OOC_BACKGROUND_PLANNING": ("0", "1", "off", "on", "no", "yes", "false", "true"),
}
_OTHER_VARIABLES = ("OOC_CACHE_DIR",)


def _check_size(what: str) -> Callable[[str], object]:
    return lambda text: parse_nbytes(text, what=what)


def _check_device(text: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise ValueError(f"device {text!r}: there is no such device. Options: cpu, cuda, cuda:1 and so on.")


def _check_choice(what: str, options: tuple[str, ...]) -> Callable[[str], None]:
    def check_it(text: str) -> None:
        if text not in options:
            raise ValueError(f"{what} {text!r}: there is no such {what}. Options: {', '.join(options)}.")

    return check_it


def _check_input(text: str) -> None:
    if not Path(text).exists():
        raise ValueError(f"there is no file {text!r}. Options: a plan, as ooc plan -o FILE writes it.")
    if Path(text).is_dir():
        raise ValueError(f"{text!r} is a directory. Options: a plan, as ooc plan -o FILE writes it.")


def _check_output(text: str) -> None:
    path = Path(text).absolute()
    if path.is_dir():
        raise ValueError(f"{text!r} is a directory. Options: the name of a file in it.")
    if not is_special(path) and not path.parent.is_dir():
        raise ValueError(f"{text!r}: there is no directory {path.parent}. Options: mkdir -p {path.parent}.")


_CHECKS: Mapping[str, Callable[[str], object]] = {
    "budget": _check_size("budget"),
    "device": _check_device,
    "host_budget": _check_size("host budget"),
    "store": lambda text: check_directory(Path(text), allow_memory=True),  # whether memory will do, the device says
    "policy": _check_choice("policy", tuple(sorted(POLICIES))),
    "window": _check_size("window"),
    "chunk": _check_size("chunk size"),
    "threshold": _check_size("threshold"),
    "plan": _check_input,
    "report": _check_output,
    "progress": _check_choice("progress", PROGRESS),
}
