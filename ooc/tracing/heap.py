"""Objects of a kind anywhere in the process: a program's models and optimizers, which nobody hands to a session."""

from __future__ import annotations

import gc
from typing import Any

import torch


def instances_of(*kinds: type) -> list[Any]:
    """All objects of these classes and of classes derived from them that the garbage collector knows, oldest first.

    By type, not `isinstance`: that asks proxies for their `__class__`, which runs their code. Few types are looked at,
    once each: there may be millions of objects. 40 ns an object.
    """
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [thing for thing in objects if type(thing) in wanted] if wanted else []


def modules_and_optimizers() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """All of the process, oldest first."""
    found = instances_of(torch.nn.Module, torch.optim.Optimizer)
    modules = [thing for thing in found if issubclass(type(thing), torch.nn.Module)]
    return modules, [thing for thing in found if issubclass(type(thing), torch.optim.Optimizer)]
