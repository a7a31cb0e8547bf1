"""What can be wrong with a file."""

from __future__ import annotations


class BadFile(ValueError):
    """The file is not what it seems, is damaged, or comes from a version we do not read.

    Attributes:
        path: The file's name, filled in by `read_streams`.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        self.path = path
        self.reason = message
        super().__init__(f"{path}: {message}" if path else message)
