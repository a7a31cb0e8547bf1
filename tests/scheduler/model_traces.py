"""Synthetic traces in the shape of real training steps, for judging plans by their stalls.

Sizes and times follow from layer shapes at a stated compute rate; they are not measurements. What
matters is the structure: activations held from forward to backward in reverse order, temporaries
inside backward ops, parameters and optimizer state used once or a few times a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.trace import Op, Trace, Use, Variable

MIB = 1 << 20


@dataclass
class _Step:
    """Writes a trace op by op."""

    tick: int = 0
    ops: list[Op] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    births: dict[int, int] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    inherits: dict[int, int] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    kinds: list[tuple[int, str, str]] = field(default_factory=list)

    def carry(self, nbytes: int, kind: str, label: str) -> int:
        """A variable that exists when the step starts."""
        self.kinds.append((nbytes, kind, label))
        self.carried.add(len(self.kinds) - 1)
        return len(self.kinds) - 1

    def op(
        self,
        name: str,
        duration_ns: int,
        reads: tuple[int, ...],
        new: tuple[tuple[int, str], ...] = (),
        writes: tuple[int, ...] = (),
        temporary_nbytes: int = 0,
    ) -> list[int]:
        """One op; returns the variables that it allocates (`new`: sizes and kinds)."""
        start = self.tick
        self.tick += 1
        made = []
        uses = {v: Use(variable=v, reads=True, writes=v in writes) for v in reads}
        for v in writes:
            uses.setdefault(v, Use(variable=v, reads=False, writes=True))
        sizes = [*new, *([(temporary_nbytes, "temporary")] if temporary_nbytes else [])]
        for nbytes, kind in sizes:
            self.kinds.append((nbytes, kind, name))
            v = len(self.kinds) - 1
            self.births[v] = self.tick
            self.tick += 1
            uses[v] = Use(variable=v, reads=False, writes=True)
            made.append(v)
        if temporary_nbytes:
            self.free(made.pop())
        self.tick += 1
        self.ops.append(
            Op(
                name=name,
                start_tick=start,
                stop_tick=self.tick,
                duration_ns=max(int(duration_ns), 1),
                uses=tuple(uses.values()),
            )
        )
        return made

    def free(self, *variables: int) -> None:
        """Frees at the present place."""
        for v in variables:
            self.deaths[v] = self.tick
            self.tick += 1

    def finish(self, cyclic: bool = True) -> Trace:
        self.tick += 1
        variables = []
        for v, (nbytes, kind, label) in enumerate(self.kinds):
            alive = v not in self.deaths
            becomes = self.inherits.get(v, v if v in self.carried else None) if alive and cyclic else None
            variables.append(
                Variable(
                    nbytes=nbytes,
                    birth_tick=self.births.get(v),
                    death_tick=self.deaths.get(v),
                    becomes=becomes,
                    kind=kind,
                    label=label,
                )
            )
        return Trace(ops=tuple(self.ops), variables=tuple(variables), num_ticks=self.tick, cyclic=cyclic)


def conv_net(*, num_blocks: int = 10, batch: int = 32, channels: int = 64, size: int = 64, rate: float = 2e11) -> Trace:
    """conv - batch norm - relu blocks with SGD; parameters are small and left out."""
    s = _Step()
    act = batch * channels * size * size * 4
    flop = 2 * 9 * channels * channels * size * size * batch
    conv_ns, light_ns = flop / rate * 1e9, act / 10e9 * 1e9
    (x,) = s.op("input", light_ns, (), ((act, "input"),))
    saved = []
    for _ in range(num_blocks):
        (c,) = s.op("conv", conv_ns, (x,), ((act, "activation"),), temporary_nbytes=act)
        (b,) = s.op("batch_norm", light_ns, (c,), ((act, "activation"),))
        (r,) = s.op("relu", light_ns, (b,), ((act, "activation"),))
        s.free(b)
        saved.append((x, c, r))
        x = r
    (grad,) = s.op("loss", light_ns, (x,), ((act, "gradient"),))
    for x, c, r in reversed(saved):
        (gb,) = s.op("relu_backward", light_ns, (grad, r), ((act, "gradient"),))
        s.free(grad, r)
        (gc,) = s.op("batch_norm_backward", 2 * light_ns, (gb, c), ((act, "gradient"),))
        s.free(gb, c)
        (grad,) = s.op("conv_backward", 2 * conv_ns, (gc, x), ((act, "gradient"),), temporary_nbytes=act)
        s.free(gc)
    s.free(grad, saved[0][0])
    return s.finish()


def resnet50(*, batch: int = 16, image: int = 224, rate: float = 2e11, with_parameters: bool = True) -> Trace:
    """ResNet-50 with bottleneck blocks, SGD with momentum."""
    s = _Step()
    tape: list[tuple[str, tuple[int, ...], int, float, int, int]] = []

    def conv(x: int, cin: int, cout: int, k: int, side: int) -> int:
        out = batch * cout * side * side * 4
        flop = 2 * k * k * cin * cout * side * side * batch
        weight = s_params[len(tape_convs)] if with_parameters else -1
        tape_convs.append((cin, cout, k))
        reads = (x, weight) if with_parameters else (x,)
        (c,) = s.op("conv", flop / rate * 1e9, reads, ((out, "activation"),), temporary_nbytes=out // 2)
        (b,) = s.op("batch_norm", out / 10, (c,), ((out, "activation"),))
        s.op("relu_", out / 20, (b,), writes=(b,))
        tape.append(("conv", (x, c, b), weight, flop / rate * 1e9, out, cin * cout * k * k * 4))
        return b

    shapes = _resnet50_convs()
    tape_convs: list[tuple[int, int, int]] = []
    s_params = []
    if with_parameters:
        for cin, cout, k in shapes:
            s_params.append(s.carry(max(cin * cout * k * k * 4, 4), "parameter", f"{cin}x{cout}x{k}"))
        momenta = [s.carry(s.kinds[p][0], "optimizer_state", "momentum") for p in s_params]
    (x,) = s.op("input", 1e5, (), ((batch * 3 * image * image * 4, "input"),))
    first = x
    side = image // 2
    x = conv(x, 3, 64, 7, side)
    side //= 2
    (x,) = s.op("max_pool", 1e6, (x,), ((batch * 64 * side * side * 4, "activation"),))
    tape.append(("pool", (tape[-1][1][2], x), -1, 1e6, 0, 0))
    cin = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        mid, cout = 64 << stage, 256 << stage
        for block in range(blocks):
            entry = x
            if stage and block == 0:
                side //= 2
            x = conv(x, cin, mid, 1, side)
            x = conv(x, mid, mid, 3, side)
            x = conv(x, mid, cout, 1, side)
            if block == 0:
                entry = conv(entry, cin, cout, 1, side)
            s.op("add_", s.kinds[x][0] / 10, (x, entry), writes=(x,))
            cin = cout
    (grad,) = s.op("loss", 1e6, (x,), ((s.kinds[x][0], "gradient"),))
    grads = []
    freed: set[int] = {first}
    for kind, variables, weight, conv_ns, out, weight_nbytes in reversed(tape):
        if kind == "pool":
            (new,) = s.op("pool_backward", conv_ns, (grad, *variables), ((s.kinds[variables[0]][0], "gradient"),))
            s.free(grad, variables[1])
            freed.add(variables[1])
            grad = new
            continue
        x, c, b = variables
        if s.kinds[grad][0] != out:  # the shortcut's shape
            (new,) = s.op("reshape_gradient", out / 10, (grad,), ((out, "gradient"),))
            s.free(grad)
            grad = new
        (gb,) = s.op("relu_bn_backward", out / 4, (grad, b, c), ((out, "gradient"),))
        s.free(grad)
        for v in (b, c):
            if v not in freed:
                s.free(v)
                freed.add(v)
        new = ((s.kinds[x][0], "gradient"), *(((weight_nbytes, "gradient"),) if with_parameters else ()))
        reads = (gb, x, weight) if with_parameters else (gb, x)
        made = s.op("conv_backward", 2 * conv_ns, reads, new, temporary_nbytes=out)
        s.free(gb)
        grad = made[0]
        if with_parameters:
            grads.append((weight, made[1]))
    s.free(grad, first)
    for weight, g in grads:
        m = momenta[s_params.index(weight)]
        s.op("sgd_", s.kinds[weight][0] / 10 * 3, (weight, g, m), writes=(weight, m))
    for _, g in grads:
        s.free(g)
    return s.finish()


def _resnet50_convs() -> list[tuple[int, int, int]]:
    shapes, cin = [(3, 64, 7)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        mid, cout = 64 << stage, 256 << stage
        for block in range(blocks):
            shapes += [(cin, mid, 1), (mid, mid, 3), (mid, cout, 1)]
            if block == 0:
                shapes.append((cin, cout, 1))
            cin = cout
    return shapes


def transformer(
    *,
    layers: int = 6,
    width: int = 512,
    batch: int = 16,
    tokens: int = 256,
    heads: int = 8,
    vocabulary: int = 8192,
    rate: float = 2e11,
    gradients_kept: bool = False,
) -> Trace:
    """A transformer with AdamW. With `gradients_kept`, gradients are freed after the next forward."""
    s = _Step()
    rows = batch * tokens
    act = rows * width * 4
    scores = batch * heads * tokens * tokens * 4
    shapes = {"qkv": (width, 3 * width), "proj": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    weights: dict[tuple[int, str], int] = {}
    state: dict[int, tuple[int, int]] = {}
    names = [(layer, name) for layer in range(layers) for name in shapes] + [(layers, "head")]
    for layer, name in names:
        cin, cout = shapes.get(name, (width, vocabulary))
        weights[layer, name] = s.carry(cin * cout * 4, "parameter", f"{layer}.{name}")
    for w in weights.values():
        state[w] = (
            s.carry(s.kinds[w][0], "optimizer_state", "exp_avg"),
            s.carry(s.kinds[w][0], "optimizer_state", "exp_avg_sq"),
        )
    old_grads = {w: s.carry(s.kinds[w][0], "gradient", "old") for w in weights.values()} if gradients_kept else {}
    tape: list[tuple[str, int, tuple[int, ...], int, float]] = []

    def linear(x: int, layer: int, name: str) -> int:
        w = weights[layer, name]
        cin, cout = shapes.get(name, (width, vocabulary))
        ns = 2 * rows * cin * cout / rate * 1e9
        (y,) = s.op(f"linear.{name}", ns, (x, w), ((rows * cout * 4, "activation"),))
        tape.append(("linear", w, (x, y), rows * cin * 4, ns))
        return y

    def light(name: str, x: int, nbytes: int) -> int:
        (y,) = s.op(name, nbytes / 5, (x,), ((nbytes, "activation"),))
        tape.append((name, -1, (x, y), s.kinds[x][0], nbytes / 5))
        return y

    (x,) = s.op("embed", act / 10, (), ((act, "activation"),))
    for layer in range(layers):
        h = light("norm", x, act)
        h = linear(h, layer, "qkv")
        p = light("softmax_qk", h, scores)
        h = light("attend", p, act)
        x = linear(h, layer, "proj")
        h = light("norm", x, act)
        h = linear(h, layer, "up")
        h = light("gelu", h, rows * 4 * width * 4)
        x = linear(h, layer, "down")
    x = linear(x, layers, "head")
    s.free(*old_grads.values())
    (grad,) = s.op("loss", s.kinds[x][0] / 5, (x,), ((s.kinds[x][0], "gradient"),))
    grads: dict[int, int] = {}
    for name, w, (x, y), nbytes, ns in reversed(tape):
        if name == "linear":
            gx, gw = s.op("linear_backward", 2 * ns, (grad, x, w), ((nbytes, "gradient"), (s.kinds[w][0], "gradient")))
            grads[w] = gw
        else:
            (gx,) = s.op(name + "_backward", 2 * ns, (grad, x, y), ((nbytes, "gradient"),))
        s.free(grad, y)
        grad = gx
    s.free(grad, tape[0][2][0])
    for w, g in reversed(grads.items()):
        m, v = state[w]
        s.op("adamw_", s.kinds[w][0] / 10 * 5, (w, g, m, v), writes=(w, m, v))
    for w, g in grads.items():
        if gradients_kept:
            s.inherits[g] = old_grads[w]
        else:
            s.free(g)
    return s.finish()
