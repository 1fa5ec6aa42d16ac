"""What an optimizer updates: float32 masters of 16-bit variables, or the 16-bit variables themselves."""

from scaler.checks import suggest_arguments
from scaler.weights.masters import MasterWeights
from scaler.weights.trainable import TrainableSet
from scaler.weights.without_masters import KahanWeights, StochasticRounding

__all__ = ["KahanWeights", "MasterWeights", "StochasticRounding", "TrainableSet"]

suggest_arguments(globals())
