"""Finds the measurable tensors that an operation depends on, also through values that cannot be measured."""

from __future__ import annotations

from collections.abc import Container, Iterator

import tensorflow as tf

_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case")
"""Calls and loops: they may capture a resource that does not affect their outputs."""


def is_measured(dtype: tf.DType) -> bool:
    """Whether the dtype can hold a NaN or an infinity."""
    return bool(dtype.is_floating or dtype.is_complex)


def computed_from(operation: tf.Operation) -> Iterator[str]:
    """The names of the floating-point and complex tensors that an operation reads.

    For a tensor list, as a loop uses it, these are the tensors and the resource handles that the list is built from.
    """
    waiting = list(operation.inputs)
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if is_measured(tensor.dtype) or (seen and tensor.dtype == tf.resource):
            yield tensor.name
        elif tensor.dtype == tf.variant and tensor.op.name not in seen:
            seen.add(tensor.op.name)
            waiting += tensor.op.inputs


def sources_of_other_inputs(
    operation: tf.Operation, given: Container[str], variables: Container[str]
) -> tuple[list[str], bool]:
    """The measurable tensors from which an operation's other inputs, such as integers, were computed.

    Args:
        operation: An operation of the graph.
        given: The names of the batch's tensors.
        variables: The names of the variables' handles.

    Returns:
        The names of these tensors, and whether one of them comes from a string, a table, an iterator or the like.
    """
    waiting = [one for one in operation.inputs if not is_measured(one.dtype)]
    found, seen, blind = [], set(), False
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or tensor.name in variables:
            continue
        seen.add(tensor.name)
        if is_measured(tensor.dtype) or (tensor.name in given and tensor.dtype.is_integer):
            found.append(tensor.name)
            continue
        blind = blind or _opaque(tensor)
        waiting += tensor.op.inputs
    return found, blind and operation.type not in _CALLS


def _opaque(tensor: tf.Tensor) -> bool:
    """Whether the tensor is a string, a resource or a variant from outside the graph."""
    kind = tensor.op.type
    outside = kind == "Placeholder" or (kind not in _CALLS and tensor.op.op_def.is_stateful)
    return outside and tensor.dtype in (tf.string, tf.resource, tf.variant)
