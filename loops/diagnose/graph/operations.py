"""Kinds of operations, for the census, lint, memory, doctor and explain, and walks along a graph.

What each type of operations does is a row of the table in `scaler/misuse/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import tensorflow as tf

import scaler

_Node = TypeVar("_Node", bound=Hashable)

BRANCHES = frozenset(["If", "StatelessIf", "Case", "StatelessCase"])
"""Does it run at most one of its functions?"""
LOOPS = frozenset(["While", "StatelessWhile"])
"""Does it run a function many times?"""
CALLS = BRANCHES | LOOPS | frozenset(["PartitionedCall", "StatefulPartitionedCall"])
"""Does it run functions? It may capture a resource that does not affect its outputs."""
READS = frozenset(["ReadVariableOp", "ResourceGather"])
"""Does it read a variable?"""
CHOICES = frozenset(["Select", "SelectV2"])
"""Does it choose between two values?"""
MATRICES = frozenset(["MatMul", "BatchMatMulV2", "BatchMatMulV3"])
"""Does it multiply matrices?"""
CONVOLUTIONS = frozenset(["Conv2D", "Conv3D"])
"""Does it convolve with a filter, its second input?"""


def root_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that owns the buffer of this one."""
    while scaler.authoring.operation_of_type(tensor.op.type).is_view:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def reached(start: Iterable[_Node], onwards: Callable[[_Node], Iterable[_Node]]) -> Iterator[_Node]:
    """These and all that can be reached from them, each once, the nearest first."""
    found = list(dict.fromkeys(start))
    known = set(found)
    for one in found:
        yield one
        fresh = [other for other in dict.fromkeys(onwards(one)) if other not in known]
        known.update(fresh)
        found += fresh


def needed(end: Iterable[tf.Operation]) -> set[tf.Operation]:
    """These operations and all on which they depend."""
    return set(reached(end, lambda one: [tensor.op for tensor in one.inputs]))


def depending(start: Iterable[tf.Operation]) -> set[tf.Operation]:
    """These operations and all that depend on them."""
    return set(reached(start, lambda one: [user for output in one.outputs for user in output.consumers()]))
