"""The README's worked example runs and prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import scheduler


def test_worked_example() -> None:
    text = (Path(scheduler.__file__).parent / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(found[1], {})
    assert printed.getvalue() == found[2]
