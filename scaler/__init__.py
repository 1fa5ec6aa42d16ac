"""Loss scaling for TensorFlow that never corrupts a run.

The order of a step:

    batch -> forward -> loss (float32) -> scale -> backward -> scaled gradients -> unscale in float32 -> finite?
          -> applied: clip -> optimizer on float32 weights -> finite? else put back -> round masters into the model
          |  skipped: put non-trainable state back
          -> strategy(state, event) -> next scale -> counters -> outcome
"""

from scaler import presets as presets
from scaler.clipping import ClipByNorm as ClipByNorm
from scaler.clipping import ClipByValue as ClipByValue
from scaler.cut_points import insert_rescales as insert_rescales
from scaler.errors import InvalidArgument as InvalidArgument
from scaler.errors import ScalerError as ScalerError
from scaler.errors import ScaleWarning as ScaleWarning
from scaler.errors import StuckError as StuckError
from scaler.errors import StuckWarning as StuckWarning
from scaler.errors import UnsupportedVersion as UnsupportedVersion
from scaler.formats import FloatFormat as FloatFormat
from scaler.formats import float_format as float_format
from scaler.gradients import all_finite as all_finite
from scaler.keras import LossScaleLogger as LossScaleLogger
from scaler.keras import LossScaleOptimizer as LossScaleOptimizer
from scaler.keras import protect as protect
from scaler.layerwise import Layerwise as Layerwise
from scaler.loss_scaler import Counters as Counters
from scaler.loss_scaler import LossScaler as LossScaler
from scaler.masters import MasterWeights as MasterWeights
from scaler.outcome import Cause as Cause
from scaler.outcome import Outcome as Outcome
from scaler.per_loss import PerLoss as PerLoss
from scaler.rescaling import rescale as rescale
from scaler.rollback import Snapshot as Snapshot
from scaler.rollback import snapshot as snapshot
from scaler.statistics import amax as amax
from scaler.statistics import histogram as histogram
from scaler.strategies import AdaptiveScale as AdaptiveScale
from scaler.strategies import AdaptiveScaleState as AdaptiveScaleState
from scaler.strategies import Bounded as Bounded
from scaler.strategies import DelayedAmax as DelayedAmax
from scaler.strategies import DelayedAmaxState as DelayedAmaxState
from scaler.strategies import Dynamic as Dynamic
from scaler.strategies import DynamicState as DynamicState
from scaler.strategies import Event as Event
from scaler.strategies import Headroom as Headroom
from scaler.strategies import HeadroomState as HeadroomState
from scaler.strategies import Histogram as Histogram
from scaler.strategies import HistogramState as HistogramState
from scaler.strategies import LayerEvent as LayerEvent
from scaler.strategies import LogNormal as LogNormal
from scaler.strategies import LogNormalState as LogNormalState
from scaler.strategies import Needs as Needs
from scaler.strategies import NoScaling as NoScaling
from scaler.strategies import RisingFloor as RisingFloor
from scaler.strategies import Scheduled as Scheduled
from scaler.strategies import Smooth as Smooth
from scaler.strategies import SmoothState as SmoothState
from scaler.strategies import Static as Static
from scaler.strategies import StaticState as StaticState
from scaler.strategies import Strategy as Strategy
from scaler.strategies import Warmup as Warmup
from scaler.stuck import StuckPolicy as StuckPolicy
from scaler.trainable import TrainableSet as TrainableSet
from scaler.update_modes import KahanWeights as KahanWeights
from scaler.update_modes import StochasticRounding as StochasticRounding

__all__ = [
    "AdaptiveScale",
    "AdaptiveScaleState",
    "Bounded",
    "Cause",
    "ClipByNorm",
    "ClipByValue",
    "Counters",
    "DelayedAmax",
    "DelayedAmaxState",
    "Dynamic",
    "DynamicState",
    "Event",
    "FloatFormat",
    "Headroom",
    "HeadroomState",
    "Histogram",
    "HistogramState",
    "InvalidArgument",
    "KahanWeights",
    "LayerEvent",
    "Layerwise",
    "LogNormal",
    "LogNormalState",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "LossScaler",
    "MasterWeights",
    "Needs",
    "NoScaling",
    "Outcome",
    "PerLoss",
    "RisingFloor",
    "ScaleWarning",
    "ScalerError",
    "Scheduled",
    "Smooth",
    "SmoothState",
    "Snapshot",
    "Static",
    "StaticState",
    "StochasticRounding",
    "Strategy",
    "StuckError",
    "StuckPolicy",
    "StuckWarning",
    "TrainableSet",
    "UnsupportedVersion",
    "Warmup",
    "all_finite",
    "amax",
    "float_format",
    "histogram",
    "insert_rescales",
    "presets",
    "protect",
    "rescale",
    "snapshot",
]
