"""`ooc report FILE [OTHER] -o report.html`, and `--trace-json` for Perfetto.

Exit codes: 0 fine, 2 a bad file or a bad command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vmm.printable import printable

FINE, BAD = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on `parser`."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a run's report (ooc run --report), a trace, a plan (with its trace, for charts); two are compared",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the HTML page (default: the first file's name, .html)")
    parser.add_argument(
        "--trace-json", metavar="FILE", help="write a timeline for Perfetto (Chrome Trace JSON) instead of a page"
    )
    parser.add_argument(
        "--beside",
        metavar="FILE",
        help="with --trace-json: torch.profiler's trace of the same process, to go into the same file",
    )
    parser.add_argument(
        "--endurance",
        metavar="SIZE",
        help="bytes that the store's disk or card is rated for (default: 100TiB)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command as parsed. Returns the exit code."""
    from ooc.html_report.facts import DEFAULT_ENDURANCE_NBYTES
    from ooc.output_files import write_output
    from ooc.reporting.documents import BadDocument, read_documents
    from ooc.units import parse_nbytes

    if parsed.trace_json is not None and parsed.output is not None:
        return _complain("--trace-json and --output make two different files. Options: one of them")
    if parsed.beside is not None and parsed.trace_json is None:
        return _complain("--beside goes with --trace-json FILE")
    try:
        endurance = DEFAULT_ENDURANCE_NBYTES
        if parsed.endurance is not None:
            endurance = parse_nbytes(parsed.endurance, what="endurance")
        documents = read_documents(parsed.files)
        if len(documents) > 2:
            return _complain(f"{len(documents)} documents; a page shows one or compares two")
        if parsed.trace_json is not None:
            from ooc.reporting.chrome_trace import write_chrome_trace

            target = Path(parsed.trace_json)
            write_chrome_trace(target, documents, beside=parsed.beside)
        else:
            from ooc.html_report.page import make_page

            target = Path(parsed.output) if parsed.output is not None else Path(parsed.files[0]).with_suffix(".html")
            page = make_page(documents, endurance_nbytes=endurance)
            write_output(target, page.encode("ascii", errors="xmlcharrefreplace"))
    except BadDocument as error:
        return _complain(str(error))
    except ValueError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"cannot write {error.filename or target}: {error.strerror or error}")
    print(target)
    return FINE


def _complain(message: str) -> int:
    print(f"ooc report: {printable(message)}", file=sys.stderr)
    return BAD
