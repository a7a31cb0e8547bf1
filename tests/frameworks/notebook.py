"""Runs a script in the cells of a notebook: a session is opened in one, and the others know nothing of it.

python notebook.py SCRIPT BUDGET REPORT
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import ooc
from ooc.reporting.report import write_json

script, budget, report = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
session = ooc.Session(budget, step_boundary="optimizer", debug=True)
runpy.run_path(script, run_name="__main__")
write_json(Path(report), session.report())
session.close()
