"""The native dispatcher as Python sees it: what native/dispatch.cpp offers to the parts that replay plans."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from ooc.memory.record import VariableRecord
from ooc.tracing.op_log import OpLog


class NativeReleases(enum.IntEnum):
    """Which variables native code may let go of."""

    NONE = 0
    """In debug mode each is compared with its copy, and hidden."""
    GUARDED = 1
    """All; stray touches of those that are not born and freed within the step are served from then on."""
    ALL = 2


class SessionLock(Protocol):
    """As `threading.RLock`; native code takes it without calling Python."""

    def acquire(self) -> bool:
        """Wait for it; True."""

    def release(self) -> None:
        """Give it back once. Raises `RuntimeError` on a thread that does not have it."""


class Dispatcher(Protocol):
    """Compares each op with the plan, runs those that are as planned, and calls Python for all else.

    Counts critical sections, too: within one, Python's signal handlers wait (`ooc.dispatch.signals`).
    Ops, their arguments and results are whatever a program has, hence `Any`.
    """

    @property
    def cursor(self) -> int:
        """Index of the plan's next op."""

    @property
    def depth(self) -> int:
        """Critical sections entered on the session's thread."""

    @property
    def num_boxed(self) -> int:
        """Planned ops that were played without Python so far (native/boxed.cpp)."""

    @property
    def num_boxed_demand(self) -> int:
        """Ops on demand that were run without Python so far (native/boxed_demand.h)."""

    @property
    def num_acts(self) -> int:
        """Planned ops, so far, before which something was to be done, and Python had no part in it (native/acts.h)."""

    @property
    def num_acts_after(self) -> int:
        """The same after planned ops."""

    @property
    def num_moves(self) -> int:
        """Planned transfers that began without Python so far (native/moves.h)."""

    def install(self, *arguments: Any) -> None:
        """Take a plan's tables (`ExecutablePlan.install_arguments`)."""

    def start(self, index: int) -> None:
        """Op `index` is next."""

    def vouch(self) -> bool:
        """Let the next planned op be played though it changes operands, and some may be missing. Is that news?"""

    def prepare_demand(self, *arguments: Any) -> None:
        """Say what ops on demand need (`ooc.dispatch.op_runner`)."""

    def prepare_births(self, *arguments: Any) -> None:
        """Say where births on demand are noted (`ooc.dispatch.native_births`)."""

    def prepare_acts(self, *arguments: Any) -> None:
        """Say what goes before and after planned ops, and where that is noted (`ooc.dispatch.native_acts`)."""

    def meet(self, address: int, record: VariableRecord, /) -> None:
        """Let planned ops of this step use what was allocated there, beside the plan; it stays where it is."""

    def met(self) -> list[VariableRecord]:
        """Of these, what the planned op that comes next, or runs, uses."""

    def allow_releases(self, which: int, /) -> None:
        """Which releases are done without Python from now on (`NativeReleases`)."""

    def new_lock(self) -> SessionLock:
        """A reentrant lock, in nobody's hands."""

    def new_log(self) -> OpLog:
        """An empty log."""

    def demand(self, log: OpLog | None) -> None:
        """Log there the ops on demand that find all they need in memory, without calling Python; None: call it."""

    def kind(self, func: Any, args: Any, kwargs: Any) -> int:
        """What an op has in common with those that are tried once for all (`ooc.replay.rerun_trials`).

        A hash of the op, its operands' geometry and its other arguments; 0: it is not run again in any case.
        """

    def trial(self, kind: int) -> int:
        """What is known of a kind of op."""

    def set_trial(self, kind: int, trial: int) -> None:
        """Note it."""

    def set_environment(self, number: int) -> None:
        """A part of each kind from now on."""

    def refuse(self, func: Any) -> None:
        """Never call this op replayable again."""

    def at_head(self, head: int, /) -> None:
        """Which ops on demand Python sees because something may begin with them (`ooc.tracing.recording.Head`)."""

    def follow_stream(self, device: str, num_moves: int, follow: Callable[[], object], /) -> None:
        """Call `follow` before an op where torch's current stream is another than at the op before.

        Ops that Python runs are not looked at. From now on ops on demand that native code runs are timed on the device.

        Args:
            device: Whose stream, such as "cuda:0".
            num_moves: Address of a 64-bit count, which `follow` keeps alive; where it has changed, too.
            follow: What it raises, the op raises.
        """

    def begin_op_again(self) -> None:
        """The time of the op on demand that native code runs, if any, begins now: it has waited for memory."""

    def watch(self, mode: int, func: Any, heads: tuple[Any, ...], /) -> None:
        """Ops on demand in another grad mode than this (1: enabled; -1: any) are left to Python, and so is `func`.

        And so are `heads`, until something has begun.
        """

    def compare(self, whether: bool, /) -> None:
        """Whether ops on demand that native code runs are compared, and planned: else it is not noted where they come
        from, of which node they are, and whether they may run again."""

    def outside_keys(self) -> int | None:
        """The dispatch keys (`torch._C.DispatchKeySet.raw_repr`) that were off where the op under way came from.

        None: nobody knows (native/outside.h).
        """

    def leave(self) -> None:
        """No plan is being replayed any more."""

    def try_play(self, func: Any, types: tuple[Any, ...], args: Any, kwargs: Any) -> tuple[Any] | None:
        """Run an op if it is the plan's next one; its result, or None if it is not."""

    def address(self, tensor: Any) -> int:
        """Address of a tensor's storage if the session's allocator served it, else 0."""

    def occurrences(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """Such addresses of all tensors among an op's arguments, in order, repeats included."""

    def operands(self, *values: Any) -> list[int]:
        """Such addresses of all tensors in these values, each once."""

    def guarded(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Call a function as one critical section."""

    def postpone(self, number: int, always: bool) -> bool:
        """Let a signal come again when the section ends. False outside sections (unless `always`)."""

    def enter_section(self) -> bool:
        """From now on signal handlers and finalizers wait, and frames do not count towards the recursion limit.

        Returns False on another thread than the session's: nothing has begun.
        """

    def exit_section(self) -> None:
        """The section ends: what has waited comes at the next bytecode. On another thread, `hold_garbage` does."""

    def hold_garbage(self) -> None:
        """On another thread, which holds the session's lock: finalizers wait until its `exit_section`."""

    def collection_begins(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """The first of `gc.callbacks`: signal handlers wait until `collection_ends`."""

    def collection_ends(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """The last of `gc.callbacks`: what has waited comes at the next bytecode."""

    def be_alone(self) -> None:
        """In a forked child: the sections of threads that are not there are over."""
