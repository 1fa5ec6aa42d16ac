"""What a traced step would do on a GPU, by TensorFlow's list of kernels: no GPU is needed.

TensorFlow keeps int32 arithmetic in the host's memory on GPUs, and a branch outside of XLA waits for its predicate. A
tensor that such an operation takes or gives is copied at every step.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import gpu_kernels as kernels
import tensorflow as tf

from scaler.backend.graphs import LOOPS, functions_called

_kernels = functools.cache(kernels.gpu_kernels)
LARGEST = 1024
"""Elements of a tensor in the host's memory. What is larger is data, not a shape or a count."""
_NO_KERNEL_NEEDED = frozenset({"Placeholder", "PlaceholderWithDefault", "NoOp", "_Arg", "_Retval"})
ON_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
ON_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", *LOOPS, *ON_BRANCHES})
_ON_THE_HOST = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless", "PrintV2", "Print", "Assert"})


class Found(NamedTuple):
    """An operation that makes a GPU wait.

    Attributes:
        type: The operation's type and dtypes.
        why: What is wrong.
        name: Its name in its function, and the functions around it.
    """

    type: str
    why: str
    name: str


class Audit(NamedTuple):
    """What a traced function does on a GPU.

    Attributes:
        found: Operations without a kernel, or with a large tensor in the host's memory.
        predicates: How many branches an applied step executes: the first branch of each is the one it takes.
    """

    found: list[Found]
    predicates: int


def audit(concrete) -> Audit:
    """Looks at all that a concrete function executes, but for what XLA compiles."""
    found = []
    for op, path in operations(concrete):
        why = _why(op)
        if why:
            dtypes = ", ".join(sorted({tensor.dtype.name for tensor in (*op.inputs, *op.outputs)}))
            found.append(Found(f"{op.type}({dtypes})", why, f"{path}{op.name}"))
    return Audit(found, _predicates(concrete.graph))


def operations(concrete) -> Iterator[tuple]:
    """Each operation that a concrete function executes, and the functions around it, but for what XLA compiles."""
    return _operations(concrete.graph, "", set())


def _operations(graph, path, seen) -> Iterator[tuple]:
    if id(graph) in seen:
        return
    seen.add(id(graph))
    for op in graph.get_operations():
        if op.type in ON_CALLS:
            if not is_compiled(op):
                for called in functions_called(op):
                    yield from _operations(called, f"{path}{op.name}/", seen)
        else:
            yield op, path


def is_compiled(op) -> bool:
    """Whether XLA compiles what an operation calls."""
    return "_XlaMustCompile" in op.node_def.attr and op.get_attr("_XlaMustCompile")


def _predicates(graph) -> int:
    count = 0
    for op in graph.get_operations():
        if op.type not in ON_CALLS or is_compiled(op):
            continue
        called = functions_called(op)
        branch = op.type in ON_BRANCHES
        count += branch or (op.type in LOOPS and _goes_on_by_tensors(op))
        count += sum(map(_predicates, called[:1] if branch else called))
    return count


def _goes_on_by_tensors(loop) -> bool:
    """Whether the condition of a loop looks at what the device knows, and not at numbers of the host alone."""
    condition = loop.graph._get_function(loop.get_attr("cond").name).graph
    return any(op.type in ("All", "Any", "LogicalNot") for op in condition.get_operations())


def _why(op) -> str | None:
    if op.type in _NO_KERNEL_NEEDED:
        return None
    if op.type in _ON_THE_HOST:
        return "runs on the host"
    kernel = fitting_kernel(op)
    if kernel is None:
        large = [tensor for tensor in (*op.inputs, *op.outputs) if _is_large(tensor)]
        return f"no GPU kernel{_shapes(large)}" if not _of_the_host(op) or large else None
    held = [tensor for name in kernel.in_host_memory for tensor in _argument(op, name)]
    large = [tensor for tensor in held if _is_large(tensor)]
    return f"in host memory{_shapes(large)}" if large else None


def fitting_kernel(op):
    """The kernel that a GPU takes for an operation with these dtypes, or None."""
    return next((one for one in _kernels(op.type) if _fits(op, one)), None)


def _of_the_host(op) -> bool:
    """Whether nothing but the host's own values go in or out: an iterator, a string, a seed."""
    return all(tensor.dtype in (tf.string, tf.resource, tf.variant) for tensor in (*op.inputs, *op.outputs))


def _fits(op, kernel) -> bool:
    for name, allowed in kernel.dtypes.items():
        value = op.get_attr(name)
        if not set(value if isinstance(value, list) else [value]) <= allowed:
            return False
    return True


def _argument(op, name) -> list:
    """The tensors of an argument or result of this name."""
    for arguments, tensors in ((op.op_def.input_arg, op.inputs), (op.op_def.output_arg, op.outputs)):
        at = 0
        for argument in arguments:
            size = argument_length(op, argument)
            if argument.name == name:
                return list(tensors[at : at + size])
            at += size
    return []


def argument_length(op, argument) -> int:
    """How many tensors an argument or result of an operation has."""
    if argument.number_attr:
        return op.get_attr(argument.number_attr)
    return len(op.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1


def _is_large(tensor) -> bool:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return False
    return not tensor.shape.is_fully_defined() or math.prod(tensor.shape) > LARGEST


def _shapes(tensors) -> str:
    return "".join(f" {tensor.dtype.name}{tensor.shape}" for tensor in tensors)
