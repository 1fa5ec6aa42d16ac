"""The loss-scaled optimizers of a Keras model."""

from __future__ import annotations

import keras

from scaler.keras.optimizer import LossScaleOptimizer


def loss_scale_optimizers(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Finds them by the attributes that hold them, each once: the compiled one, or several as in a GAN."""
    found = {id(value): name for name, value in vars(model).items() if isinstance(value, LossScaleOptimizer)}
    return {name: getattr(model, name) for name in found.values()}
