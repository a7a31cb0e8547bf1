"""`ooc doctor`: checks what this machine offers, and what would keep a session from working.

Each check runs on its own, so that one failure does not hide the others. The last one opens a real session and moves
bytes out and in: when that works, training works.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from ooc.cli.findings import Finding, Verdict
from ooc.dispatch.extension import leave_unnoticed
from ooc.dispatch.mode import SessionMode
from ooc.settings import BadSetting, Resolved, check, check_environment, resolve
from ooc.units import GIB, MIB, format_duration, format_nbytes, format_rate
from vmm.files import default_directory, directory_facts
from vmm.huge_pages import open_huge_file
from vmm.machine import MachineFacts, machine_facts
from vmm.native_build import cache_directory, find_compiler
from vmm.store import FileStore

_OLDEST_TORCH, _FIRST_UNTESTED_TORCH = (2, 11), (2, 15)
_OLDEST_PYTHON = (3, 11)
_GRANULE_NBYTES = 64 * 1024
"""The smallest chunk; a page may not be larger."""
_FEW_MAPPINGS = 65530
"""The kernel's usual vm.max_map_count; a lower one limits how finely a large pool can be cut."""
_LITTLE_DISK_NBYTES = 4 * GIB
_TRIAL_BUDGET_NBYTES = 8 * MIB


def main(*, store: str | None = None, as_json: bool = False, device: str = "cpu") -> int:
    """Print all findings and settings. Returns 1 if no session would work, else 0, and 2 for no such device."""
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?|fake", device)
    if found is None:
        print(f"ooc doctor: no device is called {device!r}. Options: cpu, cuda, cuda:1.", file=sys.stderr)
        return 2
    settings = resolve({"store": store, "device": device if device.startswith("cuda") else None})
    findings = [*examine(settings["store"].value, has_session=device == "cpu"), *_settings(settings)]
    if device != "cpu":
        from ooc.cli import doctor_cuda

        probe = doctor_cuda.fake_probe() if device == "fake" else doctor_cuda.real_probe(int(found[1] or 0))
        findings += doctor_cuda.examine(probe, settings["store"].value)
    stopped = any(f.verdict is Verdict.STOP for f in findings)
    if as_json:
        print(json.dumps(_document(findings, settings, stopped), indent=2))
    else:
        _print_tables(findings, settings, stopped)
    return 1 if stopped else 0


def _settings(settings: Mapping[str, Resolved]) -> Iterator[Finding]:
    """Check the settings: those that `ooc run` would refuse are findings. The store has a check of its own."""
    for name, found in settings.items():
        try:
            if name != "store":
                check({name: found})
        except BadSetting as error:
            yield Finding(name=error.place, value=found.value or "", verdict=Verdict.STOP, remedy=error.reason)
    try:
        for slip in check_environment():
            yield Finding(name="variables", value=slip, verdict=Verdict.NOTE)
    except BadSetting as error:
        yield Finding(name=error.place, value=os.environ[error.place], verdict=Verdict.STOP, remedy=error.reason)


def examine(store: str | None, *, has_session: bool = True) -> list[Finding]:
    """Run all checks. `store` is the directory to measure; None: where a session would put it."""
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "software": _software,
        "compiler": _compiler,
        "machine": lambda: _machine(machine_facts()),
        "store": lambda: _store(store),
        **({"session": lambda: _session(store)} if has_session else {}),
    }
    findings: list[Finding] = []
    for name, look in sections.items():
        try:
            findings.extend(look())
        # Any failure is a finding: a doctor that crashes says nothing.
        except Exception as error:  # noqa: BLE001
            first, *rest = (str(error) or type(error).__name__).splitlines()
            remedy = " ".join(line.strip() for line in rest)
            findings.append(Finding(name=name, value=first, verdict=Verdict.STOP, remedy=remedy))
    return findings


def _software() -> Iterator[Finding]:
    is_linux = sys.platform == "linux"
    yield Finding(
        name="system",
        value=f"{platform.system()} {platform.release()} {platform.machine()}",
        verdict=Verdict.FINE if is_linux else Verdict.STOP,
        remedy="" if is_linux else "ooc needs Linux: memfd and shared mappings.",
    )
    is_new_enough = sys.version_info >= _OLDEST_PYTHON
    yield Finding(
        name="Python",
        value=platform.python_version(),
        verdict=Verdict.FINE if is_new_enough else Verdict.STOP,
        remedy="" if is_new_enough else "ooc needs Python 3.11 or newer.",
    )
    yield torch_finding(torch.__version__)


def torch_finding(version: str) -> Finding:
    """Whether a version of torch, such as "2.13.0+cpu", is supported."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < _OLDEST_TORCH:
        return Finding(name="torch", value=version, verdict=Verdict.STOP, remedy="ooc needs torch 2.11 to 2.14.")
    if release >= _FIRST_UNTESTED_TORCH:
        return Finding(
            name="torch", value=version, verdict=Verdict.NOTE, remedy="Newer than what ooc was tested with (2.14)."
        )
    return Finding(name="torch", value=f"{version}, {torch.get_num_threads()} threads")


def _compiler() -> Iterator[Finding]:
    yield Finding(name="compiler", value=" ".join(find_compiler()))
    yield Finding(name="native cache", value=str(cache_directory()))
    yield _formulas()


def _formulas() -> Finding:
    """Whether torch computes by the same formulas in a session as without one."""
    if leave_unnoticed(SessionMode):
        return Finding(name="torch's formulas", value="the same in a session")
    return Finding(
        name="torch's formulas",
        value="other ones in a session",
        verdict=Verdict.NOTE,
        remedy="This build of torch cannot be told to compute as without a dispatch mode. A few gradients (of prod, "
        "masked_fill, svdvals, eigvalsh, norms of matrices) have other last bits in a session than in plain PyTorch.",
    )


def _machine(facts: MachineFacts) -> Iterator[Finding]:
    yield Finding(name="cores", value=str(facts.num_cores))
    page_fits = _GRANULE_NBYTES % facts.page_nbytes == 0
    yield Finding(
        name="page size",
        value=format_nbytes(facts.page_nbytes),
        verdict=Verdict.FINE if page_fits else Verdict.STOP,
        remedy="" if page_fits else f"Chunks are multiples of {format_nbytes(_GRANULE_NBYTES)}; pages must divide it.",
    )
    is_low = facts.max_map_count < _FEW_MAPPINGS
    yield Finding(
        name="memory mappings",
        value=f"{facts.map_count} of {facts.max_map_count} (vm.max_map_count)",
        verdict=Verdict.NOTE if is_low else Verdict.FINE,
        remedy=f"sysctl vm.max_map_count={_FEW_MAPPINGS}, or larger chunks" if is_low else "",
    )
    yield Finding(
        name="memory",
        value=f"{format_nbytes(facts.available_nbytes)} available of {format_nbytes(facts.total_nbytes)}",
    )
    yield Finding(name="swap", value=format_nbytes(facts.swap_nbytes) if facts.swap_nbytes else "none")
    yield Finding(name="huge pages for the pool", value=_huge_pages(facts))
    if facts.cgroup is None:
        yield Finding(name="control group", value="none")
    elif facts.cgroup.limit_nbytes is None:
        yield Finding(name="control group", value=f"version {facts.cgroup.version}, no memory limit")
    else:
        used, limit = format_nbytes(facts.cgroup.usage_nbytes), format_nbytes(facts.cgroup.limit_nbytes)
        yield Finding(
            name="control group",
            value=f"version {facts.cgroup.version}, {used} of {limit} used, {facts.cgroup.directory}",
        )


def _huge_pages(facts: MachineFacts) -> str:
    try:
        os.close(open_huge_file("probe"))
    except OSError as error:
        return f"as shmem_enabled says: {facts.shmem_huge_pages} (no tmpfs of our own: {error})"
    if facts.samples_accesses:
        return "split into small ones: the kernel samples accesses (DAMON), which costs more the larger a page"
    return "yes, on a tmpfs of our own"


def _store(store: str | None) -> Iterator[Finding]:
    directory = Path(store) if store is not None else default_directory()
    facts = directory_facts(directory)
    yield Finding(name="store", value=f"{facts.directory} ({facts.file_system})")
    is_small = facts.free_nbytes < _LITTLE_DISK_NBYTES
    yield Finding(
        name="store, free",
        value=format_nbytes(facts.free_nbytes),
        verdict=Verdict.NOTE if is_small else Verdict.FINE,
        remedy="A model needs about its in-core memory there." if is_small else "",
    )
    yield Finding(
        name="store, O_DIRECT",
        value="yes" if facts.supports_direct else "no",
        verdict=Verdict.FINE if facts.supports_direct else Verdict.NOTE,
        remedy="" if facts.supports_direct else "Transfers go through the page cache, which is slower.",
    )
    with FileStore(directory) as measured:
        speed = measured.measure()
    yield Finding(
        name="store, alone",
        value=f"write {format_rate(speed.write_bytes_per_s)}, read {format_rate(speed.read_bytes_per_s)}",
    )
    yield Finding(
        name="store, both ways",
        value=f"write {format_rate(speed.write_together_bytes_per_s)}, "
        f"read {format_rate(speed.read_together_bytes_per_s)}",
    )


def _session(store: str | None) -> Iterator[Finding]:
    """Open a session, keep twice its budget alive in it, and read everything back."""
    from ooc.session import Session

    started = time.perf_counter()
    with Session(_TRIAL_BUDGET_NBYTES, store=store) as session:
        opened_s = time.perf_counter() - started
        tensors = [torch.full((MIB // 4,), float(i)) for i in range(2 * _TRIAL_BUDGET_NBYTES // MIB)]
        wrong = [i for i, tensor in enumerate(tensors) if not bool((tensor == i).all())]
        del tensors
        moved = session.report()["peak_nbytes"]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {2 * _TRIAL_BUDGET_NBYTES // MIB} tensors came back with other bytes")
    yield Finding(
        name="session",
        value=f"opened in {format_duration(opened_s)}; {format_nbytes(2 * _TRIAL_BUDGET_NBYTES)} of tensors went out "
        f"of {format_nbytes(moved)} and came back whole",
    )


def _document(findings: list[Finding], settings: dict[str, Resolved], stopped: bool) -> dict[str, object]:
    return {
        "schema": "ooc.doctor",
        "schema_version": 1,
        "is_fine": not stopped,
        "settings": {
            name: {"value": found.value, "source": found.source, "default": found.setting.default}
            for name, found in settings.items()
        },
        "findings": [asdict(f) | {"verdict": f.verdict.value} for f in findings],
    }


def _print_tables(findings: list[Finding], settings: dict[str, Resolved], stopped: bool) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # an image for GPUs may have no packages but torch
        _print_lines(findings, settings)
        return
    colours = {Verdict.FINE: "green", Verdict.NOTE: "yellow", Verdict.STOP: "bold red"}
    console = Console()
    table = Table(title="This machine", title_justify="left")
    for heading in ("what", "found", "", "remedy"):
        table.add_column(heading, overflow="fold")
    for f in findings:
        table.add_row(f.name, f.value, f"[{colours[f.verdict]}]{f.verdict.value}[/]", f.remedy)
    console.print(table)
    table = Table(title="Settings of ooc run", title_justify="left")
    for heading in ("setting", "variable", "value", "from"):
        table.add_column(heading, overflow="fold")
    for found in settings.values():
        table.add_row(found.setting.option, found.setting.variable, found.value or found.setting.default, found.source)
    console.print(table)
    if stopped:
        names = ", ".join(f.name for f in findings if f.verdict is Verdict.STOP)
        console.print(f"[bold red]Stopped by:[/] {names}")
    else:
        console.print("[green]Nothing would stop us.[/]")


def _print_lines(findings: list[Finding], settings: dict[str, Resolved]) -> None:
    for f in findings:
        print(f"{f.verdict.value:5} {f.name}: {f.value}" + (f" -- {f.remedy}" if f.remedy else ""))
    for found in settings.values():
        print(f"{found.setting.option} = {found.value or found.setting.default} ({found.source})")
