"""What an optimizer updates: float32 masters of 16-bit variables, or the 16-bit variables themselves."""

from scaler.weights.kahan import KahanWeights as KahanWeights
from scaler.weights.masters import MasterWeights as MasterWeights
from scaler.weights.stochastic_rounding import StochasticRounding as StochasticRounding
from scaler.weights.trainable import TrainableSet as TrainableSet

__all__ = ["KahanWeights", "MasterWeights", "StochasticRounding", "TrainableSet"]
