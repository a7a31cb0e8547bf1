"""Training graphs in POET's form: nodes in topological order, each with one output and its costs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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
        may_recompute: Whether it may be computed a second time.
        may_page: Whether its output may be paged.
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
    may_recompute: bool = True
    may_page: bool = True

    def __post_init__(self) -> None:
        if list(self.deps) != sorted(set(self.deps)):
            raise ValueError(f"node {self.name!r}: dependencies {self.deps} are not distinct and ascending")
        numbers = (self.nbytes, self.compute_s, self.compute_j, self.load_s, self.load_j, self.evict_s, self.evict_j)
        if min(numbers) < 0:
            raise ValueError(f"node {self.name!r}: negative size or cost in {numbers}")


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A training graph: `nodes` in the order in which they are computed."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            if node.deps and not 0 <= node.deps[0] <= node.deps[-1] < index:
                raise ValueError(f"node {index} ({node.name}) depends on {node.deps}, not only on earlier nodes")

    @property
    def compute_s(self) -> float:
        """Time to compute each node once."""
        return sum(node.compute_s for node in self.nodes)

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
        return sum(node.nbytes for node in self.nodes)


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
