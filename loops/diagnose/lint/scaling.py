"""What a set-up does to the loss and to 16-bit weights, told from its optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

import scaler
from loops.step.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Whether a loss scaler runs, and whether 16-bit weights have masters.

    Attributes:
        scales: Whether the loss is scaled.
        has_masters: Whether variables of 16 bits are trained through float32.
        said: What says so, in words.
    """

    scales: bool
    has_masters: bool
    said: str


def scaling_of(optimizer: Any) -> Scaling:
    """What an optimizer, or the train step that holds it, does.

    Raises:
        scaler.InvalidArgument: For anything else.
    """
    if isinstance(optimizer, TrainStep):
        strategy = optimizer.loss_scaler.strategy
        return Scaling(
            _moves(strategy) or optimizer.layerwise is not None,
            not optimizer.allow_16bit_updates,
            f"the TrainStep scales by {type(strategy).__name__}",
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, scaler.LossScaleOptimizer):
        strategy = optimizer.loss_scaler.strategy
        return Scaling(_moves(strategy), True, f"the optimizer scales by {type(strategy).__name__}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return Scaling(True, False, "the optimizer is keras.optimizers.LossScaleOptimizer")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        factor = optimizer.loss_scale_factor
        said = f"the optimizer is {kind}" + (f" with loss_scale_factor={factor:g}" if factor else "")
        return Scaling(bool(factor) and factor != 1, False, said)
    if callable(optimizer):
        return Scaling(False, False, f"the optimizer is the function {getattr(optimizer, '__name__', kind)}")
    raise scaler.InvalidArgument(
        f"lint(optimizer={optimizer!r}): expected a Keras optimizer, a scaler.LossScaleOptimizer, a loops.TrainStep "
        "that holds the optimizer, or a function of (grads, variables)."
    )


def _moves(strategy: Any) -> bool:
    """Whether a strategy ever scales by anything but 1."""
    fixed = isinstance(strategy, (scaler.NoScaling, scaler.Static))
    return not fixed or float(strategy.init().loss_scale) != 1.0
