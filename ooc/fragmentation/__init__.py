"""Where memory went, and what would have fitted. README.md has the order to read the files in."""

from ooc.fragmentation.allocators import ALLOCATORS
from ooc.fragmentation.errors import BadFile
from ooc.fragmentation.readers import read_streams
from ooc.fragmentation.report import Report, make_report, to_document
from ooc.fragmentation.settings import CachingSettings, parse_settings
from ooc.fragmentation.stream import Stream

__all__ = [
    "ALLOCATORS",
    "BadFile",
    "CachingSettings",
    "Report",
    "Stream",
    "make_report",
    "parse_settings",
    "read_streams",
    "to_document",
]
