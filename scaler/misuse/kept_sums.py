"""Gradients of an earlier step, perhaps of another scale: added to what a variable kept, or out of a queue or a table.

Which assignments a step makes is known when its trace ends. It is interpreted twice then: if a variable holds scaled
gradients at last, the next call finds them there. Eager mode has no graph to look at. What was put into a queue, and
when, is not in the graph. What Python keeps behind a `tf.py_function` is not seen at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend import replicas
from scaler.backend.assignments import assigns, at_end_of_trace, is_function, is_loop_body
from scaler.backend.graphs import CALLS, captured_from, graphs_around, is_eager
from scaler.errors import InvalidArgument
from scaler.misuse.carried import KEEP_UNSCALED, TO_APPLY
from scaler.misuse.frame import Either
from scaler.misuse.trace import Trace, trace_here
from scaler.misuse.units import ZERO, Kept, Mixed, Power, Share, Unit, Unknown, mapped, memories_of, sources_of

_SELECTS = ("Select", "SelectV2")
_QUOTIENTS = ("RealDiv", "Div", "DivNoNan")
_TIMES = ("Mul", *_QUOTIENTS)
_TAKES_OVER = frozenset(
    (
        *("Identity", "IdentityN", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "EnsureShape", "Snapshot"),
        *("StopGradient", "PreventGradient", "CheckNumerics", "Slice", "StridedSlice", "Unpack", "Split", "SplitV"),
        *("Neg", "Sum", "Mean", "AddV2", "Add", "AddN", "Sub", "Pack", "ConcatV2", "TensorScatterAdd"),
        *("TensorScatterSub", "TensorScatterUpdate", *_SELECTS, *_TIMES),
    )
)
"""Operations whose result holds what went in."""


def look_at_end(
    method: str,
    values: Sequence[tf.Tensor],
    units: Sequence[Unit],
    targets: Sequence,
    owner: object,
    always: bool,
    now: Any,
    used: Any,
    say_once: Callable[[str, str], None],
) -> None:
    """Looks, when the trace of the step ends, at what its gradients take over from earlier calls.

    A step is the body of the innermost loop, or else the outermost function that is known to lead here.

    Args:
        method: Who asks, for the sentences.
        values: The scaled gradients.
        units: Their units now.
        targets: The variables to update. They hold no gradients.
        owner: The `Calls` of the loss scaler.
        always: Whether every call of the step takes these gradients.
        now: The variable that holds the scale of the next loss.
        used: The variable that holds the scale of the last loss.
        say_once: Gives a warning, once for all of the same mistake.
    """
    values = [value for value in values if not is_eager(value)]
    graphs: list[Any] = []
    for graph in filter(is_function, graphs_around()):
        graphs.append(graph)
        if is_loop_body(graph):
            break
    trace = trace_here()
    if not values or not graphs or trace is None:
        return
    updated = {id(part.handle) for one in map(replicas.native, targets) for part in getattr(one, "values", (one,))}
    kept = memories_of(units)
    variables = {one.memory: one for one in kept if one.is_variable and one.memory not in updated}
    replica_is_one, handled = replicas.replica_count() == 1, sys.exc_info()[1]
    # Else the last loss is that of the pass before, whose gradients the loop carries.
    has_scaled = assigns(graphs[-1].get_operations(), used)
    always = always and replica_is_one and all(type(graph).__name__ == "FuncGraph" for graph in graphs[:-1])

    def look() -> None:
        # An error that ends the trace says enough.
        if sys.exc_info()[1] is not handled:
            return
        scaled = frozenset([(owner, 1.0)])
        memories = _scaled_at_last(trace, graphs[-1], {**variables, **_carried(graphs[-1], now)}, scaled)
        delayed = frozenset([(_Earlier(owner), 1.0)])
        earlier = dict.fromkeys(memories, Power(delayed))
        apart, _ = trace.again(graphs[-1], earlier, values, lambda op, given, unit: unit) if memories else ([], {})
        if all(isinstance(unit, Power) and unit.powers == scaled for unit in apart):
            return
        in_a_loop = has_scaled and not any(kept.name for kept in memories.values())
        if in_a_loop and any(isinstance(unit, Power) and unit.powers == delayed for unit in apart):
            raise InvalidArgument(
                f"{method}(grads): a loop carries these gradients from an earlier pass. The scale moves between the "
                f"passes, so that this pass's does not divide them: expected those of the last loss. {KEEP_UNSCALED}"
            )
        sums = _sums(trace, graphs[-1], values, memories, scaled)
        for sum_ in sums:
            wrong = sum_.wrong(always)
            if wrong and not sum_.kept.name:
                raise InvalidArgument(
                    f"{method}(grads): a loop carries scaled gradients from one pass to the next, as a momentum does, "
                    "and the loss scale moves between the passes, so that no single scale divides the sum: expected "
                    f"gradients of losses that one scale multiplied. {KEEP_UNSCALED}"
                )
            if wrong and replica_is_one:
                raise InvalidArgument(
                    f"{method}(grads): {sum_.kept.name} keeps scaled gradients from call to call, {wrong}. The loss "
                    "scale moves between the calls, so that no single scale divides the sum: expected gradients of "
                    f"losses that one scale multiplied. {KEEP_UNSCALED}"
                )
            if sum_.kept.name:
                say_once(
                    f"{method}(grads): {sum_.kept.name} sums scaled gradients over several calls, and the scale of the "
                    "last loss divides them all. This is right only while the loss scale does not move inside of a "
                    f"window. To be sure, sum what unscale(grads) returns, and pass the sums to {TO_APPLY}.",
                    "a sum of scaled gradients",
                )
        if not sums and any(map(_mixes_calls, apart)):
            name = next(iter(memories.values())).name or "a loop"
            say_once(
                f"{method}(grads): {name} keeps what earlier calls computed from scaled gradients, such as their norm, "
                "and these gradients are limited by it or otherwise depend on it. The loss scale moves between the "
                f"calls. {KEEP_UNSCALED}",
                "kept values of scaled gradients",
            )

    at_end_of_trace(graphs[-1], look)


class _Sum(NamedTuple):
    """Scaled gradients of an earlier call, to which those of this one are added.

    Attributes:
        kept: Where they were.
        shares: How much of them is left for the next call.
    """

    kept: Kept
    shares: set[Share]

    def wrong(self, always: bool) -> str | None:
        """Why this cannot be the sum of a window's micro-batches, or None if it can.

        Args:
            always: Whether every call of the step takes these gradients.
        """
        if not self.shares:
            return "and adds the last call's to those of this one" if always else None
        is_momentum = Share.PART in self.shares and Share.CHOICE not in self.shares
        return "as a momentum or an average does, times a constant" if is_momentum else None


def _carried(graph: Any, now: Any) -> dict[int, Kept]:
    """What a loop in which the scale moves carries from one pass to the next."""
    if not is_loop_body(graph) or not assigns(graph.get_operations(), now):
        return {}
    own = [one for one in graph.inputs if one.dtype.is_floating and captured_from(one) is None]
    return {id(one): Kept(id(one), "", is_number=one.shape.rank == 0) for one in own}


def _scaled_at_last(trace: Trace, graph: Any, memories: Mapping[int, Kept], scaled: frozenset) -> dict[int, Kept]:
    """The memories that hold scaled gradients when a call ends, and so when the next one begins."""
    # A scalar is a counter or a norm. A counter of 0 would make unknown what it divides.
    supposed: dict[int, Unit] = {key: ZERO for key, kept in memories.items() if not kept.is_number}
    found: dict[int, Kept] = {}
    while len(found) < len(memories):
        _, last = trace.again(graph, supposed, (), _held_on)
        units = ((key, last.get(key)) for key in memories.keys() - found.keys())
        new = [key for key, unit in units if isinstance(unit, Power) and unit.powers == scaled]
        if not new:
            break
        # A memory may pass what it holds on to another one.
        supposed |= dict.fromkeys(new, Power(scaled))
        found |= {key: memories[key] for key in new}
    return found


def _sums(
    trace: Trace, graph: Any, values: Sequence[tf.Tensor], memories: Mapping[int, Kept], scaled: frozenset
) -> list[_Sum]:
    """The memories from which the gradients take scaled ones of an earlier call."""
    supposed = {key: Power(scaled, frozenset([kept])) for key, kept in memories.items()}
    units, last = trace.again(graph, supposed, values, _held_on)
    found = []
    for key, kept in memories.items():
        taking = [unit for unit in units if not isinstance(unit, Unknown) and _shares(unit, key)]
        shares = _shares(last.get(key, ZERO), key)
        if taking and (shares or sources_of(taking)):
            found.append(_Sum(kept, shares))
    return found


def _mixes_calls(unit: Unit) -> bool:
    """Whether a gradient is mixed of scales of two calls. A constant may be an earlier scale, which divides a part."""
    return isinstance(unit, Mixed) and all(sum(power for _, power in part.powers) == 1.0 for part in unit.of)


class _Earlier(NamedTuple):
    """The scale of an earlier call, which is another symbol than that of this one."""

    owner: object


def _shares(unit: Unit, memory: int) -> set[Share]:
    """How much is in a tensor of what a memory held at first; nothing if it is empty."""
    return {one.share for one in memories_of([unit]) if one.memory == memory}


def _held_on(op: Any, given: Sequence[Any], unit: Unit) -> Unit:
    """The unit of a result in which only what was kept and still is a summand counts as kept."""
    if op.type in CALLS or op.type == "ReadVariableOp" or isinstance(unit, Either):
        return unit
    takes, shares = op.type in _TAKES_OVER, {}
    for place, (factor, one) in enumerate(zip(given, op.inputs, strict=True)):
        kept = [] if one.dtype == tf.resource else memories_of([factor])
        if not kept or not takes or (op.type in _QUOTIENTS and place):
            continue
        if op.type in _TIMES:
            # The quotient of a norm that was kept and another one does not hold gradients.
            if isinstance(factor, Power) and isinstance(unit, Power) and factor.powers == unit.powers:
                shares.update(dict.fromkeys(kept, _share_of(op.inputs[1 - place])))
        elif one.dtype.is_floating or one.dtype == tf.variant:
            shares.update(dict.fromkeys(kept, Share.CHOICE if op.type in _SELECTS else Share.ALL))

    def held(origins: frozenset) -> set:
        others = {one for one in origins if not isinstance(one, Kept)}
        mine = {one for one in origins if one in shares}
        return others | {one if shares[one] is Share.ALL else one._replace(share=shares[one]) for one in mine}

    return mapped(unit, held)


def _share_of(factor: tf.Tensor) -> Share:
    """How much of a tensor is in its product with a factor."""
    known: tf.Tensor | None = factor
    while known is not None and not is_eager(known) and known.op.type == "Placeholder":
        known = captured_from(known)
    value = None if known is None else tf.get_static_value(known)
    if value is None or value.size != 1:
        return Share.CHOICE
    return Share.ALL if abs(value.item()) == 1.0 else Share.PART


def kept_elsewhere(method: str, units: Sequence[Unit]) -> str | None:
    """Returns a warning if a gradient comes out of a queue or the like, and from no loss in this graph, else None.

    A forward pass may look up values in a table, too: its gradients come from a loss.

    Args:
        method: Who asks.
        units: Those of the gradients.
    """
    kept = memories_of([unit for unit in units if not sources_of([unit])])
    memory = next((one.name for one in kept if not one.is_variable), None)
    if memory is None:
        return None
    return (
        f"{method}(grads): a gradient comes out of {memory}, and nothing tells which loss it belongs to. The scale of "
        f"the last loss divides it, and it may carry that of an earlier step. {KEEP_UNSCALED}"
    )
