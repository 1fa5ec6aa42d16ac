"""The operations of `tf.data`, by what a saved iterator remembers of them.

Each epoch of `shuffle`, and of `Dataset.random(rerandomize_each_iteration=True)`, draws new seeds from a generator
outside of the iterator. A saved iterator has them only while it holds the operation. Some operations release their
input once it has ended, and a `prefetch` that reads ahead makes this happen long before the epoch ends: the run then
resumes without an error, but later epochs are different. The table was found by experiment with TensorFlow 2.21, and
the tests check each row.

TensorFlow has no public way to walk a pipeline without copying its data: `loops.backend.datasets` uses a private one.
An operation is identified by its class name; a warning names unknown ones.
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

    SOURCE = "has no input"
    KEEPS = "holds its input for as long as it is held"
    AHEAD = "the same, and may read the end of its input long before it passes it on"
    DRAINS = "releases its input once its own end has been read"
    LETS_GO = "releases its input once that has ended"
    FILES = "writes files, which no longer match a saved iterator later"


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
"""What a saved iterator remembers of each operation. A warning names those that are not here, as unverified."""

STATES = {
    "PyFunc": "from_generator or numpy_function",
    "EagerPyFunc": "py_function",
    "ReadVariableOp": "a map that reads a variable",
    "RngReadAndSkip": "a map that draws from a tf.random.Generator",
    "DummyMemoryCache": "a cache inside of a function, such as that of flat_map or interleave",
    "DummySeedGenerator": "a shuffle inside of a function, such as that of flat_map or interleave",
}
"""Kernels with a state outside of the iterator, and what they are in a program."""

_RANDOM = re.compile("Random|Normal|Multinomial|Uniform")
_RENAMED = {"ParallelInterleaveDataset": "LegacyParallelInterleave"}
_KIND = re.compile(r"_?(?:Experimental)?(\w+?)Dataset(?:V\d+)?")
_SEEDS = {"Shuffle": 2, "ShuffleAndRepeat": 2, "Random": 0}


def kind(name: str) -> str | None:
    """An operation's name in the table, from that of its class or kernel; None if it does not make a dataset."""
    found = _KIND.fullmatch(name)
    # One name has two meanings: without a version it is the older operation.
    return _RENAMED.get(name, found[1]) if found else None


def spelled(kind: str) -> str:
    """The name as a program spells it: `padded_batch` for PaddedBatch."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def holds_state(op: str) -> bool:
    """Whether a kernel is known to have a state, such as a random generator."""
    return op in STATES or ("Stateless" not in op and _RANDOM.search(op) is not None)


def order(dataset: Any, kind: str) -> str:
    """A parallel operation's argument `deterministic`: "true", "false" or "default"."""
    if kind != "ParallelInterleave":
        return datasets.order(dataset, kind)
    # Its object does not keep the argument. Serializing is cheap here: its input is usually a short list of files.
    found = [node.deterministic for node in _serialized(tf.data.experimental.to_variant(dataset)) if node.kind == kind]
    return "false" if "false" in found else "default"


def draws(dataset: Any, kind: str) -> tuple[bool, bool] | None:
    """Whether an operation has no seed, and whether it draws other numbers at each start; None if it draws none."""
    if kind not in _SEEDS:
        return None
    unseeded = [datasets.argument(dataset, "seed", 0), datasets.argument(dataset, "seed2", 0)] == [0, 0]
    redraws = datasets.argument(dataset, "rerandomize", False) if kind == "Random" else True
    return unseeded, bool(datasets.argument(dataset, "reshuffle_each_iteration", redraws))


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
        self.redraws = any(node.attr[name].b for name in ("reshuffle_each_iteration", "rerandomize_each_iteration"))


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
    """The operations of datasets that a function captures from outside."""
    for tensor in function.captured_inputs:
        if tensor.dtype == tf.variant:
            yield from _serialized(tensor)


def hidden(dataset: Any) -> list[Node]:
    """The operations of a dataset that exists only as a variant tensor, such as one that TensorFlow has rewritten."""
    if kind(type(dataset).__name__) != "Variant":
        return []
    return list(_serialized(tf.data.experimental.to_variant(dataset)))


def started_again(inside: list[Node]) -> set[str]:
    """The names of those hidden operations that start again in the course of a run."""
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
