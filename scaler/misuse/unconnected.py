"""Variables that a loss does not reach: they have no gradient, and are never trained."""

from __future__ import annotations

from collections.abc import Sequence

from scaler.weights.trainable import listed, name_of


def without_gradient(grads: Sequence, variables: Sequence) -> str | None:
    """The sentence for variables without a gradient, or None if all that are not frozen have one, or none has.

    Args:
        grads: Gradients or None, one for each variable.
        variables: TensorFlow or Keras variables.
    """
    if all(grad is None for grad in grads):
        return None
    pairs = zip(grads, variables, strict=True)
    names = [name_of(own) for grad, own in pairs if grad is None and getattr(own, "trainable", True)]
    if not names:
        return None
    it, they_are, layer = ("it", "it is", "its layer") if len(names) == 1 else ("them", "they are", "their layers")
    return (
        f"there is no gradient for {listed(names)}: the loss does not depend on {it}, and {they_are} not trained. "
        f"Connect {it} with the loss, leave {it} out of the list, or set trainable=False on {layer}."
    )
