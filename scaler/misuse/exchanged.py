"""Refuses gradients of one loss that are passed as those of another one. A graph shows whose they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scaler import gradients
from scaler.errors import InvalidArgument
from scaler.misuse.marks import LOSS_SCALE, READ, UNSCALED, owner_of_scale
from scaler.misuse.scaled_twice import divided_by_a_scale
from scaler.misuse.upstream import Upstream


def refuse_exchanged(loss: str, grads: Sequence[gradients.Gradient], owners: Mapping[str, object]) -> None:
    """Raises `InvalidArgument` if all scales that gradients carry are those of other losses.

    Args:
        loss: The name of the loss whose gradients they should be.
        grads: Gradients, or None.
        owners: The `Calls` that scaled each loss, by name.
    """
    upstream = Upstream(grads)
    if UNSCALED in upstream.marks or any(map(divided_by_a_scale, upstream.values)):
        return
    found = [owner_of_scale(one.tensor) for kind in (LOSS_SCALE, READ) for one in upstream.marks.get(kind, ())]
    others = [name for name, owner in owners.items() if any(owner is one for one in found)]
    if others and loss not in others:
        raise InvalidArgument(
            f"apply: loss {loss!r} was given gradients of loss {' and '.join(map(repr, others))}, whose scale they "
            "carry: expected for each loss the gradients of its own scaled value."
        )
