"""Training graphs in POET's form: nodes in topological order, each with one output and its costs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One computation and its output.

    Costs are real numbers in SI units, as POET's profiles state them: a MILP's coefficients, not
    the simulator's clock.

    Attributes:
        name: For people.
        deps: Nodes whose outputs it reads, each once, ascending, all earlier.
        nbytes: Size of the output.
        compute_s, load_s, evict_s: Time to compute it, to page its output in, to page it out.
        compute_j, load_j, evict_j: Energy of the same.
        first_s, first_j: Time and energy of the first computation; None: `compute_s` and `compute_j`. Less where
            several nodes stand for results of the same op.
        may_recompute: Whether it may be computed a second time.
        may_page: Whether its output may be paged.
        recompute_until: The last stage in which it may be computed again; None for no limit.
        work_nbytes: Memory that computing it takes beside what it reads and its output.
        reserved_nbytes: Memory that is taken by other things while it is computed first.
    """

    name: str
    deps: tuple[int, ...]
    nbytes: float
    compute_s: float
    compute_j: float
    load_s: float = 0.0
    load_j: float = 0.0
    evict_s: float = 0.0
    evict_j: float = 0.0
    first_s: float | None = None
    first_j: float | None = None
    may_recompute: bool = True
    may_page: bool = True
    recompute_until: int | None = None
    work_nbytes: float = 0.0
    reserved_nbytes: float = 0.0

    def __post_init__(self) -> None:
        if list(self.deps) != sorted(set(self.deps)):
            raise ValueError(f"node {self.name!r}: dependencies {self.deps} are not distinct and ascending")
        numbers = (self.nbytes, self.compute_s, self.compute_j, self.load_s, self.load_j, self.evict_s, self.evict_j)
        if min(*numbers, self.work_nbytes, self.reserved_nbytes) < 0:
            raise ValueError(f"node {self.name!r}: negative size or cost in {numbers}")

    @property
    def once_s(self) -> float:
        """Time of the first computation."""
        return self.compute_s if self.first_s is None else self.first_s

    @property
    def once_j(self) -> float:
        """Energy of the first computation."""
        return self.compute_j if self.first_j is None else self.first_j


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A training graph.

    Attributes:
        nodes: In the order in which they are computed.
        stage_of: The stage in which each node is computed for the first time, ascending from 0 without
            holes. The papers have one node a stage, and so does a graph that leaves this out; fewer
            stages make a smaller program, with the same nodes.
    """

    nodes: tuple[Node, ...]
    stage_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stage_of:
            object.__setattr__(self, "stage_of", tuple(range(len(self.nodes))))
        steps = [b - a for a, b in pairwise((-1, *self.stage_of))]
        if len(self.stage_of) != len(self.nodes) or not set(steps) <= {0, 1} or steps[:1] not in ([], [1]):
            raise ValueError(f"stages {self.stage_of} do not ascend from 0 over {len(self.nodes)} nodes")
        for index, node in enumerate(self.nodes):
            if node.deps and not 0 <= node.deps[0] <= node.deps[-1] < index:
                raise ValueError(f"node {index} ({node.name}) depends on {node.deps}, not only on earlier nodes")

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.stage_of[-1] + 1 if self.stage_of else 0

    @cached_property
    def own(self) -> npt.NDArray[np.bool_]:
        """Stage by node: computed there for the first time."""
        found: npt.NDArray[np.bool_] = np.arange(self.num_stages)[:, None] == np.array(self.stage_of, dtype=np.int64)
        return found

    @cached_property
    def earlier(self) -> npt.NDArray[np.bool_]:
        """Stage by node: computed before."""
        found: npt.NDArray[np.bool_] = np.arange(self.num_stages)[:, None] > np.array(self.stage_of, dtype=np.int64)
        return found

    @cached_property
    def reserved(self) -> tuple[float, ...]:
        """For each stage, the memory taken by other things at its worst node."""
        found = [0.0] * self.num_stages
        for node, stage in zip(self.nodes, self.stage_of, strict=True):
            found[stage] = max(found[stage], node.reserved_nbytes)
        return tuple(found)

    @property
    def compute_s(self) -> float:
        """Time to compute each node once."""
        return sum(node.once_s for node in self.nodes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that read its output."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for dep in node.deps:
                found[dep].append(index)
        return tuple(tuple(own) for own in found)

    @property
    def least_nbytes(self) -> float:
        """What the most demanding node needs at once: its output and what it reads. No schedule needs less."""
        return max((node.nbytes + sum(self.nodes[dep].nbytes for dep in node.deps) for node in self.nodes), default=0.0)

    @property
    def most_nbytes(self) -> float:
        """All outputs at once: from here on there is nothing to decide."""
        beside = max((node.work_nbytes + node.reserved_nbytes for node in self.nodes), default=0.0)
        return sum(node.nbytes for node in self.nodes) + beside


def read_poet_csv(lines: Iterable[str], chip: Mapping[str, Any]) -> Graph:
    """A graph from POET's cost model: one row a node.

    Args:
        lines: Rows under the header `idx,layer,backward,deps,flop,out_bytes,param_bytes,runtime_s,
            compute_J,pagein_J,pageout_J`.
        chip: The device: `PAGEIN_LATENCY` and `PAGEOUT_LATENCY` in seconds, `PAGEIN_THROUGHPUT` and
            `PAGEOUT_THROUGHPUT` in bytes a second.
    """
    nodes = []
    for row in csv.DictReader(lines):
        nbytes = float(row["out_bytes"])
        nodes.append(
            Node(
                name=row["layer"],
                deps=tuple(sorted({int(dep) for dep in row["deps"].split()})),
                nbytes=nbytes,
                compute_s=float(row["runtime_s"]),
                compute_j=float(row["compute_J"]),
                load_s=chip["PAGEIN_LATENCY"] + nbytes / chip["PAGEIN_THROUGHPUT"],
                load_j=float(row["pagein_J"]),
                evict_s=chip["PAGEOUT_LATENCY"] + nbytes / chip["PAGEOUT_THROUGHPUT"],
                evict_j=float(row["pageout_J"]),
            )
        )
    return Graph(nodes=tuple(nodes))
