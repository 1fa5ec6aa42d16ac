"""More than one loss scale: for each group of a model's layers, or for each of several losses."""

from scaler.checks import suggest_arguments
from scaler.layerwise.adaptive import AdaptiveScale, AdaptiveScaleState, LayerEvent
from scaler.layerwise.cut_points import insert_rescales
from scaler.layerwise.groups import Layerwise
from scaler.layerwise.per_loss import PerLoss
from scaler.layerwise.rescaling import rescale

__all__ = ["AdaptiveScale", "AdaptiveScaleState", "LayerEvent", "Layerwise", "PerLoss", "insert_rescales", "rescale"]

suggest_arguments(globals())
