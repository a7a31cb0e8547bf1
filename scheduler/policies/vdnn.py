"""`vdnn`: virtualized DNN (Rhu et al., MICRO'16), as the window paper (section 2) and Melon (section 6) describe it.

What the forward pass makes and the backward pass needs is written out after its last use in the forward pass
and prefetched in the backward pass, one layer ahead: when an op starts that needs an offloaded variable, the
load for the next such op is issued. Two forms: `all` offloads every such activation, `conv` only the inputs of
convolutions, whose compute time hides the transfer. Everything else stays in memory.

Like the original, it knows no budget: `tune` takes the faster form of those that fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from scheduler.chains import Away, Chain, Gap, chains_of, residencies_of
from scheduler.plan import Machine, Residency
from scheduler.policies._fixed_gaps import (
    aways_by,
    best_of,
    does_not_fit,
    first_backward_op,
    held_chunks,
    is_activation,
)
from scheduler.trace import Trace

_OFFLOADS: tuple[Literal["conv", "all"], ...] = ("conv", "all")


def schedule(
    trace: Trace, machine: Machine, *, offload: Literal["conv", "all"], wrap: bool = True
) -> tuple[Residency, ...]:
    """Offload forward activations, prefetch them layer by layer.

    Args:
        trace: The step; the backward pass begins at the first op named so, else where most bytes are alive.
        machine: The budget is checked, not used.
        offload: `"all"` activations, or those that convolutions read (`"conv"`).
        wrap: Whether what lives across steps may stay in memory over the boundary of a cyclic step.

    Raises:
        BudgetTooSmall: What stays does not fit.
        ValueError: Another `offload`.
    """
    if offload not in _OFFLOADS:
        raise ValueError(f"offload={offload!r}: there is no such form. Options: {', '.join(_OFFLOADS)}")
    chains = chains_of(trace, machine, wrap=wrap)
    aways = _decide(trace, chains, offload)
    if int(held_chunks(trace, chains, aways).max(initial=0)) > machine.num_chunks:
        raise does_not_fit(trace, machine, chains, aways)
    return residencies_of(chains, aways, trace)


def tune(trace: Trace, machine: Machine, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Choose `offload` by simulation among the forms that fit, unless it is given."""
    if "offload" in parameters:
        return dict(parameters)
    chains = chains_of(trace, machine, wrap=bool(parameters.get("wrap", True)))
    decided = [_decide(trace, chains, offload) for offload in _OFFLOADS]
    fitting = [
        index
        for index, aways in enumerate(decided)
        if int(held_chunks(trace, chains, aways).max(initial=0)) <= machine.num_chunks
    ]
    best = best_of((residencies_of(chains, decided[i], trace) for i in fitting), trace, machine) if fitting else None
    chosen = "all" if best is None else _OFFLOADS[fitting[best]]
    return {**parameters, "offload": chosen}


def _decide(trace: Trace, chains: tuple[Chain, ...], offload: Literal["conv", "all"]) -> list[Away]:
    split = first_backward_op(trace)
    offloaded = {
        id(gap): gap.latest_load
        for chain in chains
        if is_activation(trace, chain) and (offload == "all" or _feeds_convolution(trace, chain, split))
        for gap in chain.gaps
        if gap.latest_load is not None and gap.earliest_release <= split <= gap.latest_load
    }
    needs = sorted(set(offloaded.values()))
    before = {after: op for op, after in pairwise([split, *needs])}

    def rule(_: Chain, gap: Gap) -> int | None:
        need = offloaded.get(id(gap))
        return None if need is None else before[need]

    return aways_by(rule, chains)


def _feeds_convolution(trace: Trace, chain: Chain, split: int) -> bool:
    """Does a convolution of the forward pass read it?"""
    return any(
        "conv" in trace.ops[op].name and any(use.variable == chain.variable and use.reads for use in trace.ops[op].uses)
        for op in {pin.op_index for pin in chain.pins if pin.op_index < min(split, len(trace.ops))}
    )
