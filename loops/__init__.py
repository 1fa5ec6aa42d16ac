"""Training loops around a loss scaler.

The inner loop takes steps on the device; the outer loop visits the host and calls actions:

    Loop.run -> steps_per_call x train_step(next batch)      nothing leaves the device
             -> one visit: outputs [steps] are read, counted, and passed to every action
"""

import importlib
import importlib.util
import types
import typing

from loops.support import hiding as _hiding  # noqa: F401 -- before all that need scaler: it checks that it is ours

# isort: split
import scaler
from loops import observe as observe
from loops.actions import Best as Best
from loops.actions import Call as Call
from loops.actions import Checkpoint as Checkpoint
from loops.actions import EarlyStop as EarlyStop
from loops.actions import Evaluate as Evaluate
from loops.actions import Profile as Profile
from loops.actions import Progress as Progress
from loops.actions import Rewind as Rewind
from loops.actions import Seconds as Seconds
from loops.actions import StopWhen as StopWhen
from loops.actions.averaged import Averaged as Averaged
from loops.diagnose.explain.action import Explain as Explain
from loops.loop.loop import Loop as Loop
from loops.loop.results import Counters as Counters
from loops.loop.visit import Visit as Visit
from loops.loop.workers import join_workers as join_workers
from loops.record.forecast import Forecast as Forecast
from loops.record.keep_batches import KeepBatches as KeepBatches
from loops.record.lines import Csv as Csv
from loops.record.lines import JsonLines as JsonLines
from loops.record.tensorboard import TensorBoard as TensorBoard
from loops.record.trace import Trace as Trace
from loops.run.evaluate_checkpoints import evaluate_checkpoints as evaluate_checkpoints
from loops.step.arguments import ByAttempts as ByAttempts
from loops.step.composed_step import ComposedStep as ComposedStep
from loops.step.losses import WeightedLoss as WeightedLoss
from loops.step.parts import Part as Part
from loops.step.train_step import TrainStep as TrainStep
from loops.support.errors import BadBatch as BadBatch
from loops.support.errors import BadOutputs as BadOutputs
from loops.support.errors import CheckpointError as CheckpointError
from loops.support.errors import DivergenceWarning as DivergenceWarning
from loops.support.errors import LoopError as LoopError
from loops.support.errors import NotWritable as NotWritable
from loops.support.errors import OutOfData as OutOfData
from loops.support.errors import ResumeWarning as ResumeWarning
from loops.support.errors import TraceWarning as TraceWarning
from loops.support.errors import WorkerLost as WorkerLost

__all__ = [
    "Averaged",
    "BadBatch",
    "BadOutputs",
    "Best",
    "ByAttempts",
    "Call",
    "Checkpoint",
    "CheckpointError",
    "ComposedStep",
    "Counters",
    "Csv",
    "DivergenceWarning",
    "EarlyStop",
    "Evaluate",
    "Explain",
    "Forecast",
    "JsonLines",
    "KeepBatches",
    "Loop",
    "LoopError",
    "NotWritable",
    "OutOfData",
    "Part",
    "Profile",
    "Progress",
    "ResumeWarning",
    "Rewind",
    "Seconds",
    "StopWhen",
    "TensorBoard",
    "Trace",
    "TraceWarning",
    "TrainStep",
    "Visit",
    "WeightedLoss",
    "WorkerLost",
    "evaluate_checkpoints",
    "join_workers",
    "observe",
]

scaler.authoring.suggest_arguments(globals())

if not typing.TYPE_CHECKING:  # A type checker would believe any name.

    def __getattr__(name: str) -> types.ModuleType:
        """Imports a subpackage that is not yet imported, such as `loops.study`."""
        if name.isidentifier() and name[0] != "_" and importlib.util.find_spec(f"loops.{name}"):
            return importlib.import_module(f"loops.{name}")
        raise AttributeError(f"module 'loops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "tasks", "views"])
