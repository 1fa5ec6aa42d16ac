"""Training loops around a loss scaler.

The inner loop takes steps on the device; the outer loop visits the host and lets actions act:

    Loop.run -> steps_per_call x train_step(next batch)      nothing leaves the device
             -> one visit: outputs [steps] are read, counted, and given to every action
"""

import importlib.util
import typing

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

if typing.TYPE_CHECKING:
    from loops.public import *
else:

    def __getattr__(name: str) -> object:
        """Imports what is asked for, and TensorFlow with it, a namespace such as `loops.tasks` too.

        `halfstep --help` asks for nothing.
        """
        if name not in __all__:
            if name.isidentifier() and name[0] != "_" and importlib.util.find_spec(f"loops.{name}"):
                return importlib.import_module(f"loops.{name}")
            raise AttributeError(f"module 'loops' has no attribute {name!r}")
        public = importlib.import_module("loops.public")
        globals().update({each: getattr(public, each) for each in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
