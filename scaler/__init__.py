"""Loss scaling for TensorFlow that never corrupts a run.

The order of a step:

    batch -> forward -> loss (float32) -> scale -> backward -> scaled gradients -> unscale in float32 -> finite?
          -> applied: clip -> optimizer on float32 weights -> finite? else roll back -> round masters into the model
          |  skipped: roll non-trainable state back
          -> strategy(state, event) -> next scale -> counters -> outcome

Most programs need only the names here. The namespaces hold what researchers and authors of strategies need beside them:
`scaler.strategies`, `scaler.formats`, `scaler.layerwise`, `scaler.weights`, `scaler.gradients`, `scaler.observe`,
`scaler.presets`, `scaler.authoring`, `scaler.testing`.
"""

import importlib.util
import typing

from scaler import authoring as authoring
from scaler import gradients as gradients
from scaler import strategies as strategies
from scaler import weights as weights
from scaler.backend.formats import FloatFormat as FloatFormat
from scaler.backend.formats import float_format as float_format
from scaler.backend.layers import state_of as state_of
from scaler.checks import suggest_arguments
from scaler.errors import InvalidArgument as InvalidArgument
from scaler.errors import ScalerError as ScalerError
from scaler.errors import ScaleWarning as ScaleWarning
from scaler.errors import StuckError as StuckError
from scaler.errors import StuckWarning as StuckWarning
from scaler.errors import UnsupportedVersion as UnsupportedVersion
from scaler.gate.loss_scaler import LossScaler as LossScaler
from scaler.gate.optimizers import move_nothing as move_nothing
from scaler.gate.rollback import Snapshot as Snapshot
from scaler.gate.rollback import snapshot as snapshot
from scaler.gate.state import Counters as Counters
from scaler.gate.targets import Share as Share
from scaler.gate.together import apply_together as apply_together
from scaler.gradients import ClipByNorm as ClipByNorm
from scaler.gradients import ClipByValue as ClipByValue
from scaler.gradients import all_finite as all_finite
from scaler.keras import LossScaleLogger as LossScaleLogger
from scaler.keras import LossScaleOptimizer as LossScaleOptimizer
from scaler.keras import protect as protect
from scaler.outcome.outcome import Cause as Cause
from scaler.outcome.outcome import Outcome as Outcome
from scaler.outcome.stuck import StuckPolicy as StuckPolicy
from scaler.strategies import DelayedAmax as DelayedAmax
from scaler.strategies import Dynamic as Dynamic
from scaler.strategies import Event as Event
from scaler.strategies import Headroom as Headroom
from scaler.strategies import Histogram as Histogram
from scaler.strategies import LogNormal as LogNormal
from scaler.strategies import NoScaling as NoScaling
from scaler.strategies import Smooth as Smooth
from scaler.strategies import SpikeGuard as SpikeGuard
from scaler.strategies import Static as Static
from scaler.strategies import Strategy as Strategy
from scaler.weights import MasterWeights as MasterWeights

__all__ = [
    "Cause",
    "ClipByNorm",
    "ClipByValue",
    "Counters",
    "DelayedAmax",
    "Dynamic",
    "Event",
    "FloatFormat",
    "Headroom",
    "Histogram",
    "InvalidArgument",
    "LogNormal",
    "LossScaleLogger",
    "LossScaleOptimizer",
    "LossScaler",
    "MasterWeights",
    "NoScaling",
    "Outcome",
    "PerLoss",
    "ScaleWarning",
    "ScalerError",
    "Share",
    "Smooth",
    "Snapshot",
    "SpikeGuard",
    "Static",
    "Strategy",
    "StuckError",
    "StuckPolicy",
    "StuckWarning",
    "UnsupportedVersion",
    "all_finite",
    "apply_together",
    "authoring",
    "float_format",
    "formats",
    "gradients",
    "layerwise",
    "move_nothing",
    "observe",
    "presets",
    "protect",
    "snapshot",
    "state_of",
    "strategies",
    "weights",
]

suggest_arguments(globals())
del suggest_arguments

if typing.TYPE_CHECKING:
    from scaler import formats as formats
    from scaler import layerwise as layerwise
    from scaler import observe as observe
    from scaler import presets as presets
    from scaler.layerwise import PerLoss as PerLoss
else:

    def __getattr__(name: str) -> object:
        """Imports what few programs use when it is asked for: a namespace such as `scaler.testing`, or `PerLoss`."""
        if name == "PerLoss":
            return importlib.import_module("scaler.layerwise").PerLoss
        if name.isidentifier() and name[0] != "_" and importlib.util.find_spec(f"scaler.{name}"):
            return importlib.import_module(f"scaler.{name}")
        raise AttributeError(f"module 'scaler' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "testing"])
