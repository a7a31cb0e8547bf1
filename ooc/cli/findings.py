"""Findings of `ooc doctor`: what was looked at, and what it means for a session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How serious a finding is."""

    FINE = "fine"
    """Nothing to do."""
    NOTE = "note"
    """Works, but slower or with less room than it could."""
    STOP = "stop"
    """No session can be opened or trusted until this is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. `remedy` is empty when there is nothing to do."""

    name: str
    value: str
    verdict: Verdict = Verdict.FINE
    remedy: str = ""
