"""A step that was applied though its loss is not finite: the run trains, and nobody can see its loss."""

from __future__ import annotations


def unseen_loss(step: str) -> str:
    """Says what it means, and what to do.

    Args:
        step: Which one, as the beginning of a sentence.
    """
    return (
        f"{step} was applied though its loss is not finite. Its gradients are finite, so the model goes on training, "
        "but its loss cannot be seen. The usual reason is a loss that overflows in float16, above 65504. Compute the "
        "loss in float32: cast the predictions and the targets to float32 before the loss, or give the model's last "
        "layer dtype='float32'."
    )
