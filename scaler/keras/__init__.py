"""Loss scaling for `compile` and `fit`: an optimizer that wraps another, `protect`, and a callback."""

from scaler.keras.callback import LossScaleLogger as LossScaleLogger
from scaler.keras.optimizer import LossScaleOptimizer as LossScaleOptimizer
from scaler.keras.protect import protect as protect
