"""What a session is compared with: the same plans without standing aliases, and without virtual addressing.

- `RemappingSpace`: every allocation and every load unmaps what its addresses showed and maps its chunks anew, as the
  window paper's row "Schedule + VA" does. Plans, chunks and transfers are those of a session.
- `contiguous_plan`: chunks are given as an online best-fit allocator gives memory, each residency in one
  piece, as in the paper's row "Schedule". Where such an allocator finds no hole, the plan must evict more: it is made
  for a smaller budget, until its placement fits the pool. What is measured then is the plan. That a variable which
  comes back elsewhere costs a remap is ours alone (an allocator would hand out another pointer, which torch's
  tensors cannot take), so its remaps are counted, and its time without them is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ooc.devices.cuda import CudaDevice, CudaMemory
from ooc.testing.fake_device import FakeCudaDevice, FakeDeviceMemory
from scheduler.cost.evaluate import remap_ns
from scheduler.placement import best_fit, problem_from_plan
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import BudgetTooSmall, make_plan
from scheduler.trace import Trace
from scheduler.verify import verify
from vmm.addresses import AddressSpace, Reservation
from vmm.device_space import DeviceSpace
from vmm.device_streams import DeviceEvent, WaitRule
from vmm.driver import Still

_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Of the pool, for which plans are tried in turn."""


class RemappingSpace(DeviceSpace):
    """A `DeviceSpace` in which nothing stands: each `map` unmaps first."""

    _idle: dict[int, DeviceEvent]
    """By address: behind the last use of what is free."""

    def mark(self, is_alive: Callable[[int], bool]) -> None:
        """Note what is free now, so that the host need not wait for the newest work before it is mapped anew."""
        fence = self._streams.fence()
        self._idle = {r.address: fence for r in self.reservations if r.runs is not None and not is_alive(r.address)}

    def map(self, reservation: Reservation, runs: Sequence[tuple[int, int]], *, still: Still | None = None) -> int:
        """As `DeviceSpace.map`, whatever is mapped already."""
        idle = getattr(self, "_idle", {}).pop(reservation.address, None)
        unused = self._unused.pop(reservation.address, None) or idle
        if reservation.runs is not None:
            if unused is None:
                self._observe()
            else:
                self.num_stops += 1
                self._streams.observe(WaitRule.HOST_AFTER_USE, unused)
            AddressSpace.unmap(self, reservation)
        return AddressSpace.map(self, reservation, runs, still=still)


class _RemappingCudaMemory(CudaMemory):
    space_type = RemappingSpace


class RemappingCudaDevice(CudaDevice):
    """A GPU on which every allocation and load is mapped anew."""

    memory_type = _RemappingCudaMemory


class _RemappingFakeMemory(FakeDeviceMemory):
    space_type = RemappingSpace


class RemappingFakeDevice(FakeCudaDevice):
    """The same over the fake."""

    memory_type = _RemappingFakeMemory


def contiguous_plan(trace: Trace, machine: Machine, policy: str = "auto", **parameters: Any) -> Plan:
    """As `make_plan`, with each residency in one piece, placed by best fit in order of time.

    Raises:
        PlanError: No budget that the policy can plan for leads to a placement that fits the pool.
    """
    tried = []
    for share in _SHARES:
        smaller = replace(machine, num_chunks=max(int(machine.num_chunks * share), 1))
        try:
            plan = make_plan(trace, smaller, policy, **parameters)
        except (PlanError, BudgetTooSmall) as error:
            tried.append(f"{smaller.num_chunks} chunks: {error}")
            break
        step = problem_from_plan(plan, trace, alignment=machine.chunk_nbytes)
        placed = best_fit(step.problem)
        needed = placed.height // machine.chunk_nbytes
        tried.append(f"a plan for {smaller.num_chunks} chunks needs {needed}")
        if needed <= machine.num_chunks:
            return _with_chunks(plan, trace, machine, [placed.offsets[b] for b in step.buffer_of], tried)
    raise PlanError(f"best fit finds no room in {machine.num_chunks} chunks: {'; '.join(tried)}")


def _with_chunks(plan: Plan, trace: Trace, machine: Machine, offsets: Sequence[int], tried: Sequence[str]) -> Plan:
    residencies = []
    for residency, offset in zip(plan.residencies, offsets, strict=True):
        count = -(-trace.variables[residency.variable].nbytes // machine.chunk_nbytes)
        residencies.append(replace(residency, chunks=((offset // machine.chunk_nbytes, count),)))
    num_remapped = _num_remapped(residencies)
    placed = replace(
        plan,
        machine=machine,
        residencies=tuple(residencies),
        notes=(*plan.notes, *tried),
        predicted={
            **plan.predicted,
            "num_remapped_chunks": num_remapped,
            "remap_ns": remap_ns(num_remapped, machine),
        },
    )
    verify(placed, trace)
    return placed


def _num_remapped(residencies: Sequence[Any]) -> int:
    """Chunks that a variable's residencies change: from each to its next, and back to the first."""
    by_variable: dict[int, list[Any]] = {}
    for residency in residencies:
        by_variable.setdefault(residency.variable, []).append(residency.chunks)
    changes = 0
    for stays in by_variable.values():
        for before, after in zip(stays, [*stays[1:], stays[0]], strict=True):
            changes += sum(count for _, count in after) if before != after else 0
    return changes
