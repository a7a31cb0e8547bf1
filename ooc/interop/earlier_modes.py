"""Dispatch modes that the program entered before it opened a session: their handlers run below the session's mode."""

from __future__ import annotations

import warnings

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ooc.tracing.call_sites import users_stacklevel


def warn_of_earlier_modes() -> None:
    """Warn of the program's own modes that are on. Those of torch count or log, and compute on what they are given."""
    found = [type(mode) for mode in _get_current_dispatch_mode_stack()]
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in found if kind.__module__.partition(".")[0] != "torch"]
    if names:
        warnings.warn(
            f"dispatch modes were entered before the session was opened ({', '.join(names)}): what they run on an op's "
            "own tensors is seen, what they do with others is not. Within planned steps those may have other bytes. "
            "Option: enter them while the session is open.",
            RuntimeWarning,
            stacklevel=users_stacklevel(),
        )
