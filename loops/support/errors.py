"""Every exception and warning that `loops` raises by itself; a bad argument is `scaler.InvalidArgument`.

scaler.ScalerError
└── LoopError
    ├── OutOfData           the dataset ended before the run did
    ├── BadOutputs          a train step returned something a loop cannot report
    ├── BadBatch            the data holds what the model or the loss cannot take
    ├── NotWritable         a file or folder cannot be written, or another run writes it (also an OSError)
    ├── CheckpointError     a checkpoint cannot be written or read, or belongs to another run
    └── WorkerLost          another process of a run on several cannot be reached, or has stopped

UserWarning
├── DivergenceWarning       a run seems to diverge
├── ResumeWarning           a resumed run will not continue exactly, or a checkpoint is damaged
└── TraceWarning            a trace is torn or damaged, and was read up to there
"""

import scaler


class LoopError(scaler.ScalerError):
    """Base of every exception raised by `loops`, apart from `scaler.InvalidArgument` for a bad argument."""


class OutOfData(LoopError):
    """The dataset was empty, or ended before the run did. What the run had done and written until then is kept."""


class BadOutputs(LoopError):
    """A train step returned something other than a dict of numbers and bools: scalars, and arrays of a known shape."""


class BadBatch(LoopError):
    """The data holds what the model or the loss cannot take, such as a label that is no class."""


class NotWritable(LoopError, OSError):
    """A file or folder that an action is to write cannot be written, or another run writes it.

    At the beginning of a run no step was taken. Later the other actions have acted, and a `Checkpoint` has saved.
    """


class CheckpointError(LoopError):
    """A checkpoint cannot be written or read, or belongs to another run. Older checkpoints are as they were."""


class WorkerLost(LoopError):
    """Another worker cannot be reached, is gone, or has stopped with an error. Start all of them again to go on."""


class DivergenceWarning(UserWarning):
    """A run seems to diverge: its gradients are as large as ever, and its loss rises."""


class ResumeWarning(UserWarning):
    """A resumed run will not be, or is not, what it could be: something cannot be saved, or a checkpoint is damaged."""


class TraceWarning(UserWarning):
    """A trace is torn or damaged, and was read up to there."""
