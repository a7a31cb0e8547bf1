"""Trains under a session as on a kernel whose pages have `sys.argv[1]` bytes, and checks what it is asked for.

Larger pages than the real ones are whole numbers of them, so all that is right for them works here, too. Every
mapping, transfer and guard is checked to be in whole pages of that size. Prints what was seen, as JSON.
"""

import json
import mmap
import os
import sys
from types import SimpleNamespace

PAGE_NBYTES = int(sys.argv[1])
_real_sysconf = os.sysconf
mmap.PAGESIZE = PAGE_NBYTES  # type: ignore[misc]
os.sysconf = lambda name: PAGE_NBYTES if name in ("SC_PAGESIZE", "SC_PAGE_SIZE") else _real_sysconf(name)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ooc  # noqa: E402
from ooc.replay.bindings import Bindings  # noqa: E402
from scheduler.plan import Evicted  # noqa: E402
from vmm.faults import FaultTable  # noqa: E402
from vmm.store import FileStore  # noqa: E402
from vmm.syscalls import Syscalls  # noqa: E402
from vmm.transfers import TransferEngine  # noqa: E402

seen = {"mapped": 0, "guarded": 0, "moved": 0, "reserved": 0}
WIDTH = 300  # 300 x 300 floats have 360,000 bytes: no whole number of pages of any size


def check(what, *numbers):
    for number in numbers:
        assert number % PAGE_NBYTES == 0, f"{what}: {number} is not whole pages of {PAGE_NBYTES}"
    seen[what] += 1


def spy(owner, name, look):
    inner = getattr(owner, name)

    def wrapper(self, *arguments, **named):
        look(*arguments)
        return inner(self, *arguments, **named)

    setattr(owner, name, wrapper)


spy(Syscalls, "mmap", lambda address, nbytes, prot, flags, fd, offset: check("mapped", address or 0, nbytes, offset))
spy(Syscalls, "munmap", lambda address, nbytes: check("mapped", address, nbytes))
spy(Syscalls, "mprotect", lambda address, nbytes, prot: check("mapped", address, nbytes))
spy(Syscalls, "madvise", lambda address, nbytes, advice: check("mapped", address, nbytes))
spy(
    FaultTable, "guard", lambda guards: [check("guarded", g.address, g.nbytes, g.span_nbytes, g.offset) for g in guards]
)
for direction in ("submit_write", "submit_read"):
    spy(TransferEngine, direction, lambda fd, offset, segments, *_: check("moved", offset, segments.nbytes))


def train(step):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(7):
        with step():
            optimizer.zero_grad()
            loss = model(torch.randn(WIDTH, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            del loss
    return losses, model[0].weight.detach().clone()


torch.set_num_threads(1)
import contextlib  # noqa: E402

expected, weight = train(contextlib.nullcontext)
for debug in (False, True):
    with ooc.Session("4MiB", debug=debug, plan_cache=False) as session:
        losses, ours = train(session.step)
        model_kept = ours
        modes = [row.mode for row in session.steps.rows]
    assert losses == expected
    assert torch.equal(model_kept, weight)
    assert modes[-2:] == ["planned", "planned"], modes
# What is reserved for a plan must be what its slots will take.
record = SimpleNamespace(address=1 << 32, slot=None, reservation=SimpleNamespace(nbytes=70_000))
residency = SimpleNamespace(planned=SimpleNamespace(stop=Evicted.__new__(Evicted)))
with FileStore() as store:
    wanted = SimpleNamespace(reserve=lambda nbytes: check("reserved", nbytes))
    bindings = Bindings(SimpleNamespace(store=wanted, space=None), None)
    bindings._reserve_store(SimpleNamespace(variables=[SimpleNamespace(record=record, residencies=[residency])]))
    check("reserved", store.allocate(record.reservation.nbytes).capacity_nbytes)
print(json.dumps(seen))
