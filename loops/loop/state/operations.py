"""The operations of `tf.data`, by what a saved iterator remembers of them: one table, read by the tests row by row.

Each epoch of `shuffle`, and of `Dataset.random(rerandomize_each_iteration=True)`, draws new seeds from a generator
outside of the iterator. A saved iterator has them only while it holds the operation. Some operations let go of what is
below them once they have seen its end, and a `prefetch` that reads ahead makes this happen long before the epoch ends:
the run then resumes without an error, and later epochs are different. Found by trying, with TensorFlow 2.21.

TensorFlow has no public way to walk a pipeline that does not copy its data: what it keeps of one is read in
`loops.backend.datasets`. An operation is told by its class name; one that is not known is named in a warning.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from loops.backend import datasets


class Memory(enum.Enum):
    """What a saved iterator remembers of an operation."""

    SOURCE = "reads or counts, from nothing below it"
    KEEPS = "holds what is below it for as long as it is held"
    AHEAD = "the same, and may have read its end long before it gives it on"
    DRAINS = "lets go of what is below it once its own end has been read"
    LETS_GO = "lets go of what is below it once that has ended"
    FILES = "writes files, which a saved iterator does not fit later"


_NAMES = {
    Memory.SOURCE: """Csv FixedLengthRecord Generator List Load Random Range Reduce Sql TFRecord Tensor TensorSlice
        TextLine Variant""",
    Memory.KEEPS: "AssertCardinality Map Options Repeat Restructured Scan Unique",
    Memory.AHEAD: """Cache DenseToRagged DenseToRaggedBatch DenseToSparseBatch GroupByReducer GroupByWindow Interleave
        MapAndBatch ParallelBatch ParallelInterleave ParallelMap ParseExample Prefetch Rebatch""",
    Memory.DRAINS: "Shuffle ShuffleAndRepeat",
    Memory.LETS_GO: """Batch Concatenate DirectedInterleave Filter FlatMap IgnoreErrors
        LegacyParallelInterleave PaddedBatch Shard Skip Take TakeWhile Unbatch Window Zip""",
    Memory.FILES: "Snapshot",
}
OPERATIONS = {name: memory for memory, names in _NAMES.items() for name in names.split()}
"""What is remembered of each. An operation that is not here is named in a warning, as one that nobody has tried."""

STATES = {
    "PyFunc": "from_generator or numpy_function",
    "EagerPyFunc": "py_function",
    "ReadVariableOp": "a map that reads a variable",
    "RngReadAndSkip": "a map that draws from a tf.random.Generator",
    "DummyMemoryCache": "a cache inside of a function, such as that of flat_map or interleave",
    "DummySeedGenerator": "a shuffle inside of a function, such as that of flat_map or interleave",
}
"""Kernels with a state outside of the iterator, and where programs use them."""

_RANDOM = re.compile("Random|Normal|Multinomial|Uniform")
_RENAMED = {"ParallelInterleaveDataset": "LegacyParallelInterleave"}
_KIND = re.compile(r"_?(?:Experimental)?(\w+?)Dataset(?:V\d+)?")
_SEEDS = {"Shuffle": 2, "ShuffleAndRepeat": 2, "Random": 0}


def kind(name: str) -> str | None:
    """The name of an operation in the table, from that of its class or kernel; None if it makes no dataset."""
    found = _KIND.fullmatch(name)
    # One name in two meanings: without a version it is the older operation.
    return _RENAMED.get(name, found[1]) if found else None


def spelled(kind: str) -> str:
    """As a program spells it: `padded_batch` for PaddedBatch."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def holds_state(op: str) -> bool:
    """Whether a kernel is known to have a state of its own, such as a random generator."""
    return op in STATES or ("Stateless" not in op and _RANDOM.search(op) is not None)


def order(dataset: Any, kind: str) -> str:
    """What a parallel operation was told of the order of its elements: "true", "false" or "default"."""
    if kind != "ParallelInterleave":
        return datasets.order(dataset, kind)
    # Its object does not keep what it was told. Below it there are names of files, as a rule, which are few.
    told = [node.deterministic for node in _serialized(tf.data.experimental.to_variant(dataset)) if node.kind == kind]
    return "false" if "false" in told else "default"


def draws(dataset: Any, kind: str) -> tuple[bool, bool] | None:
    """Whether an operation draws random numbers without a seed, and others each time it starts; None if it has none."""
    if kind not in _SEEDS:
        return None
    unseeded = [datasets.argument(dataset, "seed", 0), datasets.argument(dataset, "seed2", 0)] == [0, 0]
    anew = datasets.argument(dataset, "rerandomize", False) if kind == "Random" else True
    return unseeded, bool(datasets.argument(dataset, "reshuffle_each_iteration", anew))


REPEATS = ("Repeat", "ShuffleAndRepeat")


class Node:
    """An operation of a graph, or inside of a function."""

    def __init__(self, node: Any, constants: dict[str, Any], in_function: bool):
        self.op: str = node.op
        self.kind = kind(node.op)
        self.name: str = node.name
        self.in_function = in_function
        self.inputs = [name.split(":")[0] for name in node.input]
        self.repeats = self.kind in REPEATS and constants.get(self.inputs[1 if self.kind == "Repeat" else 4]) != 1
        self.deterministic: str = node.attr["deterministic"].s.decode() if "deterministic" in node.attr else "true"
        first = _SEEDS.get(self.kind or "")
        seeds = [] if first is None else [name.split(":")[0] for name in node.input[first : first + 2]]
        self.unseeded = bool(seeds) and all(constants.get(name) == 0 for name in seeds)
        self.anew = any(node.attr[name].b for name in ("reshuffle_each_iteration", "rerandomize_each_iteration"))


def nodes(graph: Any) -> Iterator[Node]:
    """Every operation of a graph, and of the functions in it."""
    scopes = (graph.node, *(function.node_def for function in graph.library.function))
    for level, scope in enumerate(scopes):
        numbers = [
            node for node in scope if node.op == "Const" and node.attr["dtype"].type == tf.int64.as_datatype_enum
        ]
        small = [node for node in numbers if not node.attr["value"].tensor.tensor_shape.dim]
        constants = {node.name: tf.make_ndarray(node.attr["value"].tensor).item() for node in small}
        yield from (Node(node, constants, level > 0) for node in scope)


def captured(function: Any) -> Iterator[Node]:
    """The operations of datasets that a function uses, and that were made outside of it."""
    for tensor in function.captured_inputs:
        if tensor.dtype == tf.variant:
            yield from _serialized(tensor)


def hidden(dataset: Any) -> list[Node]:
    """The operations of a dataset that TensorFlow holds as a value alone, as it does what it has rewritten."""
    if kind(type(dataset).__name__) != "Variant":
        return []
    return list(_serialized(tf.data.experimental.to_variant(dataset)))


def started_again(inside: list[Node]) -> set[str]:
    """The names of those hidden operations that start once more after another has begun."""
    graph = {node.name: node for node in inside if not node.in_function}
    forgets = any(OPERATIONS.get(str(node.kind)) is Memory.LETS_GO for node in inside)
    found: set[str] = set()
    stack = [name for node in graph.values() if node.repeats for name in (node.inputs[0], node.name)]
    stack += [node.inputs[1] for node in graph.values() if node.kind == "Concatenate"]
    while stack:
        node = graph.get(stack.pop())
        if node is None or node.name in found:
            continue
        found.add(node.name)
        if node.kind != "Cache" or forgets:
            stack += node.inputs
    return found


def _serialized(variant: Any) -> Iterator[Node]:
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)  # 1 is IGNORE.
    yield from nodes(tf.compat.v1.GraphDef.FromString(graph.numpy()))
