"""What a step that XLA compiles lacks of a graph's on a CPU: errors for indices and labels outside of their range.

XLA takes another row, or computes NaN. So a loop that chose XLA by itself looks at them in the batch, before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from loops.support.batches import INDEX, LABEL

_SIZES = ("Shape", "ShapeN", "Size", "Rank")
"""Operations whose result depends on no value of the batch."""
_LOOKUPS = {"GatherV2": INDEX, "ResourceGather": INDEX, "SparseSoftmaxCrossEntropyWithLogits": LABEL}
"""Operations of which the second input has to be in the range of the first, and what is said of one that is not."""
_STEPS = frozenset(
    (
        *("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "EnsureShape", "Const", "Pack", "StridedSlice"),
        *("SelectV2", "Less", "AddV2", *_SIZES),
    )
)
"""Operations between a part of the batch and the indices: Keras adds the number of rows to negative ones."""


class Looked(NamedTuple):
    """A part of the batch that holds indices.

    Attributes:
        place: Which part, of the batch without its structure.
        rows: How many rows there are.
        may_be_negative: Whether -1 is the last one.
        message: What is said of one that is not there.
    """

    place: int
    rows: int
    may_be_negative: bool
    message: str


def upstream(tensor: tf.Tensor) -> Iterator[Any]:
    """The operations that a tensor is computed from, in its own graph, without what only its sizes come from."""
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            yield op
            waiting += [] if op.type in _SIZES else [one.op for one in op.inputs]


def looked_up(concrete: tf.types.experimental.ConcreteFunction) -> Sequence[Looked] | None:
    """The parts of a batch that a step uses as indices.

    Returns:
        None if it uses others, of which nothing is known before it runs.
    """
    if _is_looked_up_inside(concrete):
        return None
    arguments = {one.op: place for place, one in enumerate(_arguments(concrete))}
    found, updated = [], set()
    for op in concrete.graph.get_operations():
        if op.type not in _LOOKUPS:
            continue
        behind = list(upstream(op.inputs[1]))
        places = [arguments[one] for one in behind if one in arguments]
        if not places and all(one.type != "Placeholder" for one in behind):
            continue  # Places in a sequence, and the like.
        if len(places) != 1 or any(one.type not in _STEPS for one in behind if one not in arguments):
            if op.type == "GatherV2" and not _is_of_weights(op):
                continue  # Indices that are computed are those of what they are computed from.
            return None
        if op.type == "ResourceGather":
            updated.add(places[0])  # An optimizer's update of the rows that the forward pass has read.
            continue
        rows = _rows(op)
        if rows is None:
            return None
        negative = any(one.type == "SelectV2" for one in behind)
        found.append(Looked(places[0], rows, negative, _LOOKUPS[op.type]))
    return found if updated <= {one.place for one in found} else None


def _is_looked_up_inside(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a function that the step calls looks something up: its indices are not traced to the batch."""
    for function in concrete.graph.as_graph_def().library.function:
        nodes = {one.name: one for one in function.node_def}
        for one in nodes.values():
            if one.op in _LOOKUPS and one.op != "GatherV2":
                return True
            rows = one
            while rows is not None and rows.op in ("GatherV2", "Identity", "Cast"):
                rows = nodes.get(rows.input[0].split(":")[0])
                if one.op == "GatherV2" and rows is not None and rows.op == "ReadVariableOp":
                    return True
    return False


def _arguments(concrete: tf.types.experimental.ConcreteFunction) -> Sequence[tf.Tensor]:
    return concrete.graph.inputs[: len(concrete.graph.inputs) - len(concrete.captured_inputs)]


def _is_of_weights(op: Any) -> bool:
    """Whether the rows are those of a variable."""
    rows = op.inputs[0].op
    while rows.type in ("Identity", "Cast"):
        rows = rows.inputs[0].op
    return rows.type == "ReadVariableOp"


def _rows(op: Any) -> int | None:
    """The number of rows, or of classes; None if it is not known."""
    if op.type == "GatherV2":
        axis = tf.get_static_value(op.inputs[2])
        return None if axis is None else op.inputs[0].shape[int(axis)]
    return op.inputs[0].shape[-1]


def has_sizes_of_data(concrete: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether a size inside of a step depends on values: XLA would compile the step again for each."""
    data = {one.op for one in _arguments(concrete)}
    for op in concrete.graph.get_operations():
        for place in _MADE_BY.get(op.type, ()):
            if any(one in data or one.type == "ReadVariableOp" for one in upstream(op.inputs[place])):
                return True
    return False


_MADE_BY = {
    **{kind: (1,) for kind in ("Reshape", "Tile", "BroadcastTo", "OneHot", "Pad", "PadV2", "MirrorPad")},
    **{"Fill": (0,), "Range": (0, 1, 2), "Slice": (1, 2), "StridedSlice": (1, 2, 3), "LinSpace": (2,)},
}
"""The inputs that tell the shape of the result."""


def checks(looked: Sequence[Looked], batch: Any) -> list[tf.Operation]:
    """Assertions that indices are in their range, for a step to wait for.

    Args:
        looked: From `looked_up`.
        batch: The batch.
    """
    parts, found = tf.nest.flatten(batch), []
    for one in looked:
        values = tf.cast(parts[one.place], tf.int64)
        outside = (values >= one.rows) | (values < (-one.rows if one.may_be_negative else 0))
        bad = tf.reduce_max(tf.where(outside, tf.abs(values), -1))
        worst = tf.where(tf.reduce_any(values == bad), bad, -bad)
        said = tf.strings.format(one.message.format(value="{}", rows=one.rows), worst)
        found.append(tf.debugging.Assert(tf.logical_not(tf.reduce_any(outside)), [said]))
    return [one for one in found if one is not None]
