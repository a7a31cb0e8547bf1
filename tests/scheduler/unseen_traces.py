"""Steps in shapes that no planner was tuned for: each in any size, with parameters and optimizer state that move.

Sizes are drawn at random where real nets have them irregular (ragged trees, tokens routed to experts), so that equal
gaps and equal ties are rare; times follow from sizes at made-up rates. All are deterministic for a seed.
"""

from __future__ import annotations

import random

from scheduler.trace import Trace
from tests.scheduler.recompute_traces import Tape

MIB = 1 << 20


def dense_blocks(seed: int = 0, *, blocks: int = 4, layers: int = 6, nbytes: int = 24 * MIB) -> Trace:
    """DenseNet: in each block a layer reads all before it; between blocks all shrinks by half."""
    rng, t = random.Random(seed), Tape()
    features = [t.call(_light_ns(nbytes), (), nbytes)]
    growth = nbytes // 4
    for _ in range(blocks):
        for _ in range(layers):
            width = sum(t.nbytes[v] for v in features)
            joined = t.call(_light_ns(width), tuple(features), width)
            norm = t.call(_light_ns(width), (joined, t.weight(1 << 14)), width, saves="i")
            act = t.call(_light_ns(width), (norm,), width, saves="o")
            weight = t.weight(rng.randrange(1, 4) * MIB // 2)
            features.append(t.call(_heavy_ns(width, rng), (act, weight), growth, saves="i"))
        width = sum(t.nbytes[v] for v in features)
        growth = max(growth // 2, MIB // 4)
        features = [t.call(_light_ns(width), tuple(features), width // 2, saves="i")]
    return t.trained(features[0], num_states=1)


def ragged_trees(seed: int = 0, *, trees: int = 6, leaves: int = 20, nbytes: int = 2 * MIB) -> Trace:
    """A recursive cell over trees that are drawn at random, with few large weights that every cell reads."""
    rng, t = random.Random(seed), Tape()
    weights = [t.weight(8 * MIB) for _ in range(3)]
    table = t.weight(64 * MIB)
    roots = []
    for _ in range(trees):
        sizes = [nbytes * rng.randrange(1, 4) // 2 for _ in range(rng.randrange(leaves // 2, leaves))]
        alive = [t.call(_light_ns(size), (table,), size) for size in sizes]
        while len(alive) > 1:
            at = rng.randrange(len(alive) - 1)
            left, right = alive[at : at + 2]
            size = max(t.nbytes[left], t.nbytes[right])
            gates = [t.call(_heavy_ns(size, rng), (left, right, w), size, saves="i") for w in weights]
            mixed = t.call(_light_ns(size), tuple(gates), size, saves="i")
            alive[at : at + 2] = [t.call(_light_ns(size), (mixed,), size, saves="o")]
        roots.append(alive[0])
    return t.trained(t.call(_light_ns(nbytes), tuple(roots), nbytes, saves="i"), num_states=2)


def unrolled_gan(seed: int = 0, *, looks: int = 5, layers: int = 6, nbytes: int = 8 * MIB) -> Trace:
    """A generator, and a discriminator whose weights are changed `looks` times by its own gradients on the way."""
    rng, t = random.Random(seed), Tape()
    x = t.call(_light_ns(nbytes), (), nbytes)
    for _ in range(layers):
        size = nbytes * rng.randrange(1, 4)
        x = t.call(_heavy_ns(size, rng), (x, t.weight(4 * MIB)), size, saves="i")
        x = t.call(_light_ns(size), (x,), size, saves="o")
    fake = x
    weights = [t.call(_light_ns(3 * MIB), (t.weight(3 * MIB),), 3 * MIB) for _ in range(layers)]
    for _ in range(looks):
        acts = [fake]
        for w in weights:
            product = t.call(_heavy_ns(nbytes, rng), (acts[-1], w), nbytes, saves="i")
            acts.append(t.call(_light_ns(nbytes), (product,), nbytes, saves="o"))
        gradient = t.call(_light_ns(nbytes), (acts[-1],), nbytes, saves="i")
        changed = []
        for w, act, out in reversed(list(zip(weights, acts, acts[1:], strict=False))):
            masked = t.call(_light_ns(nbytes), (gradient, out), nbytes, saves="i")
            change = t.call(_heavy_ns(nbytes, rng), (masked, act), 3 * MIB, saves="i")
            gradient = t.call(_heavy_ns(nbytes, rng), (masked, w), nbytes, saves="i")
            changed.append(t.call(_light_ns(3 * MIB), (w, change), 3 * MIB, saves="i"))
        weights = changed[::-1]
    for w in weights:
        x = t.call(_heavy_ns(nbytes, rng), (x, w), nbytes, saves="io")
    return t.trained(x, num_states=2)


def u_net(seed: int = 0, *, depth: int = 5, convs: int = 3, nbytes: int = 96 * MIB) -> Trace:
    """Down and up again; what each level made on the way down is read again at the same level on the way up."""
    rng, t = random.Random(seed), Tape()

    def level(x: int, size: int) -> int:
        for _ in range(convs):
            x = t.call(_heavy_ns(size, rng), (x, t.weight(rng.randrange(1, 9) * MIB)), size, saves="i")
            x = t.call(_light_ns(size), (x,), size, saves="i")
            x = t.call(_light_ns(size), (x,), size, saves="o")
        return x

    x = t.call(_light_ns(nbytes), (), nbytes)
    skips = []
    for k in range(depth):
        skips.append(x := level(x, nbytes >> k))
        x = t.call(_light_ns(nbytes >> k), (x,), nbytes >> (k + 1), saves="i")
    x = level(x, nbytes >> depth)
    for k in reversed(range(depth)):
        up = t.call(_light_ns(nbytes >> k), (x,), nbytes >> k)
        x = level(t.call(_light_ns(nbytes >> k), (up, skips[k]), 2 * (nbytes >> k)), nbytes >> k)
    return t.trained(x, num_states=2)


def experts(seed: int = 0, *, layers: int = 6, num_experts: int = 8, nbytes: int = 16 * MIB) -> Trace:
    """A mixture of experts: each layer routes uneven shares of the tokens through experts with weights of their own."""
    rng, t = random.Random(seed), Tape()
    x = t.call(_light_ns(nbytes), (), nbytes)
    for _ in range(layers):
        norm = t.call(_light_ns(nbytes), (x,), nbytes, saves="i")
        mixed = t.call(_heavy_ns(nbytes, rng), (norm, t.weight(6 * MIB)), nbytes, saves="i")
        router = t.call(_light_ns(nbytes), (mixed, t.weight(1 << 16)), max(nbytes // 64, 1), saves="io")
        shares = [rng.expovariate(1.0) for _ in range(num_experts)]
        outs = []
        for share in shares:
            size = int(nbytes * share / sum(shares)) // 4096 * 4096
            if size:
                taken = t.call(_light_ns(size), (mixed, router), size)
                up = t.call(_heavy_ns(2 * size, rng), (taken, t.weight(12 * MIB)), 4 * size, saves="i")
                act = t.call(_light_ns(4 * size), (up,), 4 * size, saves="i")
                outs.append(t.call(_heavy_ns(2 * size, rng), (act, t.weight(12 * MIB)), size, saves="i"))
        joined = t.call(_light_ns(nbytes), (*outs, router), nbytes, saves="i")
        x = t.call(_light_ns(nbytes), (x, joined), nbytes)
    return t.trained(x, num_states=2)


def _light_ns(nbytes: int) -> int:
    return max(nbytes // 8, 1)


def _heavy_ns(nbytes: int, rng: random.Random) -> int:
    return max(nbytes * rng.randrange(8, 25) // 8, 1)


UNSEEN = {
    "dense_blocks": dense_blocks,
    "ragged_trees": ragged_trees,
    "unrolled_gan": unrolled_gan,
    "u_net": u_net,
    "experts": experts,
}
