"""Everything `loops` raises by itself.

scaler.ScalerError
└── LoopError
    ├── OutOfData           the dataset ended before the run did
    ├── BadOutputs          a train step returned something a loop cannot report
    └── CheckpointError     a checkpoint cannot be written or read, or belongs to another run
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


class ResumeWarning(UserWarning):
    """A resumed run will not be, or is not, what it could be: something cannot be saved, or a checkpoint is damaged."""
