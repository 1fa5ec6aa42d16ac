"""The loss-scaled optimizers of a Keras model."""

from __future__ import annotations

import keras

from scaler.keras.optimizer import LossScaleOptimizer


def loss_scale_optimizers(model: keras.Model) -> dict[str, LossScaleOptimizer]:
    """Finds them by the attributes that hold them, each once: the compiled one, or several as in a GAN."""
    found = {id(value): name for name, value in vars(model).items() if isinstance(value, LossScaleOptimizer)}
    return {name: getattr(model, name) for name in found.values()}


def not_restored(model: keras.Model) -> str:
    """A sentence about a class whose models Keras loads without their optimizer, as those of keras-hub; else nothing.

    Keras compiles a loaded model as it was saved unless its class overrides `compile` and says nothing of loading.
    """
    kind = type(model)
    if kind.compile is keras.Model.compile or kind.compile_from_config is not keras.Model.compile_from_config:
        return ""
    return (
        f" {kind.__name__} overrides `compile`, so that Keras does not restore the optimizer from a .keras file. To go "
        "on with a saved run: compile(optimizer=scaler.LossScaleOptimizer(...)), then "
        "optimizer.build(model.trainable_variables), then load_weights, which also reads a .keras file."
    )
