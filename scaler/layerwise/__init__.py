"""More than one loss scale: for each group of a model's layers, or for each of several losses."""

from scaler.checks import suggest_arguments
from scaler.layerwise.adaptive import AdaptiveScale as AdaptiveScale
from scaler.layerwise.adaptive import AdaptiveScaleState as AdaptiveScaleState
from scaler.layerwise.adaptive import LayerEvent as LayerEvent
from scaler.layerwise.cut_points import insert_rescales as insert_rescales
from scaler.layerwise.groups import Layerwise as Layerwise
from scaler.layerwise.per_loss import PerLoss as PerLoss
from scaler.layerwise.rescaling import rescale as rescale

__all__ = ["AdaptiveScale", "AdaptiveScaleState", "LayerEvent", "Layerwise", "PerLoss", "insert_rescales", "rescale"]

suggest_arguments(globals())
