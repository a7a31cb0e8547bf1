"""Steps on which recomputation is judged: residual, dense, recurrent, tree-shaped, an unrolled GAN.

A step is a forward pass on a tape and the backward pass that follows from it. Sizes and times are made up; what
matters is what is saved for the backward pass, what the program frees at once, and what is read by many later ops.
Parameters are always in memory, as the published simulator of dynamic tensor rematerialisation has them, and the
results (gradients of parameters) are all needed at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scheduler.trace import Trace
from tests.scheduler.model_traces import _Step

KIB = 1 << 10


@dataclass(frozen=True)
class _Call:
    """One op of the forward pass: its operands, its result, its time, and what its backward op reads."""

    reads: tuple[int, ...]
    result: int
    duration_ns: int
    saved: tuple[int, ...]


@dataclass
class Tape:
    """Notes a forward pass, then writes it with its backward pass.

    Attributes:
        nbytes: Sizes, by the numbers that `weight` and `call` hand out.
        calls: What was called, in order.
        weights: Numbers of parameters.
    """

    nbytes: list[int] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    weights: set[int] = field(default_factory=set)

    def weight(self, nbytes: int) -> int:
        """A parameter."""
        self.nbytes.append(nbytes)
        self.weights.add(len(self.nbytes) - 1)
        return len(self.nbytes) - 1

    def call(self, duration_ns: int, reads: tuple[int, ...], nbytes: int, *, saves: str = "") -> int:
        """An op; `saves` names what its backward op reads: "i" its operands, "o" its result."""
        self.nbytes.append(nbytes)
        result = len(self.nbytes) - 1
        saved = (*(reads if "i" in saves else ()), *((result,) if "o" in saves else ()))
        self.calls.append(_Call(reads, result, duration_ns, tuple(dict.fromkeys(saved))))
        return result

    def backward(self, result: int) -> Trace:
        """The step from the first call to the last gradient; each variable is freed after its last use."""
        step, places, gradients = self._written(result)
        step.op("results", 1, tuple(sorted(gradients.values())))
        step.free(*sorted(gradients.values()))
        if places[result] not in step.deaths:
            step.free(places[result])
        return _as_simulated(step.finish())

    def trained(self, result: int, *, num_states: int) -> Trace:
        """The same with an optimizer that has `num_states` variables a parameter; all may be away."""
        step, places, gradients = self._written(result)
        for v in sorted(self.weights & gradients.keys()):
            states = tuple(step.carry(self.nbytes[v], "optimizer_state", "state") for _ in range(num_states))
            taken = (places[v], gradients[v], *states)
            step.op("update", max(self.nbytes[v] // 10, 1), taken, writes=(places[v], *states))
        step.free(*sorted(gradients.values()))
        if places[result] not in step.deaths:
            step.free(places[result])
        trace = step.finish()
        made = (replace(op, replayable=op.name in ("forward", "backward", "add")) for op in trace.ops)
        return replace(trace, ops=tuple(made))

    def _written(self, result: int) -> tuple[_Step, dict[int, int], dict[int, int]]:
        """Forward and backward; what each number became, and the gradients that are left."""
        step, places = _Step(), dict[int, int]()
        for v in sorted(self.weights):
            places[v] = step.carry(self.nbytes[v], "parameter", "weight")
        saved = {v for call in self.calls for v in call.saved} | self.weights | {result}
        last = {v: i for i, call in enumerate(self.calls) for v in (*call.reads, call.result)}
        for i, call in enumerate(self.calls):
            reads = tuple(dict.fromkeys(places[v] for v in call.reads))
            new = ((self.nbytes[call.result], "activation"),)
            (places[call.result],) = step.op("forward", call.duration_ns, reads, new)
            done = dict.fromkeys(v for v in (*call.reads, call.result) if last[v] == i and v not in saved)
            step.free(*(places[v] for v in done))
        gradients = {result: step.op("loss", 1, (places[result],), ((self.nbytes[result], "gradient"),))[0]}
        first = {v: i for i, call in reversed(list(enumerate(self.calls))) for v in call.saved}
        for i, call in reversed(list(enumerate(self.calls))):
            self._write_backward(step, places, gradients, call)
            step.free(*(places[v] for v in call.saved if first[v] == i and v not in self.weights))
        return step, places, gradients

    def _write_backward(self, step: _Step, places: dict[int, int], gradients: dict[int, int], call: _Call) -> None:
        """The gradients of a call's operands, added to what there is of them."""
        gradient = gradients.pop(call.result, None)
        if gradient is None:
            return
        wanted = tuple(dict.fromkeys(call.reads))
        sizes = tuple((self.nbytes[v], "gradient") for v in wanted)
        new = step.op("backward", 2 * call.duration_ns, (gradient, *(places[v] for v in call.saved)), sizes)
        step.free(gradient)
        for v, made in zip(wanted, new, strict=True):
            if v in gradients:
                both = gradients[v], made
                (made,) = step.op("add", call.duration_ns // 10, both, ((self.nbytes[v], "gradient"),))
                step.free(*both)
            gradients[v] = made


def _as_simulated(trace: Trace) -> Trace:
    """All ops but the last may run again; parameters are never away."""
    return replace(
        trace,
        ops=(*(replace(op, replayable=True) for op in trace.ops[:-1]), trace.ops[-1]),
        variables=tuple(replace(v, evictable=v.birth_tick is not None) for v in trace.variables),
    )


def residual(blocks: int = 12, nbytes: int = 64 * KIB) -> Trace:
    """conv - norm - relu, twice a block, and the block's input is added."""
    t = Tape()
    x = t.call(10, (), nbytes)
    for _ in range(blocks):
        entry = x
        for _ in range(2):
            conv = t.call(900, (x, t.weight(KIB)), nbytes, saves="i")
            norm = t.call(120, (conv,), nbytes, saves="i")
            x = t.call(60, (norm,), nbytes, saves="o")
        x = t.call(40, (x, entry), nbytes)
    return t.backward(x)


def dense(layers: int = 16, nbytes: int = 16 * KIB) -> Trace:
    """Each layer reads all results before it, joined."""
    t = Tape()
    features = [t.call(10, (), 2 * nbytes)]
    for _ in range(layers):
        width = sum(t.nbytes[v] for v in features)
        joined = t.call(width // 200, tuple(features), width)
        norm = t.call(width // 150, (joined,), width, saves="i")
        act = t.call(width // 150, (norm,), width, saves="o")
        features.append(t.call(width // 60, (act, t.weight(KIB)), nbytes, saves="i"))
    return t.backward(features[-1])


def recurrent(steps: int = 40, nbytes: int = 16 * KIB) -> Trace:
    """One cell, unrolled; each of its gates reads the state, and its weights are the same at each step."""
    t = Tape()
    weights = [t.weight(4 * KIB) for _ in range(3)]
    state = t.call(10, (), nbytes)
    memory = t.call(10, (), nbytes)
    for _ in range(steps):
        gates = [t.call(60, (t.call(400, (state, w), nbytes, saves="i"),), nbytes, saves="o") for w in weights]
        kept = t.call(30, (memory, gates[0]), nbytes, saves="i")
        new = t.call(30, (gates[1], gates[2]), nbytes, saves="i")
        memory = t.call(20, (kept, new), nbytes)
        state = t.call(50, (memory,), nbytes, saves="o")
    return t.backward(state)


def tree(depth: int = 5, nbytes: int = 16 * KIB) -> Trace:
    """A cell that joins two children, from the leaves up."""
    t = Tape()
    weight = t.weight(4 * KIB)
    level = [t.call(100, (), nbytes) for _ in range(1 << depth)]
    while len(level) > 1:
        joined = []
        for left, right in zip(level[::2], level[1::2], strict=True):
            both = t.call(30, (left, right), 2 * nbytes, saves="i")
            mixed = t.call(500, (both, weight), nbytes, saves="i")
            joined.append(t.call(60, (mixed,), nbytes, saves="o"))
        level = joined
    return t.backward(level[0])


def unrolled(steps: int = 8, layers: int = 5, nbytes: int = 16 * KIB) -> Trace:
    """A GAN that looks ahead: each step's weights are made from the last step's by its own small backward pass."""
    t = Tape()
    noise = t.call(50, (), nbytes)
    fake = t.call(400, (noise, t.weight(4 * KIB)), nbytes, saves="i")
    weights = [t.call(20, (t.weight(4 * KIB),), 4 * KIB) for _ in range(layers)]
    for _ in range(steps):
        acts = [fake]
        for w in weights:
            product = t.call(300, (acts[-1], w), nbytes, saves="i")
            acts.append(t.call(40, (product,), nbytes, saves="o"))
        gradient = t.call(20, (acts[-1],), nbytes, saves="i")
        new = []
        for w, act, out in reversed(list(zip(weights, acts, acts[1:], strict=False))):
            masked = t.call(40, (gradient, out), nbytes, saves="i")
            change = t.call(300, (masked, act), 4 * KIB, saves="i")
            gradient = t.call(300, (masked, w), nbytes, saves="i")
            new.append(t.call(15, (w, change), 4 * KIB, saves="i"))
        weights = new[::-1]
    out = fake
    for w in weights:
        out = t.call(340, (out, w), nbytes, saves="io")
    return t.backward(out)


SHAPES = {"residual": residual, "dense": dense, "recurrent": recurrent, "tree": tree, "unrolled": unrolled}
