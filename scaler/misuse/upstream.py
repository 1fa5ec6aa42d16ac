"""What the gradients of one call come from: each tensor upstream is looked at once, for all marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import tensorflow as tf

from scaler import gradients
from scaler.backend.graphs import is_eager
from scaler.errors import InvalidArgument
from scaler.misuse.marks import LOSS_SCALE, READ, SCALED, Mark, Marks, kind_of
from scaler.misuse.sources import Edge, Node, carries, node_key, sources_of, stops, tensors_upstream
from scaler.misuse.trace import Trace, trace_here, units_of
from scaler.misuse.units import Power, scales_of


class _Tensor(NamedTuple):
    """What is known of a tensor upstream.

    Attributes:
        carries: Whether the value of a gradient may be in it.
        kind: The kind of its mark, or None.
        sources: What it comes from; nothing behind a mark or a `tf.stop_gradient`.
        stopped: What it comes from if it is the result of a `tf.stop_gradient`.
    """

    carries: bool
    kind: str | None
    sources: list[Node]
    stopped: list[Node]


class Upstream:
    """All that gradients come from, up to the marks, as it is in the graph now.

    Args:
        grads: Gradients, or other tensors. In eager mode nothing is known but their own marks.
        known: What is known already of the tensors of this graph.
        also: Further kinds of marks at which to stop.

    Attributes:
        grads: The gradients.
        values: The values of those that are not None.
    """

    def __init__(
        self,
        grads: Sequence[gradients.Gradient],
        known: dict[tuple, _Tensor] | None = None,
        also: tuple[str, ...] = (),
    ) -> None:
        self.grads, self._also = grads, also
        self.values = [gradients.values_of(grad) for grad in grads if tf.is_tensor(grad)]
        self._known: dict[tuple, _Tensor] = {} if known is None else known

    def of(self, grads: Sequence[gradients.Gradient]) -> Upstream:
        """The same of some of these gradients, or of other tensors of the graph."""
        return Upstream(grads, self._known, self._also)

    def up_to(self, kind: str) -> Upstream:
        """The same up to marks of another kind, too."""
        return Upstream(self.grads, also=(*self._also, kind))

    @cached_property
    def edges(self) -> list[Edge]:
        """Each tensor with what it comes from. A tensor may come twice.

        Behind a `tf.stop_gradient` are those of gradients that have no mark before it. In a forward pass the scale of
        another step may stand behind one, in the weight of a loss. It is not carried.
        """
        trace = trace_here()
        edges = list(self._walk(self.values, trace))
        if any(stops(tensor) for (tensor, _), _ in edges):
            marked = self._marked(edges)
            without = [value for value in self.values if node_key((value, ())) not in marked]
            edges += self._walk(without, trace, behind_stops=True)
        return edges

    @cached_property
    def marks(self) -> Marks:
        """The marks that the gradients come from, by kind."""
        return self._marks_in(self.edges)

    def marks_before_stops(self, tensors: Iterable[tf.Tensor]) -> Marks:
        """The marks that tensors come from, without those behind a `tf.stop_gradient`."""
        return self._marks_in(self._walk(tensors))

    @cached_property
    def before_stops(self) -> list[tf.Tensor]:
        """The tensors that the gradients come from, without those behind a `tf.stop_gradient`."""
        return [tensor for (tensor, _), _ in self._walk(self.values)]

    @cached_property
    def variables(self) -> set:
        """References to the handles of variables that the gradients depend on in any way, also through masks."""
        parts = (part for grad in self.grads if tf.is_tensor(grad) for part in _components(grad))
        waiting = [part.op for part in parts if not is_eager(part)]
        seen: set = set()
        found: set = set()
        while waiting:
            op = waiting.pop()
            if op in seen:
                continue
            seen.add(op)
            found |= {source.ref() for source in op.inputs if source.dtype == tf.resource}
            waiting += [source.op for source in op.inputs if source.dtype != tf.resource]
        return found

    def _walk(
        self, tensors: Iterable[tf.Tensor], trace: Trace | None = None, behind_stops: bool = False
    ) -> Iterator[Edge]:
        """All that tensors come from; not beyond what a trace knows to come from no scale."""
        waiting: list[Node] = [(tensor, ()) for tensor in tensors]
        seen: set[tuple] = set()
        while waiting:
            node = waiting.pop()
            key = node_key(node)
            if key in seen:
                continue
            seen.add(key)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = _look_at(node, self._also)
            if known.carries:
                sources = known.stopped if behind_stops and known.stopped else known.sources
                yield node, sources
                waiting += [own for own in sources if own[1] or trace is None or not trace.knows_plain(own[0])]

    def _marks_in(self, edges: Iterable[Edge]) -> Marks:
        found: Marks = {}
        for node, _ in edges:
            kind = self._known[node_key(node)].kind
            if kind:
                tensor, calls = node
                operation = None if is_eager(tensor) else tensor.op
                found.setdefault(kind, []).append(Mark(tensor, calls[0][0] if calls else operation))
        return found

    def _marked(self, edges: Iterable[Edge]) -> set[tuple]:
        """The keys of all nodes that come from a mark, and of the marks."""
        users: dict[tuple, list[tuple]] = {}
        waiting = []
        for node, sources in edges:
            key = node_key(node)
            for source in sources:
                users.setdefault(node_key(source), []).append(key)
            waiting += [key] if self._known[key].kind else []
        found = set(waiting)
        while waiting:
            new = [user for user in users.get(waiting.pop(), ()) if user not in found]
            found.update(new)
            waiting += new
        return found


def _look_at(node: Node, also: tuple[str, ...]) -> _Tensor:
    tensor = node[0]
    if not carries(tensor):
        return _Tensor(False, None, [], [])
    kind = kind_of(tensor, also)
    stopped = [(tensor.op.inputs[0], node[1])] if stops(tensor) else []
    return _Tensor(True, kind, [] if kind else list(sources_of(*node)), stopped)


def _components(grad: gradients.Gradient) -> list[tf.Tensor]:
    return tf.nest.flatten(grad, expand_composites=True)


_SUMS = ("AddV2", "AddN", "Sub", "Neg", "Sum", "Mean")
_SHAPES = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Pack")
_LINEAR = ("Mul", *_SUMS, *_SHAPES)


def refuse_scaled(loss: tf.Tensor) -> None:
    """Raises `InvalidArgument` for a loss that a scaler scaled, or that was multiplied by a scale by hand.

    A scale counts as multiplied by hand only if it enters the loss through sums and products. A penalty on gradients
    that were divided by a scale also depends on one.
    """
    (unit,) = units_of([loss])
    if isinstance(unit, Power) and not scales_of(unit):
        return
    by_hand = {kind_of(tensor) for tensor in tensors_upstream([loss], _ends_a_product)} & {LOSS_SCALE, READ}
    if by_hand or SCALED in Upstream([loss]).marks_before_stops([loss]):
        raise InvalidArgument(
            "scale(loss): the loss was scaled already, by this loss scaler or by another one: expected an unscaled "
            "loss. Its gradients would carry the product of both scales but be divided by only one. Call scale once, "
            "on the sum of all losses to differentiate."
        )


def _ends_a_product(tensor: tf.Tensor) -> bool:
    operation = getattr(tensor, "op", None) if not tf.executing_eagerly() else None
    return kind_of(tensor) is not None or getattr(operation, "type", "") not in _LINEAR
