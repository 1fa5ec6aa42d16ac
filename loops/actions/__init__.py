"""Actions, one file each: what a loop does when it visits the host."""

import importlib
import warnings

from loops.actions.best import Best as Best
from loops.actions.call import Call as Call
from loops.actions.checkpoint import Checkpoint as Checkpoint
from loops.actions.early_stop import EarlyStop as EarlyStop
from loops.actions.evaluate import Evaluate as Evaluate
from loops.actions.profile import Profile as Profile
from loops.actions.progress import Progress as Progress
from loops.actions.rewind import Rewind as Rewind
from loops.actions.stop_when import StopWhen as StopWhen
from loops.loop.cadence import Seconds as Seconds

_MOVED = {"Csv": "loops.record.csv", "JsonLines": "loops.record.jsonl", "KeepBatches": "loops.record.keep_batches"}
"""Actions that write a run's files are in `loops.record`, with their readers."""


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module 'loops.actions' has no attribute {name!r}")
    warnings.warn(f"loops.actions.{name} has moved: import loops.{name}.", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(_MOVED[name]), name)
