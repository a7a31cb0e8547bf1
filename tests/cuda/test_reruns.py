"""Recomputation over the fake CUDA driver: bits, the order of re-runs among transfers, and what they need of torch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import ooc
import scheduler.colouring.colouring
from ooc.errors import RerunDiffers
from ooc.replay.bindings import Bindings
from ooc.replay.device_settings import CudaSettings
from ooc.replay.random_state import RandomState, default_generators, generators_of
from ooc.replay.recipes import Recipe
from ooc.replay.rerun_device import RerunDevice
from ooc.replay.reruns import Reruns
from ooc.testing.fake_device import FakeCudaDevice, FakeOps
from tests.cuda.cases import SPEED, CudaSession, fixed_speed, programs_over
from tests.session import program_reruns, programs
from tests.session.program_runs import run_many
from tests.session.recomputed import CASES, CHUNK_NBYTES, NUM_STEPS, Case, Training, digest, saved_tensors
from vmm.device_store import DeviceStore
from vmm.testing.fake_cuda import RuleBroken

PROGRAMS = (5, 8, 15, 17, 21, 24, 25, 27, 30, 31, 37)
"""Random programs whose plans recompute a lot."""
SHOWING = (15, 25)
"""Those in which each rule below shows, in plans that copy nothing at the step's border."""
SLOW = replace(
    SPEED,
    write_bytes_per_s=1e6,
    read_bytes_per_s=1e6,
    write_together_bytes_per_s=5e5,
    read_together_bytes_per_s=5e5,
)


@contextlib.contextmanager
def slow_link() -> Iterator[None]:
    """In the planner's eyes the link moves a MB a second: everything that can be is recomputed."""
    with fixed_speed(), program_reruns.slow_store(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStore, "measure", lambda self, buffer=None: SLOW)
        yield


def train(case: Case, *, seed: int = 0, eagerness: float = 0.1, is_slow: bool = True, **options: Any) -> dict[str, Any]:
    """Train in core and over the fake; every bit must be the same, without a race. Counts of the session.

    Every plan discards what it can; with a link that is not slow, it also moves a lot.
    """
    expected = Training(case)
    expected.run()
    device = FakeCudaDevice(seed=seed, eagerness=eagerness)
    options = {"debug": False, "policy": case.policy, "recompute": True, **options}
    link, reruns = slow_link() if is_slow else fixed_speed(), program_reruns.forced_reruns(0)
    with link, reruns, CudaSession(case.num_chunks * CHUNK_NBYTES, device=device, **options) as session:
        actual = Training(case, session=session)
        actual.run()
        counters = session.engine.manager.counters
        found = {
            "modes": [row["mode"] for row in session.report()["steps"]],
            "num_reruns": counters.num_reruns,
            "rows": session.steps.rows,
            "recompute_s": sum(row.recompute_s for row in session.steps.rows),
            "num_trials": session.engine.runner.trials.num_trials,
        }
        actual.session = None
    for index, (one, other) in enumerate(zip(expected.digests, actual.digests, strict=True)):
        assert one == other, f"step {index}, {found}"
    return found


@pytest.mark.parametrize(("name", "debug"), [("convolutions", False), ("encoder", True)])
def test_bits_are_those_of_the_run_in_core(name: str, debug: bool) -> None:
    found = train(CASES[name], debug=debug)
    assert found["modes"][-2:] == ["planned", "planned"], found
    assert found["num_reruns"] > NUM_STEPS and found["num_trials"] > 5
    assert found["rows"][-1].recomputed_nbytes > 0
    assert found["recompute_s"] > 0


def _read_saved(training: Training, index: int, output: torch.Tensor) -> None:
    """Off plan in the middle of a step: what is discarded then is made again at once."""
    if index == 5:
        training.digests.append(tuple(digest(tensor) for tensor in saved_tensors(output)))


class _Between:
    """A session that does something before a step begins."""

    def __init__(self, session: ooc.Session, acts: dict[int, Callable[[], None]]) -> None:
        self._session = session
        self._acts = acts
        self._index = 0

    def step(self) -> Any:
        self._acts.get(self._index, lambda: None)()
        self._index += 1
        return self._session.step()


def test_off_plan_and_without_memory_between_steps() -> None:
    """`yielded` and `set_budget` take the mappings of re-runs away; a look at saved tensors leaves the plan."""
    case = CASES["convolutions"]
    expected = Training(case)
    expected.run(hook=_read_saved, num_steps=9)
    device = FakeCudaDevice(eagerness=0.1)
    nbytes = case.num_chunks * CHUNK_NBYTES

    with (
        slow_link(),
        program_reruns.forced_reruns(0),
        program_reruns.counted_reruns() as counts,
        CudaSession(nbytes, device=device, policy=case.policy, recompute=True) as session,
    ):

        def lend() -> None:
            with session.yielded():
                assert session.engine.memory.num_chunks == 0

        acts = {4: lend, 7: lambda: session.set_budget(nbytes - 4 * CHUNK_NBYTES)}
        actual = Training(case, session=_Between(session, acts))  # type: ignore[arg-type]
        actual.run(hook=_read_saved, num_steps=9)
        modes = [row["mode"] for row in session.report()["steps"]]
        actual.session = None
    assert actual.digests == expected.digests, modes
    assert counts[0] > 10 and counts[1] > 0
    assert modes[3:6] == ["planned", "planned", "off_plan"], modes


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_reruns.run_seed`, over the fake; every other program has a link on which moving pays, too."""
    program = replace(program_reruns.recomputing(seed), delay_ns=0, fail_call=0)
    device = FakeCudaDevice(seed=seed, eagerness=(seed % 5) / 6)

    with slow_link() if seed % 2 else fixed_speed(), programs_over(device), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ooc.options._RECOMPUTING", frozenset(program_reruns.POLICIES))
        with program_reruns.forced_reruns(seed), program_reruns.counted_reruns() as counts:
            outcome = programs.run_in_session(program, programs.run_in_core(program))
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks, "counts": counts}


def test_random_programs() -> None:
    tally = run_many(PROGRAMS, runner=f"{__name__}:{run_seed.__name__}")
    tally.check(len(PROGRAMS))


def _not_told(patch: pytest.MonkeyPatch) -> None:
    """Re-runs are issued in no order: neither behind loads of what they read, nor writes of whose chunks they take."""
    patch.setattr(FakeOps, "runs_again", lambda *_, **__: None)


class _NoWaits:
    """Acts that wait for nothing."""

    def __init__(self, acts: Any) -> None:
        self._acts = acts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._acts, name)

    def await_transfer(self, residency: Any) -> None:
        pass


def _results_overtake(patch: pytest.MonkeyPatch) -> None:
    """What a re-run makes does not wait for the write of who had those chunks before."""
    play = Reruns._play

    def quiet(self: Any, executable: Any, rerun: Any) -> None:
        acts, self._acts = self._acts, _NoWaits(self._acts)
        try:
            play(self, executable, rerun)
        finally:
            self._acts = acts

    patch.setattr(Reruns, "_play", quiet)


def _elsewhere(patch: pytest.MonkeyPatch) -> None:
    """A re-run allocates what it keeps at addresses of its own, which show other chunks than the variable's."""
    map_scratch = Bindings._map_scratch

    def other_chunks(self: Any, executable: Any) -> None:
        map_scratch(self, executable)
        for rerun in executable.reruns.by_op.values():
            for variable in rerun.kept:
                alias = executable.scratch[rerun.before_op, variable]
                num_chunks = sum(count for _, count in alias.runs)
                self._space.map(alias, [(executable.num_chunks - num_chunks, num_chunks)])

    patch.setattr(Bindings, "_map_scratch", other_chunks)


def _run(seeds: Sequence[int]) -> None:
    for seed in seeds:
        run_seed(seed)


@functools.cache
def _with_all_rules() -> None:
    """What shows below that a rule is left out shows nothing with all of them; run once, and as in the tests below."""
    _run(SHOWING)


@pytest.mark.parametrize("rule", [_not_told, _results_overtake, _elsewhere], ids=lambda rule: rule.__name__)
def test_a_rule_left_out_shows(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.colouring.colouring, "border_copies", lambda *_: None)
    _with_all_rules()
    rule(monkeypatch)
    with pytest.raises((AssertionError, RuleBroken, RerunDiffers)):
        _run(SHOWING)


def _negate_again(device: FakeCudaDevice) -> torch.Tensor:
    """What an op makes of a variable that is on its way in, when it is run again."""
    memory = device.open(num_chunks=4, chunk_nbytes=CHUNK_NBYTES, store=None)
    try:
        place = memory.driver.view_address, CHUNK_NBYTES
        site = RerunDevice(memory.watch(None), threshold_nbytes=CHUNK_NBYTES)  # type: ignore[arg-type]
        operand = torch.empty(0, dtype=torch.uint8).set_(site.storage_at(*place))
        recipe = Recipe(
            torch.ops.aten.bitwise_not.default,
            (operand,),
            {},
            variable_of=lambda _: 7,
            small_nbytes=0,
            apart=contextlib.nullcontext,
            stream=site.begin_noting(),
        )
        assert recipe.variables == {7}
        memory.kernel("fill", writes=[place])
        ctypes.memset(place[0], 5, CHUNK_NBYTES)
        slot = memory.store.allocate(CHUNK_NBYTES)
        memory.store.write(slot, [place]).wait()
        memory.kernel("another variable", writes=[place])
        ctypes.memset(place[0], 9, CHUNK_NBYTES)
        memory.store.read(slot, [place]).order()
        with site.running(recipe, reads=[place], writes=[], births=[]):
            found: torch.Tensor = recipe.run(lambda _: site.storage_at(*place)).clone()
        assert not device.fake.races, device.fake.races[0]
        return found
    finally:
        memory.close()


def test_a_rerun_follows_the_loads_of_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_negate_again(FakeCudaDevice(eagerness=0.0)) == 250).all()
    _not_told(monkeypatch)
    assert (_negate_again(FakeCudaDevice(eagerness=0.0)) == 246).all()


def test_a_rerun_is_on_the_stream_of_the_first_run() -> None:
    """A library's workspace belongs to a stream. Where that has changed, the re-run follows the ops on the other."""
    device = FakeCudaDevice(eagerness=0.0)
    memory = device.open(num_chunks=4, chunk_nbytes=CHUNK_NBYTES, store=None)
    try:
        site = RerunDevice(memory.watch(None), threshold_nbytes=CHUNK_NBYTES)  # type: ignore[arg-type]
        place = memory.driver.view_address, CHUNK_NBYTES
        other = memory.new_stream()
        with memory.on_stream(other):
            recipe = Recipe(
                torch.ops.aten.zeros.default,
                ([4],),
                {},
                variable_of=lambda _: None,
                small_nbytes=1 << 20,
                apart=contextlib.nullcontext,
                stream=site.begin_noting(),
            )
        memory.kernel("an op on the first stream", writes=[place])
        with site.running(recipe, reads=[place], writes=[], births=[]):
            assert memory.streams.tail == other
        memory.kernel("the next op", writes=[place])
        assert memory.streams.tail != other
        assert not device.fake.races, device.fake.races[0]
    finally:
        memory.close()


class Generator:
    """Has a generator's two functions."""

    def __init__(self, seed: int) -> None:
        self.state = torch.tensor([seed, 0])

    def get_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


def test_random_numbers_on_a_device_are_those_of_its_own_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its operands' device, or by its argument `device`; set for the re-run, and put back after it."""
    cuda = [Generator(1), Generator(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(cuda))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    cpu, first, current = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda")
    assert generators_of(None, ()) == (torch.default_generator,)
    assert generators_of(None, {cpu}) == (torch.default_generator,)
    assert generators_of(None, {first}) == (cuda[0],)
    assert generators_of(None, {current}) == (cuda[1],)
    assert generators_of(None, {cpu, first}) == (torch.default_generator, cuda[0])
    assert generators_of(cuda[1], {first}) == (cuda[1],)  # type: ignore[arg-type]
    assert default_generators(first) == (torch.default_generator, cuda[0])
    before = RandomState(generators_of(None, {first}), contextlib.nullcontext)
    cuda[0].state[1] = 4  # the first run has drawn
    assert before.has_changed()
    with contextlib.suppress(KeyError), before.again():
        assert cuda[0].state.tolist() == [1, 0]
        cuda[0].state[1] = 7
        raise KeyError  # an op that fails when it is run again
    assert cuda[0].state.tolist() == [1, 4] and cuda[1].state.tolist() == [2, 0]


def test_settings_of_cuda_kernels_are_set_again() -> None:
    before = CudaSettings.now()
    try:
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        others = CudaSettings.now()
        assert others.cudnn != before.cudnn and others.precisions != before.precisions
        assert others.reduced[1:] != before.reduced[1:]
        before.apply()
        assert CudaSettings.now() == before
        assert before.tf32 == (torch._C._get_cudnn_allow_tf32(), torch._C._get_cublas_allow_tf32())  # both are told
        others.apply()
        assert CudaSettings.now() == others
        torch.backends.cudnn.conv.fp32_precision = "ieee" if others.precisions[0] == "tf32" else "tf32"
        mixed = CudaSettings.now()
        assert mixed.tf32[0] is None  # torch refuses to tell it
        before.apply()
        mixed.apply()
        assert CudaSettings.now() == mixed
    finally:
        before.apply()


def test_a_comparison_on_a_device_goes_by_pieces_that_allocate_little() -> None:
    device = FakeCudaDevice()
    memory = device.open(num_chunks=4, chunk_nbytes=CHUNK_NBYTES, store=None)
    try:
        site = RerunDevice(memory.watch(None), threshold_nbytes=1 << 10)  # type: ignore[arg-type]
        one = torch.arange(5000.0).reshape(50, 100)
        for tensor in (one, one.t(), one.to(torch.complex64), one.bfloat16()):
            assert site.are_same(tensor, tensor.clone())
            for place in (0, 511, 512, 4999):
                other = tensor.clone()
                other.as_strided((5000,), (1,))[place] -= 8192
                assert not site.are_same(tensor, other)
        repeated, other = one[0, :1].expand(5000), (one[0, :1] + 1).expand(5000)
        assert site.are_same(repeated, one[0, :1].clone().expand(5000)) and not site.are_same(repeated, other)
        assert not site.are_same(one[:, ::2], one[:, ::2])  # with gaps: cannot be told
        nan = torch.full((3000,), float("nan"))
        assert site.are_same(nan, nan.clone())
    finally:
        memory.close()
