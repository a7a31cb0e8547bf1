"""Has the colouring of plans compiled, which is more than half of the time that planning takes without."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from scheduler.colouring import native
from vmm import native_build

_log = logging.getLogger(__name__)


@functools.cache
def colour_natively() -> Path | None:
    """Let plans of this process be coloured by native code. Its library; None: it could not be had, and none is needed.

    Compiled on first use, like all native parts. Idempotent.
    """
    try:
        path = native_build.build("scheduler_colouring", native.SOURCES, is_optional=True)
        native.use(path)
    except (native_build.NativeBuildError, OSError) as error:
        _log.info("plans are coloured in Python, which takes longer: %s", error)
        return None
    return path
