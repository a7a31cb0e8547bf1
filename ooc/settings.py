"""Settings and where each came from: argument, then `OOC_*` variable, then default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


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
    Setting(name="chunk", default="by budget, 64KiB to 2MiB", description="size of a piece of memory"),
    Setting(name="threshold", default="64KiB", description="smaller tensors stay in ordinary memory, not counted"),
    Setting(name="plan", default="none", description="plan to play, as ooc plan writes it; it has its own budget"),
    Setting(name="report", default="none", description="file for the report, as JSON"),
    Setting(
        name="progress",
        default="never; the bare option means auto: quiet off a terminal",
        description="one line a step to stderr: never, auto, always",
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
