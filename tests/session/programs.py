"""Random training-like programs, run in core and under a session, compared to the last bit.

A program is plain data: setup, loop bodies of statements (tests/session/program_statements.py), and which body each
step runs. The same interpreter runs it in core, where it notes the bytes of every live storage at the end of
each step, and in a session, where each storage is compared with what was noted.

`tests/session/program_runs.py` runs many, or replays one.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ooc
import tests.session.program_ops
import tests.session.program_training  # noqa: F401 (as above: it registers kinds of statement)
from ooc.errors import OocError, StoreFailed
from tests.planner_faults import refuse_planner_faults
from tests.session.program_statements import KINDS, RETRYABLE, WEIGHTS, Interrupted, State, Statement, set_length
from tests.session.program_variations import VARIATIONS

CHUNK_NBYTES = 1 << 16
_MAX_CHUNKS = 400
_LENGTHS = (3, 20, 45, 60, 80, 90, 95, 100, 110, 150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a program.

    Attributes:
        body: Which of the program's bodies it runs.
        stop: Statements after which it ends early, or None.
        raises: Whether it then ends by an exception that the user catches.
    """

    body: int
    stop: int | None = None
    raises: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training script as data.

    Attributes:
        bodies: The loop bodies; statements from `num_inside[i]` on run after the step's `with` block.
        parameters: Sizes of free parameters.
        modules, optimizer, inputs: What setup makes.
        check_every: Compare after every so many steps (0: at the end only).
        check_inside: Compare within the `with` block.
        by_optimizer: Steps are bounded by the optimizer's `step`, not by `with`.
        debug: Whether a touch of what is away faults. Without it, it shows another variable's bytes.
        delay_ns: Each read and write of the store's file takes this much longer.
        fail_call: In each step the so-maniest read or write fails, and the user tries again (0: none does).
        lengths: Of each step, in hundredths: sizes of results differ from step to step.
    """

    seed: int
    bodies: tuple[tuple[Statement, ...], ...]
    num_inside: tuple[int, ...]
    steps: tuple[Step, ...]
    num_registers: int
    parameters: tuple[int, ...]
    modules: tuple[str, ...]
    optimizer: str
    inputs: tuple[int, ...]
    check_every: int
    check_inside: bool
    by_optimizer: bool
    policy: str
    window_nbytes: int | None
    num_chunks: int
    threshold_nbytes: int
    debug: bool = True
    delay_ns: int = 0
    fail_call: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Whether every step does the same, so that it should be planned."""
        varying = {"data_dependent", "cycle", "batch_norm", "keep_for_ever", "by_step"}
        return (
            len(set(self.steps)) == 1
            and self.steps[0].stop is None
            and self.check_every in (0, 1)
            and all(s.mask == 0xFFFF and s.kind not in varying for s in self.bodies[0])
            and not self.by_optimizer
            and not self.fail_call
            and not self.lengths
        )

    def __str__(self) -> str:
        lines = [f"program {self.seed}: budget {self.num_chunks} chunks, policy {self.policy}"]
        lines += [f"  {k}={v}" for k, v in asdict(replace(self, bodies=(), steps=())).items() if v not in ((), None)]
        lines += [f"  step {i}: {s}" for i, s in enumerate(self.steps)]
        for index, body in enumerate(self.bodies):
            lines.append(f"  body {index}:")
            for number, s in enumerate(body):
                lines.append(f"    {s}" + ("   (outside)" if number >= self.num_inside[index] else ""))
        return "\n".join(lines)


def generate(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    num_registers = r.randint(3, 10)
    fail_call = r.randint(1, 40) if r.random() < 0.12 else 0
    possible = sorted(RETRYABLE if fail_call else KINDS)
    kinds = r.sample(possible, r.randint(8, len(possible)))  # each program is about some kinds
    weights = [WEIGHTS[k] for k in kinds]
    style = r.choices(["steady", "masked", "rotating", "broken", "all"], [45, 20, 15, 12, 8])[0]
    masked = 0.12 if style in ("masked", "all") else 0.0
    num_bodies = r.randint(2, 3) if style in ("rotating", "all") else 1

    def statement() -> Statement:
        mask = r.getrandbits(16) if r.random() < masked else 0xFFFF
        (kind,) = r.choices(kinds, weights)
        a, b, dst = (r.randrange(num_registers) for _ in range(3))
        return Statement(kind, dst, a, b, r.randrange(1 << 12), r.randrange(1 << 8), mask)

    common = tuple(statement() for _ in range(r.randint(3, 30)))
    bodies = []
    for _ in range(num_bodies):
        cut = r.randrange(len(common) + 1) if num_bodies > 1 else len(common)
        bodies.append(common[:cut] + tuple(statement() for _ in range(r.randint(1, 12) if num_bodies > 1 else 0)))
    steps = []
    rotation = [r.randrange(num_bodies) for _ in range(r.randint(1, 3))]
    for index in range(r.randint(6, 8)):
        step = Step(body=rotation[index % len(rotation)])
        if style in ("broken", "all") and r.random() < 0.3:
            step = replace(step, stop=r.randrange(len(bodies[step.body])), raises=r.random() < 0.5)
        if style == "all" and r.random() < 0.2:
            step = replace(step, body=r.randrange(num_bodies), stop=None)
        steps.append(step)
    optimizers = ["sgd", "adam", "adamw_foreach", "adamw_fused", "adamw_plain"]
    return Program(
        seed=seed,
        bodies=tuple(bodies),
        num_inside=tuple(len(b) - (r.randint(0, len(b) // 2) if r.random() < 0.3 else 0) for b in bodies),
        steps=tuple(steps),
        num_registers=num_registers,
        parameters=tuple(r.choice((500, 1024, 5000, 16384, 20000)) for _ in range(r.choice((0, 0, 1, 2, 4)))),
        modules=tuple(m for m in ("linear", "lstm") if r.random() < 0.2),
        optimizer=r.choice(optimizers),
        inputs=tuple(r.choice((5000, 20000)) for _ in range(r.choice((0, 0, 0, 2, 3)))),
        check_every=r.choice((1, 1, 1, 0, 2)),
        check_inside=r.random() < 0.5,
        by_optimizer=r.random() < 0.06,
        policy=r.choice(("auto", "auto", "window", "on_demand")),
        window_nbytes=r.choice((1 << 16, 1 << 18, 1 << 20)),
        num_chunks=next(larger(int(2 ** r.uniform(2, 6.5)))),
        threshold_nbytes=r.choice((4096, 4096, 1024, 300)),
        debug=r.random() < 0.7,
        delay_ns=r.choice((0, 0, 0, 200_000, 1_000_000)),
        fail_call=fail_call,
        lengths=tuple(r.choice(_LENGTHS) for _ in steps) if r.random() < 0.3 else (),
    )


# -- running


@dataclass
class Expected:
    """What the in-core run left: per check, the bytes of every live storage.

    `leaks`: whether storages outlive the program there, too (torch's graphs can hold themselves).
    """

    checks: list[list[bytes]] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rng: bytes = b""
    leaks: bool = False


class Mismatch(AssertionError):
    """The session's bytes are not the in-core run's."""


class OutsidePool(AssertionError):
    """A large storage is not in the pool."""


class Leaked(AssertionError):
    """Something is left behind."""


class _Runner:
    """One run of a program, in core (`expected` is filled) or in a session (it is compared with)."""

    def __init__(self, program: Program, expected: Expected, session: ooc.Session | None, *, verbose: bool) -> None:
        self.program = program
        self.expected = expected
        self.session = session
        self.verbose = verbose
        self.state = State(registers=[None] * program.num_registers)
        self.errors: list[str] = []
        self.num_checks = 0
        self.storages: list[StorageWeakRef] = []  # all that were seen in checks

    def run(self) -> None:
        program, state = self.program, self.state
        torch.manual_seed(program.seed)
        set_length(100)
        _set_up(program, state)
        for index, step in enumerate(program.steps):
            state.step = index
            set_length(program.lengths[index % len(program.lengths)] if program.lengths else 100)
            body = program.bodies[step.body]
            inside = body[: program.num_inside[step.body]]
            outside = body[program.num_inside[step.body] :]
            due = program.check_every and index % program.check_every == 0
            with contextlib.suppress(Interrupted), self._step():
                self._inject_faults()
                self._execute(inside[: step.stop])
                if step.raises:
                    raise Interrupted
                if due and program.check_inside:
                    self._check(f"in step {index}")
            self._execute(outside if step.stop is None else ())
            if due and not program.check_inside:
                self._check(f"after step {index}")
        self._check("at the end")
        rng = bytes(torch.get_rng_state().tolist())
        if self.session is None:
            self.expected.numbers, self.expected.errors, self.expected.rng = state.numbers, self.errors, rng
            return
        if self.errors != self.expected.errors:
            raise Mismatch(f"errors {self.errors} instead of {self.expected.errors}")
        if repr(state.numbers) != repr(self.expected.numbers):  # by repr: nan is equal to nan here
            raise Mismatch(f"numbers {state.numbers} instead of {self.expected.numbers}")
        if rng != self.expected.rng:
            raise Mismatch("the state of the random generator differs")

    def _step(self) -> contextlib.AbstractContextManager[Any]:
        if self.session is None or self.program.by_optimizer:
            return contextlib.nullcontext()
        session = self.session
        stack = contextlib.ExitStack()
        self._retry(lambda: stack.enter_context(session.step()))
        return stack

    def _inject_faults(self) -> None:
        if self.session is not None and (self.program.delay_ns or self.program.fail_call):
            self.session.engine.memory.store.engine.inject_faults(
                delay_ns=self.program.delay_ns, fail_call=self.program.fail_call, error=errno.EIO
            )

    def _retry(self, act: Callable[[], Any]) -> Any:
        """Do something, and do it again if a transfer failed, as a patient user would."""
        try:
            return act()
        except StoreFailed as error:
            if not self.program.fail_call or error.errno != errno.EIO:
                raise
            if self.verbose:
                print("    ", str(error).splitlines()[0], flush=True)
            return act()  # the injected fault happens once

    def _execute(self, statements: Sequence[Statement]) -> None:
        for s in statements:
            if not s.mask >> (self.state.step % 16) & 1:
                continue
            if self.verbose:
                print(f"  step {self.state.step}: {s}", flush=True)
            try:
                function = KINDS.get(s.kind) or VARIATIONS[s.kind]
                self._retry(lambda s=s, function=function: function(self.state, s))  # type: ignore[misc]
            except (OocError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                self.errors.append(f"step {self.state.step}: {s.kind}: {type(error).__name__}")
                if self.verbose:
                    print("    ", str(error).splitlines()[0])

    def _check(self, where: str) -> None:
        """Note, or compare, the bytes of every live storage."""
        seen: dict[int, Tensor] = {}
        for tensor in self.state.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                seen.setdefault(storage._cdata, tensor)
        wholes = [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in seen.values()]
        if self.session is None:
            self.storages += [StorageWeakRef(t.untyped_storage()) for t in seen.values()]
            # By way of a copy: what `.numpy()` has seen cannot be resized any more.
            self.expected.checks.append([w.clone().numpy().tobytes() for w in wholes])
            return
        self._assert_apart(self.session)
        expected = self.expected.checks[self.num_checks]
        self.num_checks += 1
        if len(expected) != len(wholes):
            raise Mismatch(f"{where}: {len(wholes)} storages instead of {len(expected)}")
        for number, (whole, body) in enumerate(zip(wholes, expected, strict=True)):
            if whole.numel() >= self.program.threshold_nbytes:
                self._assert_in_pool(self.session, whole)
            reference = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            if not self._retry(lambda w=whole, r=reference: torch.equal(w, r)):  # type: ignore[misc]
                wrong = (whole.clone() != reference).nonzero().flatten() if whole.shape == reference.shape else None
                extent = f"{len(wrong)} bytes from {int(wrong[0])} on differ" if wrong is not None else "other size"
                raise Mismatch(f"{where}: storage {number} of {whole.numel()} bytes: {extent}")

    def _assert_apart(self, session: ooc.Session) -> None:
        """What stays in memory beside the plan that is replayed has none of its chunks, nor of its scratch."""
        active = session.engine.executor.active
        places = (*active.plan.residencies, *active.plan.scratch) if active is not None else ()
        of_plan = {c for place in places for first, count in place.chunks for c in range(first, first + count)}
        for record in session.engine.manager.records.values():
            if record.state.holds_chunks:
                held = {c for first, count in record.runs for c in range(first, first + count)}
                assert of_plan.isdisjoint(held), f"{record!r} has chunks of the plan's"

    def _assert_in_pool(self, session: ooc.Session, whole: Tensor) -> None:
        address = session.engine.runner.dispatcher.address(whole)  # data_ptr() would count as an export
        active = session.engine.executor.active
        known = address in session.engine.manager.records
        if not known and active is not None:
            known = any(r.record is not None and r.record.address == address for r in active.variables)
        if not known and (address or whole.data_ptr() not in self.state.outside):
            raise OutsidePool(f"a storage of {whole.numel()} bytes at {whole.data_ptr():#x} is outside the pool")


def _set_up(program: Program, state: State) -> None:
    state.parameters = [torch.randn(n).requires_grad_() for n in program.parameters]
    makers = {"linear": lambda: torch.nn.Linear(80, 64), "lstm": lambda: torch.nn.LSTM(32, 24)}
    state.modules = [makers[name]() for name in program.modules]
    state.inputs = [torch.randn(n) for n in program.inputs]
    owned = state.parameters + [p for m in state.modules for p in m.parameters()]
    if owned:
        state.optimizers = [_optimizer(program.optimizer, owned)]


def _optimizer(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        case _:
            how = name.removeprefix("adamw_")
            return torch.optim.AdamW(parameters, lr=0.01, **({} if how == "plain" else {how: True}))


def run_in_core(program: Program) -> Expected:
    """The reference run."""
    expected = Expected()
    runner = _Runner(program, expected, None, verbose=False)
    runner.run()
    runner.state.clear()
    gc.collect()
    expected.leaks = not all(storage.expired() for storage in runner.storages)
    return expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program went under a session: the steps' modes, and the chunks that it needed to run at all."""

    modes: tuple[str, ...]
    num_chunks: int


def run_in_session(program: Program, expected: Expected, *, verbose: bool = False) -> Outcome:
    """Run and compare, at the program's budget or, where that is refused, at the next larger one."""
    num_chunks = program.num_chunks
    while True:
        num_tasks = _num_tasks()
        try:
            modes = _run_once(program, expected, num_chunks, verbose=verbose)
        except (
            torch.OutOfMemoryError
        ):  # of an op (`BudgetTooSmall`), or of the state of random numbers, read between ops
            if num_chunks > _MAX_CHUNKS:
                raise
            num_chunks = next(larger(num_chunks + 1))
            gc.collect()
            continue
        deadline = time.monotonic() + 60
        while _num_tasks() > num_tasks:  # a thread that was joined may still be listed
            if time.monotonic() > deadline:
                raise Leaked(f"{_num_tasks()} threads after the session, {num_tasks} before")
            time.sleep(0.001)
        return Outcome(modes=modes, num_chunks=num_chunks)


def make_session(**options: Any) -> ooc.Session:
    """Opens a program's session; replaced where programs run on another device."""
    return ooc.Session(**options)


def larger(num_chunks: int) -> Iterator[int]:
    """Budgets to try in turn, from `num_chunks` on, the same ones for every program."""
    budgets = [4]
    while budgets[-1] <= 2 * _MAX_CHUNKS:
        budgets.append(budgets[-1] + budgets[-1] // 4 + 1)
    return iter([b for b in budgets if b >= num_chunks])


def run_once_at(program: Program, expected: Expected) -> None:
    """Run at the program's own budget."""
    _run_once(program, expected, program.num_chunks, verbose=False)


def _run_once(program: Program, expected: Expected, num_chunks: int, *, verbose: bool) -> tuple[str, ...]:
    with make_session(
        budget=num_chunks * CHUNK_NBYTES,
        chunk_nbytes=CHUNK_NBYTES,
        threshold_nbytes=program.threshold_nbytes,
        policy=program.policy,
        window_nbytes=program.window_nbytes if program.policy == "window" else None,
        debug=program.debug,
        step_boundary="optimizer" if program.by_optimizer else "explicit",
    ) as session:
        runner = _Runner(program, expected, session, verbose=verbose)
        try:
            runner.run()
        finally:
            runner.state.clear()
        modes = tuple(row.mode for row in session.steps.rows)
        del runner
        gc.collect()
        if not expected.leaks:
            _assert_nothing_left(session)
    return modes


def _assert_nothing_left(session: ooc.Session) -> None:
    with session.engine.lock:
        if session.engine.executor.active is not None:
            session.engine.runner.bail_out("the program has ended")
        session.engine.runner.absorb()
    manager = session.engine.manager
    if manager.records:
        raise Leaked(f"{len(manager.records)} variables are left: {list(manager.records.values())[:3]}")
    if manager.num_free != manager.pool.num_chunks:
        raise Leaked(f"{manager.pool!r} after all variables were freed")


def _num_tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


# -- one program, and where it fails


def prepare_process() -> None:
    """For a process that runs programs and nothing else."""
    torch.set_num_threads(1)
    faulthandler.enable()
    refuse_planner_faults()
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler: half a million objects
    gc.collect()
    gc.freeze()  # what torch brought need not be looked at by each collection
