"""Everything `loops` raises by itself.

scaler.ScalerError
└── LoopError
    ├── OutOfData           the dataset ended before the run did
    ├── BadOutputs          a train step returned something a loop cannot report
    ├── CheckpointError     a checkpoint cannot be written or read, or belongs to another run
    └── WorkerLost          another process of a run on several cannot be reached, or has stopped
"""

import scaler


class LoopError(scaler.ScalerError):
    """Base of every exception raised by `loops`, apart from `scaler.InvalidArgument` for a bad argument."""


class OutOfData(LoopError):
    """The dataset was empty, or ended before the run did. What the run had done and written until then is kept."""


class BadOutputs(LoopError):
    """A train step returned something other than a dict of scalar tensors."""


class CheckpointError(LoopError):
    """A checkpoint cannot be written or read, or belongs to another run. Older checkpoints are as they were."""


class WorkerLost(LoopError):
    """Another worker cannot be reached, is gone, or has stopped with an error. Start all of them again to go on."""


class ResumeWarning(UserWarning):
    """A resumed run will not be, or is not, what it could be: something cannot be saved, or a checkpoint is damaged."""
