"""Keeps the broadcast in DistributedDataParallel's constructor within the budget. See ooc/DESIGN.md, "Collectives".

The constructor copies up to 250 MiB of the model together and broadcasts the copy. While a session is open it copies
less at a time, which changes no bit: a broadcast only copies. All ranks must copy equally much, and they may have other
budgets, or no session at all. So each rank puts its limit into the process group's store before a collective that
every rank takes part in (the constructor's comparison of the parameters' shapes); after it each finds either the limits
of all ranks, and takes the least, or that one is missing, and changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from ooc.interop.replacements import Replacements

_log = logging.getLogger(__name__)

_BUDGET_FRACTION = 8
"""At most 1/8 of the budget is copied together: there may be two such copies at once, beside one operand."""


class ModelBroadcast:
    """Replaces the two functions by which the constructor compares and broadcasts a model, while a session is open.

    Args:
        budget_nbytes: Tells the budget of now.
        is_ours: Whether the calling thread is the session's, and the session open.
    """

    def __init__(self, *, budget_nbytes: Callable[[], int], is_ours: Callable[[], bool]) -> None:
        self._budget_nbytes = budget_nbytes
        self._is_ours = is_ours
        self._agreed_nbytes: int | None = None  # for the broadcast that comes next
        self._replacements = Replacements()

    def __repr__(self) -> str:
        return "<ModelBroadcast>"

    def open(self) -> None:
        """Replace the functions. Without torch.distributed, or in a torch that has others: nothing."""
        dist = torch.distributed
        names = ("_verify_params_across_processes", "_broadcast_coalesced")
        if not dist.is_available() or not all(hasattr(dist, name) for name in names):
            return
        compare, broadcast = (getattr(dist, name) for name in names)

        @functools.wraps(compare)
        def compare_and_agree(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_ours():
                return compare(group, *args, **kwargs)
            keys = self._offer(group)
            result = compare(group, *args, **kwargs)
            self._agreed_nbytes = _least(keys)
            return result

        @functools.wraps(broadcast)
        def broadcast_in_parts(group: Any, tensors: Any, buffer_nbytes: int, *args: Any, **kwargs: Any) -> Any:
            if self._is_ours() and self._agreed_nbytes is not None:
                buffer_nbytes = min(buffer_nbytes, self._agreed_nbytes)
                self._agreed_nbytes = None
            return broadcast(group, tensors, buffer_nbytes, *args, **kwargs)

        for name, ours in zip(names, (compare_and_agree, broadcast_in_parts), strict=True):
            self._replacements.replace(dist, name, ours)

    def close(self) -> None:
        """Put them back. Idempotent."""
        self._replacements.put_back()
        self._agreed_nbytes = None

    def _offer(self, group: Any) -> list[str]:
        """Tell the other ranks how much this one can take at a time. The keys of all, in the store.

        The number of collectives so far is the same on every rank of a group, whatever else each has done.
        """
        dist = torch.distributed
        prefix = f"ooc/broadcast/{group.group_name}/{group._get_sequence_number_for_group()}"
        limit = max(self._budget_nbytes() // _BUDGET_FRACTION, 1)
        dist.distributed_c10d._get_default_store().set(f"{prefix}/{dist.get_rank()}", str(limit))
        return [f"{prefix}/{rank}" for rank in dist.get_process_group_ranks(group)]


def _least(keys: list[str]) -> int | None:
    """The least limit that the ranks have told; None if one of them has told none."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if not store.check(keys):
        _log.info("the model is broadcast 250 MiB at a time: not every rank has a session")
        return None
    return min(int(store.get(key)) for key in keys)
