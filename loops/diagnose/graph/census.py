"""Counts the operations in the traced graph of a step by layer and dtype, and compares them with the dtype policy."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.models import parts_of
from loops.diagnose.graph.operations import BRANCHES, CALLS
from loops.loop.loop import Loop
from loops.loop.user_step import taking_batches
from loops.support.text import columns

_TYPES = ("T", "dtype", "Tparams", "U")
_SUFFIX = re.compile(r"_\d+$")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of operation in one layer.

    Attributes:
        layer: The layer's path, or None outside all layers: the loss, the scaler, the optimizer.
        op: The type, such as "MatMul" or "Cast".
        dtype: The dtype in which it computes; for a cast both, such as "float32 to float16".
        count: How many run in each step; those in a loop's body count once.
        in_branches: How many more stand in branches, such as that of a skipped step. A step runs at most one branch.
        promised: The compute dtype of the layer's policy, or None.
        differs: Whether the dtype is not the promised one; always False for a cast.
        backward: How many of `count` compute gradients.
        cast_bytes: The bytes that these casts write, where their shapes are known; None for other operations.
    """

    layer: str | None
    op: str
    dtype: str
    count: int
    in_branches: int
    promised: str | None
    differs: bool
    backward: int
    cast_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Census:
    """The dtypes of a step's operations. `pandas.DataFrame(census.rows)` makes a table of them.

    Attributes:
        rows: One for each layer, operation and dtype, with the layers in the order of the graph.
    """

    rows: list[Row]

    @property
    def different(self) -> list[Row]:
        """The rows whose dtype is not the promised one."""
        return [row for row in self.rows if row.differs]

    @property
    def cast_bytes(self) -> int:
        """The bytes that the casts of a step write, where their shapes are known."""
        return sum(row.cast_bytes or 0 for row in self.rows)

    def __str__(self) -> str:
        header = ("layer", "operation", "dtype", "count", "in branches", "promised", "")
        cells = [header, *(_cells(row) for row in self.rows)]
        return f"{columns(cells, left=len(header))}\ncasts write {self.cast_bytes:,} bytes a step"


def census(step_or_function: Any, *args: Any) -> Census:
    """Counts the operations of a step by layer, kind and dtype, without running it.

    It reads the graph as TensorFlow traced it, with the functions that the graph calls, before the graph optimizer
    changes it. Layers are recognised by the name scopes of Keras.

    Args:
        step_or_function: A `loops.TrainStep`, a `tf.function` or another callable; or a `loops.Loop`, whose dataset
            gives the shapes of a batch.
        *args: The arguments of the call: tensors, arrays or `tf.TensorSpec`. None for a `Loop`.

    Raises:
        scaler.InvalidArgument: For anything else, and for arguments together with a `Loop`.
    """
    concrete = _concrete(step_or_function, args)
    layers = [layer for model in _models(step_or_function) for layer in scaler.observe.layers_of(model)]
    names: dict[str, list[keras.layers.Layer]] = collections.defaultdict(list)
    for layer in layers:
        names[layer.name].append(layer)
    counted: dict[tuple, list[_Operation]] = collections.defaultdict(list)
    for one in _operations(concrete.graph, frozenset(names)):
        dtype = _dtype(one.node)
        if dtype is not None:
            counted[one.place, one.node.op, dtype].append(one)
    order = list(dict.fromkeys(place for place, _, _ in counted))
    by_place = sorted(counted.items(), key=lambda item: order.index(item[0][0]))
    return Census([_row(place, op, dtype, found, names) for (place, op, dtype), found in by_place])


@dataclasses.dataclass(frozen=True)
class _Operation:
    """One operation of a graph.

    Attributes:
        place: The names of the layers around it, the outermost first.
        backward: Whether it computes gradients.
        sometimes: Whether it stands in a branch.
        node: Its NodeDef, with shapes.
    """

    place: tuple[str, ...]
    backward: bool
    sometimes: bool
    node: Any


def _row(place: tuple, op: str, dtype: str, found: list[_Operation], names: dict[str, list[keras.layers.Layer]]) -> Row:
    promised = _nearest(place, names[place[-1]]).compute_dtype if place else None
    cast, always = op == "Cast", [one for one in found if not one.sometimes]
    return Row(
        layer="/".join(place) or None,
        op=op,
        dtype=dtype,
        count=len(always),
        in_branches=len(found) - len(always),
        promised=promised,
        differs=promised is not None and not cast and dtype != promised,
        backward=sum(one.backward for one in always),
        cast_bytes=sum(_bytes(one.node) for one in always) if cast else None,
    )


def _nearest(place: tuple[str, ...], layers: list[keras.layers.Layer]) -> keras.layers.Layer:
    """Of several layers with one name, the one whose path shares the longest ending with the place."""

    def shared(layer: keras.layers.Layer) -> int:
        pairs = zip(reversed(place), reversed((layer.path or layer.name).split("/")), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(layers, key=shared)


def _cells(row: Row) -> tuple[str, ...]:
    size = f"{row.cast_bytes:,} bytes" if row.cast_bytes is not None else "differs" if row.differs else ""
    return row.layer or "-", row.op, row.dtype, str(row.count), str(row.in_branches), row.promised or "-", size


def _concrete(step: Any, args: tuple) -> tf.types.experimental.ConcreteFunction:
    if isinstance(step, Loop):
        if args:
            raise scaler.InvalidArgument(
                f"census(loop, ...): {len(args)} arguments with a Loop: expected none, its dataset gives the batches."
            )
        function, args = tf.function(taking_batches(step.train_step, step.element_spec)), (step.element_spec,)
    elif hasattr(step, "get_concrete_function"):
        function = step
    elif callable(step):
        function = tf.function(step)
    else:
        raise scaler.InvalidArgument(
            f"census({step!r}): expected an hs.TrainStep, an hs.Loop, a tf.function or another callable, and the "
            "arguments of the call."
        )
    try:
        return function.get_concrete_function(*tf.nest.map_structure(_spec, args))
    except TypeError as error:
        if args or "missing" not in str(error):
            raise
        raise scaler.InvalidArgument(
            f"census({getattr(step, '__name__', step)!s}): it takes arguments, and none were given: pass them too, as "
            "arrays, tensors or tf.TensorSpec."
        ) from None


def _spec(value: Any) -> Any:
    return tf.TensorSpec(value.shape, value.dtype) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def _models(step: Any) -> list[keras.layers.Layer]:
    step = step.train_step if isinstance(step, Loop) else step
    owner = getattr(getattr(step, "python_function", step), "__self__", None)
    return [one for one in (step, owner, *parts_of(step)) if isinstance(one, keras.layers.Layer)]


def _operations(graph: tf.Graph, layers: frozenset[str]) -> Iterator[_Operation]:
    """Every operation that computes or casts, also in called functions."""
    definition = graph.as_graph_def(add_shapes=True)
    library = {function.signature.name: function.node_def for function in definition.library.function}

    def walk(nodes: Iterable, outer: _Operation | None, inside: tuple[str, ...]) -> Iterator[_Operation]:
        for node in nodes:
            found = _Operation(
                place=_layers_in(node.name, layers) or (outer.place if outer else ()),
                backward=node.name.startswith("gradient_tape/") or (outer is not None and outer.backward),
                sometimes=outer is not None and (outer.sometimes or outer.node.op in BRANCHES),
                node=node,
            )
            if node.op not in CALLS and not scaler.authoring.operation_of_type(node.op).moves:
                yield found
            for name in _called(node):
                if name in library and name not in inside:
                    yield from walk(library[name], found, (*inside, name))

    yield from walk(definition.node, None, ())


def _called(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        yield from [value.func.name] if value.func.name else [one.name for one in value.list.func]


def _layers_in(node: str, layers: frozenset[str]) -> tuple[str, ...]:
    """The layers whose name scopes contain a node. The scope of a call is the layer's name, perhaps with a number."""
    found: list[str] = []
    for part in node.split("/")[:-1]:
        name = next((name for name in (_SUFFIX.sub("", part), part) if name in layers), None)
        if name in found:  # A gradient's name begins with that of its forward operation, and may repeat it.
            del found[found.index(name) :]
        found += [] if name is None else [name]
    return tuple(found)


def _dtype(node: Any) -> str | None:
    """The floating-point dtype in which a node computes, or None."""
    if node.op == "Cast":
        source, target = (tf.as_dtype(node.attr[name].type) for name in ("SrcT", "DstT"))
        return f"{source.name} to {target.name}" if source.is_floating and target.is_floating else None
    for name in _TYPES:
        kind = node.attr[name].type if name in node.attr else 0
        if kind:
            dtype = tf.as_dtype(kind)
            return dtype.name if dtype.is_floating else None
    return None


def _bytes(node: Any) -> int:
    """The bytes that a cast writes; 0 if its shape is unknown."""
    shapes = node.attr["_output_shapes"].list.shape
    shape = tf.TensorShape(shapes[0]) if shapes else tf.TensorShape(None)
    return math.prod(shape) * tf.as_dtype(node.attr["DstT"].type).size if shape.is_fully_defined() else 0
