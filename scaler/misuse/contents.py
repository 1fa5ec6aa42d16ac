"""Follows what a variable holds, and what sums take over from it, through the assignments of a graph.

`upstream` follows whatever a value depends on. Here only sums, choices and products with one number count: what comes
out still holds what went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.assignments import assigned_before, value_assigned
from scaler.backend.graphs import LOOPS, calls_functions, captured_from, first_argument, is_eager
from scaler.misuse.marks import LOSS_SCALE, READ, kind_of
from scaler.misuse.sources import parameters, sources_of, tensors_upstream

ALL, PART, CHOICE = "all", "part", "choice"
"""Whether all of a source goes on, it times a constant, or all or nothing of it."""

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_ONE_INPUT = (
    *("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "EnsureShape", "StopGradient"),
    *(
        "PreventGradient",
        "CheckNumerics",
        "Snapshot",
        "Slice",
        "StridedSlice",
        "Unpack",
        "SplitV",
        "Neg",
        "Sum",
        "Mean",
    ),
)
_ALL_INPUTS = (
    *("AddV2", "Add", "AddN", "Sub", "Pack", "ConcatV2", "Split"),
    *("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"),
)
_SELECTS = ("Select", "SelectV2")
_DIVISIONS = ("RealDiv", "Div", "DivNoNan")
_INVERSES = ("Reciprocal", "Inv")
_OF_SCALES = ("Mul", *_DIVISIONS, *_INVERSES, "Identity", "Cast", "Reshape")
_BEGIN = "begin"


class Held(NamedTuple):
    """What a variable holds at one point of a graph.

    Attributes:
        handle: A reference to its handle in the graph.
        calls: The functions entered on the way to this graph.
        before: The operation of the graph before which it is asked; None for the end.
    """

    handle: Any
    calls: tuple
    before: Any = None


class Value(NamedTuple):
    """A reference to a tensor, and the functions entered on the way to it."""

    tensor: Any
    calls: tuple


Content = Held | Value


class Source(NamedTuple):
    """What content comes from.

    Attributes:
        content: The source.
        share: `ALL`, `PART` or `CHOICE`.
        factor: What it is multiplied with or divided by, if that is not a constant.
    """

    content: Content
    share: str = ALL
    factor: Value | None = None


def held_at_first(handle: Any) -> Held:
    """What a variable held before the first operation of the function that is looked at."""
    return Held(handle, (), _BEGIN)


class Contents:
    """What content comes from, in one function and those that it calls.

    Attributes:
        sources: The sources of all that was followed so far.
    """

    def __init__(self) -> None:
        self.sources: dict[Content, list[Source]] = {}
        self._places: dict[Any, dict] = {}

    def follow(self, contents: Iterable[Content]) -> list[Content]:
        """Finds all that these contents come from, and returns it with them."""
        waiting, found = list(contents), {}
        while waiting:
            content = waiting.pop()
            if content in found:
                continue
            found[content] = True
            if content not in self.sources:
                self.sources[content] = self._held(content) if isinstance(content, Held) else _of_value(content)
            waiting += [source.content for source in self.sources[content]]
        return list(found)

    def holding(self, wanted: set[Content], within: Iterable[Content], takes: Callable) -> set[Content]:
        """Those of the contents `within` that hold one of the wanted ones, by sources that `takes` accepts."""
        users: dict[Content, list] = {}
        for content in within:
            for source in self.sources[content]:
                users.setdefault(source.content, []).append((content, source))
        holding, waiting = set(wanted), list(wanted)
        while waiting:
            for content, source in users.get(waiting.pop(), ()):
                if content not in holding and takes(content, source):
                    holding.add(content)
                    waiting.append(content)
        return holding

    def shares(self, content: Content, wanted: Content, within: set[Content], takes: Callable) -> set[str]:
        """The shares met on the ways from a content to a wanted one, among contents that hold it."""
        shares, seen, waiting = set(), {wanted}, [content]
        while waiting:
            here = waiting.pop()
            if here in seen:
                continue
            seen.add(here)
            for source in self.sources[here]:
                if source.content in within and takes(here, source):
                    shares.add(source.share)
                    waiting.append(source.content)
        return shares

    def _held(self, held: Held) -> list[Source]:
        if held.before == _BEGIN:
            return []
        handle, calls = held.handle.deref(), held.calls
        op = assigned_before(handle, held.before, self._places)
        if op is None:
            return _at_first(handle, calls)
        assigned = [Source(Value(value.ref(), calls)) for value in value_assigned(op)]
        if op.type == "AssignVariableOp":
            return assigned
        earlier = Held(held.handle, calls, op)
        if assigned:
            return [*assigned, Source(earlier)]
        share = ALL if op.type in CALLS else CHOICE
        inside = [
            Source(Held(own.ref(), (*calls, (op, body))), share)
            for index, given in enumerate(op.inputs)
            if given is handle
            for body, own in parameters(op, index)
        ]
        return [*inside, Source(earlier, CHOICE)] if op.type in LOOPS else inside


def _at_first(handle: tf.Tensor, calls: tuple) -> list[Source]:
    """What a variable holds before the first assignment of a graph."""
    if not calls:
        return [Source(held_at_first(handle.ref()))]
    call, body = calls[-1]
    index = next((index for index, own in enumerate(body.inputs) if own is handle), None)
    if index is None:
        return []
    outer = Source(Held(call.inputs[first_argument(call) + index].ref(), calls[:-1], call))
    return [outer, Source(Held(handle.ref(), calls))] if call.type in LOOPS else [outer]


def _of_value(value: Value) -> list[Source]:
    tensor, calls = value.tensor.deref(), value.calls
    if is_eager(tensor) or kind_of(tensor):
        return []
    op = tensor.op
    if op.type == "ReadVariableOp":
        return [Source(Held(op.inputs[0].ref(), calls, op))]
    if op.type == "Placeholder" or calls_functions(op):
        share = ALL if op.type == "Placeholder" or op.type in CALLS else CHOICE
        return _floating(sources_of(tensor, calls), share)
    if op.type == "Mul" or op.type in _DIVISIONS:
        left, right = op.inputs
        if rescales(tensor) or (op.type == "Mul" and (_of_scale(left) or _of_scale(right))):
            return []
        return _times(left, right, calls) + (_times(right, left, calls) if op.type == "Mul" else [])
    if op.type == "IdentityN":
        return _floating([(op.inputs[tensor.value_index], calls)])
    if op.type in _SELECTS:
        return _floating(((source, calls) for source in list(op.inputs)[1:]), CHOICE)
    if op.type in _ONE_INPUT or op.type in _ALL_INPUTS:
        inputs = list(op.inputs)[:1] if op.type in _ONE_INPUT else op.inputs
        return _floating((source, calls) for source in inputs)
    return []


def _floating(nodes: Iterable[tuple[tf.Tensor, tuple]], share: str = ALL) -> list[Source]:
    return [Source(Value(tensor.ref(), calls), share) for tensor, calls in nodes if tensor.dtype.is_floating]


def _times(tensor: tf.Tensor, factor: tf.Tensor, calls: tuple) -> list[Source]:
    """What a product with a factor, or a division by it, holds of a tensor."""
    value, number = Value(tensor.ref(), calls), _number(factor)
    if number is None:
        return [Source(value, CHOICE, Value(factor.ref(), calls))]
    return [Source(value, ALL if abs(number) == 1.0 else PART)] if number else []


def _number(tensor: tf.Tensor) -> float | None:
    """The value of a constant number, also of one that a function captured."""
    known: tf.Tensor | None = tensor
    while known is not None and not is_eager(known) and known.op.type == "Placeholder":
        known = captured_from(known)
    if known is None or known.shape.num_elements() != 1 or not known.dtype.is_floating:
        return None
    value = tf.get_static_value(known)
    return None if value is None else float(value.reshape([]))


def rescales(tensor: tf.Tensor) -> bool:
    """Whether a tensor is the result of a division by a scale, also as a product with an inverse or a ratio."""
    if is_eager(tensor):
        return False
    if tensor.op.type in _DIVISIONS:
        return _of_scale(tensor.op.inputs[1])
    return tensor.op.type == "Mul" and any(
        rescales(factor) or (factor.op.type in _INVERSES and _of_scale(factor.op.inputs[0]))
        for given in tensor.op.inputs
        if given.shape.rank == 0
        for factor in tensors_upstream([given], _ends_a_product)
        if not is_eager(factor)
    )


def _of_scale(factor: tf.Tensor) -> bool:
    """Whether a number is a product or a quotient of scales."""
    if factor.shape.rank != 0:
        return False
    return any(kind_of(one) in (LOSS_SCALE, READ) for one in tensors_upstream([factor], _ends_a_product))


def _ends_a_product(tensor: tf.Tensor) -> bool:
    return kind_of(tensor) is not None or is_eager(tensor) or tensor.op.type not in _OF_SCALES
