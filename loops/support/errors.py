"""The exceptions and warnings of `loops`. A bad argument raises `scaler.InvalidArgument`.

scaler.ScalerError
└── LoopError
    ├── OutOfData           the dataset ended before the run did
    ├── BadOutputs          a train step returned something that a loop cannot report
    ├── BadBatch            the model or the loss cannot take the data
    ├── NotWritable         a file or folder cannot be written, or another run writes it (also an OSError)
    ├── CheckpointError     a checkpoint cannot be written or read, or belongs to another run
    └── WorkerLost          another worker cannot be reached, or has stopped

UserWarning
├── DivergenceWarning       a run seems to diverge
├── ResumeWarning           a resumed run will not continue exactly, or a checkpoint is damaged
└── TraceWarning            a trace is incomplete or damaged, and was read up to that point
"""

import scaler


class LoopError(scaler.ScalerError):
    """Base of every exception raised by `loops`, apart from `scaler.InvalidArgument` for a bad argument."""


class OutOfData(LoopError):
    """The dataset was empty, or ended before the run did. What the run had done and written until then is kept."""


class BadOutputs(LoopError):
    """A train step returned something other than a dict of numbers and bools: scalars, and arrays of a known shape."""


class BadBatch(LoopError):
    """The model or the loss cannot take the data, for example because a label is not one of the classes."""


class NotWritable(LoopError, OSError):
    """An action's file or folder cannot be written, or another run writes it.

    When a run begins, no step was taken. Later, the other actions have acted, and a `Checkpoint` has saved.
    """


class CheckpointError(LoopError):
    """A checkpoint cannot be written or read, or belongs to another run. Older checkpoints are as they were."""


class WorkerLost(LoopError):
    """Another worker cannot be reached, is gone, or has stopped with an error. Start all of them again to continue."""


class DivergenceWarning(UserWarning):
    """A run seems to diverge: its gradients are the largest so far, and its loss rises."""


class ResumeWarning(UserWarning):
    """A resumed run will not continue exactly: something cannot be saved, or a checkpoint is damaged."""


class TraceWarning(UserWarning):
    """A trace is incomplete or damaged, and was read up to that point."""
