"""The exceptions and warnings of `loops`, and checks of arguments, in one wording.

A bad argument raises `scaler.InvalidArgument`.

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

from __future__ import annotations

from typing import Any

import numpy as np

import scaler


class LoopError(scaler.ScalerError):
    """Something that a run or a command needs is missing: an extra, a file, a column, a checkpoint.

    It is also the base of every other exception of `loops`. What a run has written until then is kept; commands that
    only read a run change nothing. Install, record or name what the message asks for. What a run did not record cannot
    be added to it: run it again with `JsonLines`, `Trace` or `Checkpoint` among its actions.
    """


class OutOfData(LoopError):
    """The dataset was empty, or ended before the run did.

    The steps taken, their counters and what the actions wrote are kept. Call `.repeat()` on the dataset, or run fewer
    steps. If it is empty, a batch may be larger than the data with `drop_remainder=True`, or a filter left nothing.
    """


class BadOutputs(LoopError):
    """A train step returned something other than a dict of numbers and bools: scalars, and arrays of a known shape.

    Return a dict such as `{"loss": loss}`. Reduce what is larger with `tf.reduce_mean`, or give it a shape with
    `tf.ensure_shape`.
    """


class BadBatch(LoopError):
    """The model or the loss cannot take the data, for example because a label is not one of the classes.

    The steps before this batch are kept, and its own step changed no weight. Mend the dataset as the message says:
    `.batch(32)`, `drop_remainder=True`, a `map` that makes numbers of text, labels from 0 to the number of classes less
    one. Then resume from the last checkpoint, or call `run` again.
    """


class NotWritable(LoopError, OSError):
    """An action's file or folder cannot be written, or another run writes it.

    When a run begins, no step was taken. Later, the other actions have acted, and a `Checkpoint` has saved. Choose
    another place, or make room, then resume. A lock ends with the process that holds it, which the message names.
    """


class CheckpointError(LoopError):
    """A checkpoint cannot be written or read, or belongs to another run. Older checkpoints are as they were.

    To continue the run, pass `resume=True`, with the program and the data of that run. To start over, choose another
    folder. After a full disk, make room and resume. `halfstep inspect FOLDER` shows what a checkpoint holds. If the
    position in the data or the state of an action did not fit, make the model and the optimizer again before a retry:
    they may already hold the saved values.
    """


class WorkerLost(LoopError):
    """Another worker cannot be reached, is gone, or has stopped with an error.

    Read the output of the worker that the message names. Then start all workers again with the same command and
    `resume=True`: they continue from the newest step that each of them has. If a worker cannot be reached, compare
    `TF_CONFIG` on all machines, and let the ports through.
    """


class DivergenceWarning(UserWarning):
    """A run seems to diverge: its gradients are the largest so far and its loss rises, or values near an overflow.

    `Forecast()` gives it, once in a run; the run continues. Lower the learning rate, clip, or look at the data, and go
    on from a checkpoint before the step that the message names.
    """


class ResumeWarning(UserWarning):
    """A resumed run will not continue exactly: something cannot be saved, was not saved, or is damaged.

    The message names it; all else is exact. If the run has to be exact, do what the message says before it begins, such
    as a seed for `shuffle`, or a state in a `tf.Variable`.
    """


class TraceWarning(UserWarning):
    """A trace is incomplete or damaged and was read up to that point, or a part of it could not be written.

    For a run that continues or that was killed there is nothing to do: the message names the last step that was read.
    """


def check(call: str, good: object, expected: str) -> None:
    """Refuses an argument unless it is good.

    Args:
        call: What the user wrote, to begin the message with: "Best(mode='least')".
        good: Whether it is.
        expected: The end of the message.

    Raises:
        scaler.InvalidArgument: If it is not.
    """
    if not good:
        raise scaler.InvalidArgument(f"{call}: expected {expected}.")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is a Python or NumPy integer of at least `least`. True and False do not count."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_count(call: str, value: Any, least: int = 1) -> None:
    """Refuses anything but an integer of at least `least`.

    Args:
        call: What the user wrote, to begin the message with: "Profile(steps=0)".
        value: The value to check.
        least: The smallest integer that is allowed.

    Raises:
        scaler.InvalidArgument: If the value is refused.
    """
    check(call, is_count(value, least), f"an integer of at least {least}")
