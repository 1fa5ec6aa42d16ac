"""Everything this package raises by itself.

ScalerError
└── InvalidArgument (also a ValueError)     a value that cannot work, found before anything ran
"""


class ScalerError(Exception):
    """Base of every exception raised by `scaler`."""

    # AutoGraph keeps the type of an exception raised while a tf.function is traced only if this is its constructor;
    # any other class reaches the caller as a StagingError that no `except ScalerError` catches.
    __init__ = Exception.__init__


class InvalidArgument(ScalerError, ValueError):
    """An argument that cannot work. The message says what was passed, what is allowed and what to do."""


class StuckError(ScalerError, RuntimeError):
    """The scaler makes no progress. The message says since when, why, and what to try."""


class StuckWarning(UserWarning):
    """The scaler makes no progress, and the policy is to warn."""


class ScaleWarning(UserWarning):
    """A step that is probably not what was meant: a loss that nobody scaled, a loss in float16, a missing snapshot."""
