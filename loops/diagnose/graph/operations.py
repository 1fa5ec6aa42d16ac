"""What the operations of a graph do: one table for the census, lint, memory, doctor and explain, and walks along them.

A column is a question, and its rows are the types of operations for which the answer is yes. What an operation does
with a loss scale is another table, `scaler/misuse/operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

import tensorflow as tf

_Node = TypeVar("_Node", bound=Hashable)

VIEWS = frozenset(
    ["EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient"]
)
"""Does the output share the buffer of an input?"""
MOVES = VIEWS | frozenset(
    [
        *("Assert", "Assign", "AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "BroadcastTo"),
        *("ConcatV2", "Const", "Fill", "Gather", "GatherNd", "GatherV2", "NoOp", "OnesLike", "Pack", "Placeholder"),
        *("ReadVariableOp", "ResourceGather", "Reverse", "ReverseV2", "Shape", "Slice", "Split", "SplitV"),
        *("StridedSlice", "StridedSliceGrad", "TensorListFromTensor", "TensorListGetItem", "TensorListPopBack"),
        *("TensorListPushBack", "TensorListReserve", "TensorListSetItem", "TensorListStack", "Tile", "Transpose"),
        *("Unpack", "VarHandleOp", "ZerosLike"),
    ]
)
"""Does it only store, read or move values, and so rounds none?"""
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
    while tensor.op.type in VIEWS:
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
