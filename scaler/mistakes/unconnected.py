"""Variables that a loss does not reach: they have no gradient, and are never trained."""

from __future__ import annotations

from collections.abc import Sequence

from scaler.weights.trainable import listed, name_of


def without_gradient(grads: Sequence, variables: Sequence) -> str | None:
    """The sentence for variables without a gradient, or None if all have one, or none has.

    Args:
        grads: Gradients or None, one for each variable.
        variables: TensorFlow or Keras variables.
    """
    names = [name_of(variable) for grad, variable in zip(grads, variables, strict=True) if grad is None]
    if not names or len(names) == len(grads):
        return None
    return (
        f"there is no gradient for {listed(names)}: the loss does not depend on them, and they are not trained. "
        "Connect them with the loss, or set trainable=False on their layers."
    )
