"""Finds gradients of one step that carry different factors: scales of two scalers, or a scale and none.

In a graph every sum upstream tells, and every gradient of the list. Eager mode has no graph to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaler.backend.graphs import in_a_branch, is_eager
from scaler.errors import InvalidArgument
from scaler.mistakes.carried import TO_APPLY
from scaler.mistakes.marks import LOSS_SCALE, READ, UNSCALED, kind_of, owner_of_scale
from scaler.mistakes.scaled_twice import divides_by_a_scale
from scaler.mistakes.sources import Node, choices_of, node_key
from scaler.mistakes.upstream import Upstream

_SUMS = ("AddV2", "Add", "AddN", "Sub")
_BY_HAND = "divided by hand"
"""By a scale. The derivative of such a division is another one, so that nothing is known of what carries it."""
_Factors = frozenset[Any]


def refuse_mixed(method: str, upstream: Upstream, owner: object, may_leave_out: bool = False) -> None:
    """Raises `InvalidArgument` for gradients of which only a part carries the scale of `owner`.

    Args:
        method: Who asks, for the error.
        upstream: What scaled gradients come from.
        owner: The `Calls` of a loss scaler, or None if the scales of others are not checked.
        may_leave_out: Whether not every call of the step takes these gradients.
    """
    marked = [one.tensor for kind in (LOSS_SCALE, READ, UNSCALED) for one in upstream.marks.get(kind, ())]
    if owner is None or len(set(map(_factor, marked))) < 2:
        return
    carried = _carried(upstream)
    alone = [carried[value.ref(), ()] for value in upstream.values]
    if any(factors and factors.isdisjoint((owner, _BY_HAND)) for factors in alone):
        raise InvalidArgument(
            f"{method}(grads): this loss scaler scaled a part of these gradients. Others come from unscale, or from "
            "the loss of another loss scaler, and would be divided by a scale that they do not carry: expected "
            f"gradients of losses that this one scaled. {_ONE_BY_ONE}"
        )
    # One scaler may take what its own branch gave, and another one the rest.
    may_choose = may_leave_out or in_a_branch()
    for (tensor, calls), factors in carried.items():
        if len(factors) > 1 and not may_choose and _apart(choices_of(tensor.deref(), calls), carried):
            raise InvalidArgument(
                f"{method}(grads): one branch of a tf.cond scales its loss with another loss scaler than the other "
                "branch. This scaler would divide the gradients of both: expected gradients of losses that this one "
                "scaled. Apply the gradients inside of the branch, by the scaler that scaled their loss."
            )
        if len(factors) > 1 and _adds(tensor, calls, carried):
            raise InvalidArgument(
                f"{method}(grads): a gradient is a sum of parts that carry different scales: of two loss scalers, "
                f"or of one and none. No single scale divides it: expected gradients of one scale. {_ONE_BY_ONE}"
            )


_ONE_BY_ONE = (
    "Scale the sum of the losses once, or unscale the gradients of each loss by its own scaler and pass what you make "
    f"of them to {TO_APPLY}."
)


def _factor(marked: tf.Tensor) -> Any:
    """What a mark says of gradients: the scaler whose scale they carry, or `UNSCALED`. None for other marks."""
    kind = kind_of(marked)
    return owner_of_scale(marked) if kind in (LOSS_SCALE, READ) else UNSCALED if kind == UNSCALED else None


def _carried(upstream: Upstream) -> dict[tuple, _Factors]:
    """The factors of each tensor upstream, by its reference and the functions entered on the way to it."""
    users: dict[tuple, list[tuple]] = {}
    carried: dict[tuple, _Factors] = {}
    waiting = []
    for node, sources in upstream.edges:
        factor = _BY_HAND if divides_by_a_scale(node[0]) else _factor(node[0])
        key = node[0].ref(), node[1]
        carried[key] = frozenset() if factor is None else frozenset([factor])
        waiting += [] if factor is None else [key]
        for tensor, calls in sources:
            users.setdefault((tensor.ref(), calls), []).append(key)
    while waiting:
        key = waiting.pop()
        for user in users.get(key, ()):
            if not carried[key] <= carried[user]:
                carried[user] |= carried[key]
                waiting.append(user)
    return carried


def _adds(reference: Any, calls: tuple, carried: dict[tuple, _Factors]) -> bool:
    """Whether a tensor is a sum of parts that have no factor in common."""
    tensor = reference.deref()
    if is_eager(tensor) or tensor.op.type not in _SUMS:
        return False
    return _apart([(source, calls) for source in tensor.op.inputs], carried)


def _apart(parts: Sequence[Node], carried: dict[tuple, _Factors]) -> bool:
    """Whether two of these parts carry factors, and have none in common."""
    factors = [carried.get(node_key(part), frozenset()) for part in parts]
    some = [one for one in factors if one and _BY_HAND not in one]
    return len(some) > 1 and any(one.isdisjoint(other) for one in some for other in some)
