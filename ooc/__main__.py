"""`python -m ooc`: the command `ooc`, where it is not on the path."""

import sys

from ooc.cli.main import main

sys.exit(main())
