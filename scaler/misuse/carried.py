"""Finds the scale that gradients in a graph carry: the one that multiplied their own loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.assignments import assignments, operations_around, value_assigned
from scaler.backend.graphs import LOOPS, graphs_around, is_eager, variables_read
from scaler.errors import InvalidArgument
from scaler.misuse.marks import LOSS_SCALE, READ, RETRIED, SCALED, Mark, Marks, kind_of, owner_of_scale, scale_of
from scaler.misuse.upstream import Upstream

_LOSS_FINITE = "_halfstep_loss_finite"
TO_APPLY = "apply(..., unscaled=True), or to the LossScaleOptimizer whose get_unscaled_gradients(grads) returned them"
"""What takes unscaled gradients."""
KEEP_UNSCALED = f"To keep gradients, keep those that unscale(grads) returns, and pass them to {TO_APPLY}."


class Carried(NamedTuple):
    """What gradients carry of their losses.

    Attributes:
        loss_scale: The scale that multiplied the losses, scalar float32.
        loss_finite: Scalar bool, whether the losses were finite; None if that is not known of these losses alone.
    """

    loss_scale: tf.Tensor
    loss_finite: tf.Tensor | None

    def divisor(self, unscaled: bool | tf.Tensor) -> tf.Tensor:
        """What unscales the gradients, if `unscaled`, scalar bool, says whether they are unscaled already."""
        if isinstance(unscaled, bool):
            return tf.constant(1.0) if unscaled else self.loss_scale
        return tf.where(unscaled, 1.0, self.loss_scale)


def knows_its_loss(loss_scale: tf.Tensor, loss_finite: tf.Tensor) -> tf.Tensor:
    """Lets a marked scale remember whether the loss that it multiplies is finite, and returns the scale."""
    setattr(loss_scale, _LOSS_FINITE, loss_finite)
    return loss_scale


def carried_in_graph(
    method: str,
    upstream: Upstream,
    owner: object,
    now: Any,
    used: Any,
    has_retried: bool = False,
    nobody_scaled: bool = False,
) -> Carried | None:
    """Finds the scale that gradients carry by what they are computed from.

    Args:
        method: Who asks, for the error.
        upstream: What the gradients come from, up to retried ones.
        owner: The `Calls` of the loss scaler.
        now: The variable that holds the scale of the next loss.
        used: The variable that holds the scale of the last loss.
        has_retried: Whether `retry` was called, which moves the scale too.
        nobody_scaled: Whether the loss of these gradients is known not to have been scaled.

    Returns:
        What they carry. None if it is the value of `used`, or if the graph does not show where they come from.

    Raises:
        InvalidArgument: If they carry several scales, one that nothing remembers, or none of a loss scaled here.
    """
    sources = _sources(method, upstream.marks, owner) or _sources(method, _marks_of_scaled(upstream), owner)
    sources = sources or _sources(method, _marks_of_kept(method, upstream, owner, nobody_scaled), owner)
    if not sources:
        return None
    last = _last_of_one_scale(method, sources, now, has_retried)
    here = [source.tensor for source in sources if _reachable(source.tensor)]
    if here:
        scales = list({scale.ref(): scale for scale in map(scale_of, here)}.values())
        known = [getattr(loss_scale, _LOSS_FINITE, None) for loss_scale in scales]
        if len(here) < len(sources) or any(finite is None for finite in known):
            return Carried(scales[-1], None)
        return Carried(scales[-1], known[0] if len(known) == 1 else tf.reduce_all(known))
    if scale_of(sources[-1].tensor) is not sources[-1].tensor:
        raise retried_elsewhere(method)
    moved = assignments(now, last)
    if (moved and assignments(used, last)) or _moves_itself(last, now):
        raise InvalidArgument(
            f"{method}(grads): the loss of these gradients was scaled inside of a function or a loop. Since then the "
            "loss scale moved and another loss was scaled, and nothing here remembers which scale these gradients "
            f"carry: expected gradients of the last loss. {KEEP_UNSCALED}"
        )
    return None


def scale_read(
    method: str,
    upstream: Upstream,
    owner: object,
    read: bool,
    now: Any,
    scale_now: Callable[[], tf.Tensor],
) -> tuple[tf.Tensor | None, bool]:
    """Finds the scale that gradients in a graph carry if the user read it outside the tape.

    Args:
        method: Who asks, for the error.
        upstream: What the gradients come from.
        owner: The `Calls` of the loss scaler.
        read: Whether its scale was read outside a tape since a loss was last scaled.
        now: The variable that holds the scale of the next loss.
        scale_now: Returns that scale.

    Returns:
        The scale or None, and whether the gradients may carry another scale than the last one in use.

    Raises:
        InvalidArgument: If the scale moved between two reads, or since it was read inside of a function or a loop.
    """
    if tf.executing_eagerly():
        return None, False
    found = upstream.marks
    if set(found) != {READ}:
        return None, read and not found and not _all_are_arguments(upstream.values)
    sources = _of(found, owner, READ)
    if len(sources) < len({one.tensor.ref() for one in found[READ]}):
        return None, True
    last = _last_of_one_scale(method, sources, now)
    here = [source.tensor for source in sources if _reachable(source.tensor)]
    if not here and (assignments(now, last) or _moves_itself(last, now)):
        raise InvalidArgument(
            f"{method}(grads): these gradients carry a loss_scale that was read inside of a function or a loop, and "
            "the loss scale moved since: expected gradients that carry the present one. Read loss_scale before the "
            f"loop, or apply the gradients where it is read. {KEEP_UNSCALED}"
        )
    return (here[-1] if here else scale_now()), False


def _last_of_one_scale(method: str, sources: Sequence[Mark], now: Any, has_retried: bool = False) -> Any:
    """The last operation of sources in order. Raises `InvalidArgument` if the scale moved between them."""
    first, last = sources[0].operation, sources[-1].operation
    if first is not last and assignments(now, first, last):
        before = "Scale all losses before the first apply or update."
        if has_retried:
            before = (
                "If a loss is computed from gradients that retry returned, as a gradient penalty is, leave out that "
                "retry and unscale the gradients as they are: a graph cannot differentiate through a retry. Otherwise, "
                "scale all losses before the first apply, update or retry."
            )
        raise InvalidArgument(
            f"{method}(grads): these gradients come from several losses, and the loss scale moved between them, so "
            "that no single scale divides the gradients: expected gradients of losses that one scale multiplied. "
            f"{before} {KEEP_UNSCALED}"
        )
    return last


def retried_eagerly(method: str, values: Sequence[tf.Tensor], owner: object) -> Carried | None:
    """What the values of gradients carry in eager mode, if `retry` returned all of them; else None.

    Raises:
        InvalidArgument: If several calls returned them, at several scales.
    """
    retried = [one for one in values if kind_of(one, (RETRIED,)) == RETRIED and owner_of_scale(one) is owner]
    if not retried or len(retried) < len(values):
        return None
    if len({float(scale_of(one)) for one in retried}) > 1:
        raise _several_retries(method)
    loss_scale = scale_of(retried[-1])
    return Carried(loss_scale, getattr(loss_scale, _LOSS_FINITE, None))


def retried_elsewhere(method: str) -> InvalidArgument:
    """The error for gradients that were retried in a function whose scale is not known here."""
    return InvalidArgument(
        f"{method}(grads): retry returned these gradients inside of a function or a loop, perhaps at a lower scale "
        "than that of their loss: expected that scale with them. Return what retry returns beside them, and pass it: "
        "apply(..., loss_scale=loss_scale)."
    )


def _sources(method: str, found: Marks, owner: object) -> list[Mark]:
    """The marks that tell which scale of `owner` is carried: those of a retry, or else of losses.

    Raises:
        InvalidArgument: For gradients that `retry` returned beside others, or that several calls of it returned.
    """
    retried = _of(found, owner, RETRIED)
    if not retried:
        return _of(found, owner, LOSS_SCALE)
    scales = [scale_of(one.tensor) for one in (*retried, *_of(found, owner, LOSS_SCALE, READ))]
    if any(one is not scales[0] for one in scales):
        raise _several_retries(method)
    return retried


def _several_retries(method: str) -> InvalidArgument:
    return InvalidArgument(
        f"{method}(grads): these gradients come from a retry, perhaps at a lower scale, and from another one or from "
        "the loss itself, so that no single scale divides them: expected all gradients of one retry. Pass all of a "
        "step's gradients to one call of retry, or unscale those of each by themselves."
    )


def _moves_itself(op: Any, now: Any) -> bool:
    """Whether an operation is a loop in which the scale moves."""
    return op.type in LOOPS and op in assignments(now, None, op)


def _reachable(tensor: tf.Tensor) -> bool:
    """Whether the current graph can use a tensor, because it belongs to this graph or to one around it."""
    return any(graph is tensor.graph for graph in graphs_around())


def _all_are_arguments(values: Sequence[tf.Tensor]) -> bool:
    """Whether a function received its gradients as arguments. Another function then scaled their loss."""
    return all(tensor.op.type == "Placeholder" for tensor in values if hasattr(tensor, "op"))


def _of(found: Marks, owner: object, *kinds: str) -> list[Mark]:
    """The scales of `owner` among marks of some kinds, each once, in the order of the operations."""
    own = [one for kind in kinds for one in found.get(kind, ()) if owner_of_scale(one.tensor) is owner]
    different = list({(one.tensor.ref(), one.operation.name): one for one in own}.values())
    if len(different) < 2:
        return different
    places = {op: place for place, op in enumerate(operations_around())}
    return sorted(different, key=lambda one: places.get(one.operation, -1))


def _marks_of_scaled(upstream: Upstream) -> Marks:
    """The marks behind scaled losses whose own values are in gradients, as of output_gradients=scale(1.0)."""
    scaled = [one.tensor for one in upstream.marks.get(SCALED, ())]
    return upstream.of([one.op.inputs[0] for one in scaled if not is_eager(one)]).marks


def _marks_of_kept(method: str, upstream: Upstream, owner: object, nobody_scaled: bool) -> Marks:
    """The marks of what this graph assigned to the variables from which gradients are read.

    A graph that scales a loss has to fill such a variable after that and before it is read. What the variable was given
    by an earlier call may carry an earlier scale.
    """
    scaled = next((op for op in operations_around() if op.type == "Identity" and _is_scale(op, owner)), None)
    if scaled is not None and nobody_scaled:
        raise InvalidArgument(
            f"{method}(grads): a loss was scaled in this function, but these gradients are those of a loss that was "
            "not, and the loss scale would divide them: expected gradients of what scale(loss) (scale_loss of a "
            "LossScaleOptimizer) returned. Differentiate that: tape.gradient(scale(loss), variables)."
        )
    assigned: list[tf.Tensor] = []
    for value in upstream.values if scaled is not None else ():
        reads = _reads(upstream.of([value]))
        filled = [op for read in reads for op in assignments(read.op.inputs[0], scaled, read.op)]
        if reads and not filled:
            raise InvalidArgument(
                f"{method}(grads): a gradient was kept in {_name(reads[0])} since before this function scaled its "
                "loss, perhaps at another scale, or its loss was not scaled at all: expected gradients of the loss "
                f"that was scaled here, of what scale(loss) returned. {KEEP_UNSCALED}"
            )
        assigned += [value for op in filled for value in value_assigned(op)]
    return upstream.marks_before_stops(assigned)


def _is_scale(op: Any, owner: object) -> bool:
    return owner_of_scale(op.outputs[0]) is owner and kind_of(op.outputs[0]) is not None


def _reads(upstream: Upstream) -> list[tf.Tensor]:
    """The tensors that a gradient comes from and that are read from variables."""
    seen = [one for one in upstream.before_stops if not is_eager(one)]
    return [one for one in seen if one.op.inputs and one.op.inputs[0].dtype == tf.resource]


def _name(read: tf.Tensor) -> str:
    variable = variables_read(read.graph).get(read.op.inputs[0].ref())
    return "a variable" if variable is None else f"the variable {variable.name!r}"
