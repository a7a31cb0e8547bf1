"""A fault of the planner's does not end a user's training, which goes on on demand; in a test it is a failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Refusal(logging.Handler):
    """Raises, in the code that was about to go on."""

    def emit(self, record: logging.LogRecord) -> None:
        if "a fault in the planner" in record.getMessage():
            error = record.exc_info[1] if record.exc_info else None
            raise AssertionError(record.getMessage()) from error


def refuse_planner_faults() -> None:
    """From now on, in this process."""
    logger = logging.getLogger("ooc")
    if not any(isinstance(handler, _Refusal) for handler in logger.handlers):
        logger.addHandler(_Refusal(level=logging.ERROR))


@contextmanager
def faults_allowed() -> Iterator[None]:
    """For a test that makes one."""
    logger = logging.getLogger("ooc")
    refusals = [handler for handler in logger.handlers if isinstance(handler, _Refusal)]
    for handler in refusals:
        logger.removeHandler(handler)
    try:
        yield
    finally:
        for handler in refusals:
            logger.addHandler(handler)
