"""Everything this package raises by itself.

    ScalerError
    └── InvalidArgument (also a ValueError)     a value that cannot work, found before anything ran
"""


class ScalerError(Exception):
    """Base of every exception raised by `scaler`."""


class InvalidArgument(ScalerError, ValueError):
    """An argument that cannot work. The message says what was passed, what is allowed and what to do."""
