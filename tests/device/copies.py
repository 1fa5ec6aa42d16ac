"""Which tensors a traced step would copy between a GPU and its host, by TensorFlow's list of kernels.

A kernel for GPUs names what it keeps in the host's memory, which is most of int32. A tensor that one operation leaves
on one side and another takes on the other is copied at each step. On an H100 TensorFlow's profiler counted what this
counts, but for what no output of the step needs.
"""

from typing import NamedTuple

import tensorflow as tf
from audit import ON_BRANCHES, ON_CALLS, argument_length, fitting_kernel, is_compiled

from scaler.backend.graphs import functions_called

_OF_THE_HOST = (tf.resource, tf.variant, tf.string)


class Copies(NamedTuple):
    """Tensors that are copied at each step, as "operation -> operation".

    Attributes:
        to_host: From the GPU: what the host waits for.
        to_gpu: From the host.
    """

    to_host: list[str]
    to_gpu: list[str]


def copies(graph) -> Copies:
    """All copies of a graph and the functions that it calls, but for what XLA compiles; of a branch the first."""
    found = Copies([], [])
    _look(graph, found, set())
    return found


def _look(graph, found, seen):
    if id(graph) in seen:
        return
    seen.add(id(graph))
    operations = graph.get_operations()
    on_host = {id(tensor): held for op in operations for tensor, held in zip(op.outputs, _sides(op)[1], strict=True)}
    copied = set()

    def take(tensor, held, by):
        there = on_host.get(id(tensor), held)
        if tensor.dtype not in _OF_THE_HOST and there != held and (id(tensor), held) not in copied:
            copied.add((id(tensor), held))
            (found.to_host if held else found.to_gpu).append(f"{tensor.op.type} {tensor.op.name} -> {by}")

    for op in operations:
        for tensor, held in zip(op.inputs, _sides(op)[0], strict=True):
            take(tensor, held, f"{op.type} {op.name}")
        if op.type in ON_CALLS and not is_compiled(op):
            called = functions_called(op)
            for one in called[:1] if op.type in ON_BRANCHES else called:
                _look(one, found, seen)
    for tensor in graph.outputs:
        take(tensor, tensor.dtype == tf.int32, "result")


def _sides(op) -> tuple[list[bool], list[bool]]:
    """Whether each input, and each output, is in the host's memory."""
    if op.type in ("Placeholder", "PlaceholderWithDefault", "_Arg"):
        return [], [tensor.dtype == tf.int32 for tensor in op.outputs]
    if op.type in ON_CALLS:
        if is_compiled(op):
            return [False] * len(op.inputs), [False] * len(op.outputs)
        inputs = [tensor.dtype == tf.int32 for tensor in op.inputs]
        if op.type in ON_BRANCHES:
            inputs[0] = True
        return inputs, [tensor.dtype == tf.int32 for tensor in op.outputs]
    kernel = fitting_kernel(op)
    if kernel is None:
        return [True] * len(op.inputs), [True] * len(op.outputs)
    definition = op.op_def
    return tuple(
        [one.name in kernel.in_host_memory for one in arguments for _ in range(argument_length(op, one))]
        for arguments in (definition.input_arg, definition.output_arg)
    )


def variables_of_the_host(concrete) -> list[str]:
    """Variables that a function uses and that can only lie on the CPU: XLA refuses them on a GPU."""
    names = []
    for outside, inside in concrete.graph.captures:
        data = getattr(outside, "_handle_data", None)
        if outside.dtype == tf.resource and data is not None and data.shape_and_type:
            dtype = tf.as_dtype(data.shape_and_type[0].dtype)
            if dtype == tf.int32:
                names.append(f"{inside.name} {dtype.name}")
    return names
