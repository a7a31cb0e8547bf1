"""A CUDA driver without a GPU: the surface of `cuda.bindings.driver` over POSIX memory, with rules and races.

Part of the package, not of its tests, since everything that runs on CUDA is tested over it: this package,
the executor, and a user's own schedule on a machine without a GPU. It needs Linux and nothing else.

`FakeCuda` is the bindings object. Order to read: `names.py` (the types), `races.py` (vector clocks and
the race detector), `contexts.py` (which threads have one), `work.py` (streams, events, late execution),
`memory.py` (handles, mappings, rules), `bindings.py` (the calls).
"""

from vmm.testing.fake_cuda.bindings import FakeCuda
from vmm.testing.fake_cuda.names import CUresult, RuleBroken
from vmm.testing.fake_cuda.races import Race

__all__ = ["CUresult", "FakeCuda", "Race", "RuleBroken"]
