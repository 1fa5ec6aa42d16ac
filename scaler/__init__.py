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

from scaler import authoring, gradients, strategies, weights
from scaler.backend.formats import FloatFormat, float_format
from scaler.backend.layers import state_of
from scaler.checks import suggest_arguments
from scaler.errors import InvalidArgument, ScalerError, ScaleWarning, StuckError, StuckWarning, UnsupportedVersion
from scaler.gate.loss_scaler import LossScaler
from scaler.gate.optimizers import move_nothing
from scaler.gate.rollback import Snapshot, snapshot
from scaler.gate.shares import Share, apply_together
from scaler.gate.state import Counters
from scaler.gradients import ClipByNorm, ClipByValue, all_finite
from scaler.keras import LossScaleLogger, LossScaleOptimizer, protect
from scaler.outcome.outcome import Cause, Outcome
from scaler.outcome.stuck import StuckPolicy
from scaler.strategies import (
    DelayedAmax,
    Dynamic,
    Event,
    Headroom,
    Histogram,
    LogNormal,
    NoScaling,
    Smooth,
    SpikeGuard,
    Static,
    Strategy,
)
from scaler.weights import MasterWeights

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
