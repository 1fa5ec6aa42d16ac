"""Loss scaling for TensorFlow that never corrupts a run.

The order of a step:

    batch -> forward -> loss (float32) -> scale -> backward -> scaled gradients -> unscale in float32 -> finite?
          -> applied: clip -> optimizer on float32 weights -> round masters into the model
          |  skipped: put non-trainable state back
          -> strategy(state, event) -> next scale -> counters -> outcome
"""

from scaler import presets as presets
from scaler.errors import InvalidArgument as InvalidArgument
from scaler.errors import ScalerError as ScalerError
from scaler.errors import StuckError as StuckError
from scaler.errors import StuckWarning as StuckWarning
from scaler.formats import FloatFormat as FloatFormat
from scaler.formats import float_format as float_format
from scaler.gradients import all_finite as all_finite
from scaler.loss_scaler import Counters as Counters
from scaler.loss_scaler import LossScaler as LossScaler
from scaler.masters import MasterWeights as MasterWeights
from scaler.outcome import Cause as Cause
from scaler.outcome import Outcome as Outcome
from scaler.rollback import Snapshot as Snapshot
from scaler.rollback import snapshot as snapshot
from scaler.strategies import Dynamic as Dynamic
from scaler.strategies import DynamicState as DynamicState
from scaler.strategies import Event as Event
from scaler.strategies import NoScaling as NoScaling
from scaler.strategies import Static as Static
from scaler.strategies import StaticState as StaticState
from scaler.strategies import Strategy as Strategy
from scaler.stuck import StuckPolicy as StuckPolicy

__all__ = [
    "Cause",
    "Counters",
    "Dynamic",
    "DynamicState",
    "Event",
    "FloatFormat",
    "InvalidArgument",
    "LossScaler",
    "MasterWeights",
    "NoScaling",
    "Outcome",
    "ScalerError",
    "Snapshot",
    "Static",
    "StaticState",
    "Strategy",
    "StuckError",
    "StuckPolicy",
    "StuckWarning",
    "all_finite",
    "float_format",
    "presets",
    "snapshot",
]
