"""The gate's processes for tests that are not about them: forked from one that has imported torch."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.gate import ROOT, Processes
from tests import forked


class ForkedProcesses(Processes):
    """As the gate's over the fake driver; nothing ends them when a limit is used up."""

    def _run(self, command: Sequence[str], environment: dict[str, str]) -> tuple[int, str, str]:
        assert self._fake
        done = forked.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout=self._limit_s)
        return done.returncode, done.stdout, done.stderr
