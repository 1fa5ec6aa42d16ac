"""Training loops around a loss scaler.

The inner loop takes steps on the device; the outer loop visits the host and lets actions act:

    Loop.run -> steps_per_call x train_step(next batch)      nothing leaves the device
             -> one visit: outputs [steps] are read, counted, and given to every action
"""

from loops import observe as observe
from loops.actions import Best as Best
from loops.actions import Call as Call
from loops.actions import Checkpoint as Checkpoint
from loops.actions import Csv as Csv
from loops.actions import EarlyStop as EarlyStop
from loops.actions import Evaluate as Evaluate
from loops.actions import JsonLines as JsonLines
from loops.actions import KeepBatches as KeepBatches
from loops.actions import Profile as Profile
from loops.actions import Progress as Progress
from loops.actions import Seconds as Seconds
from loops.actions import StopWhen as StopWhen
from loops.averaged import Averaged as Averaged
from loops.counters import Counters as Counters
from loops.errors import BadBatch as BadBatch
from loops.errors import BadOutputs as BadOutputs
from loops.errors import CheckpointError as CheckpointError
from loops.errors import DivergenceWarning as DivergenceWarning
from loops.errors import LoopError as LoopError
from loops.errors import NotWritable as NotWritable
from loops.errors import OutOfData as OutOfData
from loops.errors import ResumeWarning as ResumeWarning
from loops.errors import TraceWarning as TraceWarning
from loops.errors import WorkerLost as WorkerLost
from loops.forecast import Forecast as Forecast
from loops.loop import Loop as Loop
from loops.step.by_attempts import ByAttempts as ByAttempts
from loops.step.train_step import TrainStep as TrainStep
from loops.tensorboard import TensorBoard as TensorBoard
from loops.trace import Trace as Trace
from loops.visit import Visit as Visit
from loops.workers.join import join_workers as join_workers

__all__ = [
    "Averaged",
    "BadBatch",
    "BadOutputs",
    "Best",
    "ByAttempts",
    "Call",
    "Checkpoint",
    "CheckpointError",
    "Counters",
    "Csv",
    "DivergenceWarning",
    "EarlyStop",
    "Evaluate",
    "Forecast",
    "JsonLines",
    "KeepBatches",
    "Loop",
    "LoopError",
    "NotWritable",
    "OutOfData",
    "Profile",
    "Progress",
    "ResumeWarning",
    "Seconds",
    "StopWhen",
    "TensorBoard",
    "Trace",
    "TraceWarning",
    "TrainStep",
    "Visit",
    "WorkerLost",
    "join_workers",
    "observe",
]
