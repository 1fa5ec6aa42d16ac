"""Finds the scale that gradients in a graph carry: the one that multiplied their own loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from scaler.backend.assignments import assignments, assigns, operations_around
from scaler.backend.graphs import LOOPS, graphs_around
from scaler.backend.variables import choose
from scaler.errors import InvalidArgument
from scaler.misuse.marks import LOSS_SCALE, READ, RETRIED, is_of_last_loss, kind_of, owner_of_scale, scale_of
from scaler.misuse.units import Note, Source, Unit, memories_of, sources_of

_LOSS, _LOSS_FINITE = "_halfstep_loss", "_halfstep_loss_finite"
TO_APPLY = "apply(..., unscaled=True), or to the LossScaleOptimizer whose get_unscaled_gradients(grads) returned them"
"""What takes unscaled gradients."""
KEEP_UNSCALED = f"To keep gradients, keep those that unscale(grads) returns, and pass them to {TO_APPLY}."


class Carried(NamedTuple):
    """What gradients carry of their losses.

    Attributes:
        loss_scale: The scale that multiplied the losses, scalar float32.
        loss_finite: Scalar bool, whether the losses were finite; None if that is not known of these losses alone.
        loss: The sum of the losses, scalar float32; None if that is not known of these losses alone.
    """

    loss_scale: tf.Tensor
    loss_finite: tf.Tensor | None
    loss: tf.Tensor | None = None

    def divisor(self, unscaled: bool | tf.Tensor) -> tf.Tensor:
        """What unscales the gradients, if `unscaled`, scalar bool, says whether they are unscaled already."""
        if isinstance(unscaled, bool):
            return tf.constant(1.0) if unscaled else self.loss_scale
        return choose(unscaled, 1.0, self.loss_scale)


def knows_its_loss(loss_scale: tf.Tensor, loss_finite: tf.Tensor, loss: tf.Tensor | None = None) -> tf.Tensor:
    """Lets a marked scale remember the loss that it multiplies, and whether that is finite, and returns the scale."""
    setattr(loss_scale, _LOSS_FINITE, loss_finite)
    setattr(loss_scale, _LOSS, loss)
    return loss_scale


def carried_in_graph(
    method: str,
    units: Sequence[Unit],
    found: Sequence[Source],
    owner: object,
    now: Any,
    used: Any,
    has_retried: bool = False,
    nobody_scaled: bool = False,
) -> Carried | None:
    """Finds the scale that gradients carry by what they are computed from.

    Args:
        method: Who asks, for the error.
        units: Those of the gradients.
        found: All sources of these units.
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
    sources = _sources(method, found, owner)
    if not sources:
        _refuse_others(method, units, owner, nobody_scaled)
        return None
    last = _last_of_one_scale(method, sources, now, has_retried)
    _last_of_one_scale(method, _beside(found, owner, sources), now, has_retried)
    here = _reachable(sources)
    if here:
        scales = list({scale.ref(): scale for scale in map(scale_of, here)}.values())
        known = [getattr(loss_scale, _LOSS_FINITE, None) for loss_scale in scales]
        if len(here) < len(sources) or any(finite is None for finite in known):
            return Carried(scales[-1], None)
        losses = [getattr(loss_scale, _LOSS, None) for loss_scale in scales]
        loss = None if any(one is None for one in losses) else losses[0] if len(losses) == 1 else tf.add_n(losses)
        return Carried(scales[-1], known[0] if len(known) == 1 else tf.reduce_all(known), loss)
    if scale_of(sources[-1].mark.deref()) is not sources[-1].mark.deref():
        raise retried_elsewhere(method)
    moved = assignments(now, last)
    lost = (moved and assignments(used, last)) or _moves_itself(last, now)
    if lost or any(_is_forgotten_inside(source, now, used) for source in sources):
        raise InvalidArgument(
            f"{method}(grads): the loss of these gradients was scaled inside of a function or a loop. Since then the "
            "loss scale moved and another loss was scaled, and nothing here remembers which scale these gradients "
            f"carry: expected gradients of the last loss. {KEEP_UNSCALED}"
        )
    return None


def scale_read(
    method: str,
    values: Sequence[tf.Tensor],
    found: Sequence[Source],
    owner: object,
    read: bool,
    now: Any,
    scale_now: Callable[[], tf.Tensor],
) -> tuple[tf.Tensor | None, bool]:
    """Finds the scale that gradients in a graph carry if the user read it outside the tape.

    Args:
        method: Who asks, for the error.
        values: Those of the gradients.
        found: All sources of these.
        owner: The `Calls` of the loss scaler.
        read: Whether its scale was read outside a tape since a loss was last scaled.
        now: The variable that holds the scale of the next loss.
        scale_now: Returns that scale.

    Returns:
        The scale or None, and whether the gradients may carry another scale than the last one in use.

    Raises:
        InvalidArgument: If the scale moved between two reads, or since it was read inside of a function or a loop.
    """
    for one in found:
        if kind_of(one.mark.deref(), (RETRIED,)) != READ:
            return None, False
    if not found:
        # A function that received its gradients as arguments has another one scale their loss.
        return None, read and not all(one.op.type == "Placeholder" for one in values if hasattr(one, "op"))
    sources = _of(found, owner, READ)
    if len(sources) < len({one.mark for one in found}):
        return None, True
    last = _last_of_one_scale(method, sources, now)
    here = _reachable(sources)
    if not here and (assignments(now, last) or _moves_itself(last, now)):
        raise InvalidArgument(
            f"{method}(grads): these gradients carry a loss_scale that was read inside of a function or a loop, and "
            "the loss scale moved since: expected gradients that carry the present one. Read loss_scale before the "
            f"loop, or apply the gradients where it is read. {KEEP_UNSCALED}"
        )
    return (here[-1] if here else scale_now()), False


def _last_of_one_scale(method: str, sources: Sequence[Source], now: Any, has_retried: bool = False) -> Any:
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


def _beside(found: Sequence[Source], owner: object, sources: Sequence[Source]) -> Sequence[Source]:
    """The sources, with the scales that were read outside a tape and multiply a part of the same gradients.

    A scale that divides a part may have taken another one out of it: then the sources are returned as they are.
    """
    for one in found:
        if one.owner is owner and (one.power < 0.0 or kind_of(one.mark.deref(), (RETRIED,)) == RETRIED):
            return sources
    return _of(found, owner, LOSS_SCALE, READ)


def divided_by_another_scale(units: Sequence[Unit], owner: object, now: Any) -> str | None:
    """Returns a warning if a scale divides unscaled gradients that moved since it multiplied their loss, else None.

    Args:
        units: Those of the gradients.
        owner: The `Calls` of the loss scaler.
        now: The variable that holds the scale of the next loss.
    """
    places = {op: place for place, op in enumerate(operations_around())}
    for unit in units:
        mine = [one for one in sources_of([unit]) if one.owner is owner and not is_of_last_loss(one.mark.deref())]
        known = sorted((places[one.operation], one.power, one.operation) for one in mine if one.operation in places)
        pairs = [(first, last) for first, last in itertools.pairwise(known) if first[1] * last[1] < 0.0]
        if any(assignments(now, first[2], last[2]) for first, last in pairs if first[0] != last[0]):
            return (
                "apply(grads, unscaled=True): a loss_scale divided these gradients that was read in another place than "
                "the one that multiplied their loss, and an apply or an update in between may have moved it: they may "
                "be wrong by this factor. Divide by scale_of_gradients, which stays that of the loss, or pass what "
                "unscale(grads) returned."
            )
    return None


def of_one_retry(method: str, values: Sequence[tf.Tensor], owner: object) -> Carried | None:
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


def _sources(method: str, found: Sequence[Source], owner: object) -> list[Source]:
    """The sources that tell which scale of `owner` is carried: those of a retry, or else of losses.

    Raises:
        InvalidArgument: For gradients that `retry` returned beside others, or that several calls of it returned.
    """
    retried = _of(found, owner, RETRIED)
    if not retried:
        return _of(found, owner, LOSS_SCALE)
    scales = [scale_of(one.mark.deref()) for one in (*retried, *_of(found, owner, LOSS_SCALE, READ))]
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


def _is_forgotten_inside(source: Source, now: Any, used: Any) -> bool:
    """Whether the function in which a loss was scaled moves the scale behind that, and then scales another one."""
    marked = source.mark.deref()
    operations = marked.graph.get_operations()
    behind = iter(operations[operations.index(marked.op) + 1 :])
    return any(assigns([op], now) for op in behind) and any(assigns([op], used) for op in behind)


def _reachable(sources: Sequence[Source]) -> list[tf.Tensor]:
    """The marked tensors that the current graph can use, because they belong to it or to one around it."""
    around = set(map(id, graphs_around()))
    return [source.mark.deref() for source in sources if id(source.mark.deref().graph) in around]


def _of(found: Sequence[Source], owner: object, *kinds: str) -> list[Source]:
    """The sources of `owner`, of some kinds, each once, in the order of the operations."""
    mine: dict[Source, None] = {}
    for source in found:
        if source.owner is owner and kind_of(source.mark.deref(), (RETRIED,)) in kinds:
            mine[source._replace(power=1.0)] = None
    if len(mine) < 2:
        return list(mine)
    places = {op: place for place, op in enumerate(operations_around())}
    return sorted(mine, key=lambda one: places.get(one.operation, -1))


def _refuse_others(method: str, units: Sequence[Unit], owner: object, nobody_scaled: bool) -> None:
    """Refuses gradients that come from none of the losses which this graph scaled.

    A variable may give out what was assigned to it after that. What an earlier call left may carry an earlier scale.
    """
    marked = (op.outputs[0] for op in operations_around() if op.type == "Identity")
    if not any(owner_of_scale(one) is owner and kind_of(one) is not None for one in marked):
        return
    if nobody_scaled or any(Note.MODEL in getattr(unit, "notes", getattr(unit, "of", ())) for unit in units):
        raise InvalidArgument(
            f"{method}(grads): a loss was scaled in this function, but these gradients are those of a loss that was "
            "not, and the loss scale would divide them: expected gradients of what scale(loss) (scale_loss of a "
            "LossScaleOptimizer) returned. Differentiate that: tape.gradient(scale(loss), variables)."
        )
    kept = [one for one in memories_of(units) if one.is_variable]
    if kept:
        raise InvalidArgument(
            f"{method}(grads): a gradient was kept in {kept[0].name} since before this function scaled its "
            "loss, perhaps at another scale, or its loss was not scaled at all: expected gradients of the loss "
            f"that was scaled here, of what scale(loss) returned. {KEEP_UNSCALED}"
        )
