"""Every exception and warning that `scaler` raises by itself.

Exception
└── ScalerError
    ├── InvalidArgument (also a ValueError)         an argument that cannot work, refused before anything ran
    ├── StuckError (also a RuntimeError)            the scaler makes no progress
    ├── UnsupportedVersion (also a RuntimeError)    a Keras or TensorFlow that works otherwise than the tested ones
    └── LoopError                                   what `loops` raises: see loops/support/errors.py

UserWarning
├── StuckWarning                                    the scaler makes no progress, and the policy is to warn
└── ScaleWarning                                    a step that is probably not what was meant
"""

import functools
import importlib.metadata
import pathlib
import re


class ScalerError(Exception):
    """Base of every exception raised by `scaler`."""

    # AutoGraph keeps the type of an exception raised while a tf.function is traced only if this is its constructor;
    # any other class reaches the caller as a StagingError that no `except ScalerError` catches.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        return sentence(super().__str__())

    # The list that PEP 678 describes, to which `add_note` adds. It is made when it is first read, so it needs no
    # constructor, and a copy or an unpickled error has it once.
    @functools.cached_property
    def __notes__(self) -> list[str]:
        return [f"halfstep: see {page_of(type(self))}"]


def page_of(kind: type) -> str:
    """The page of the documentation about an exception of this package, or about the base of a user's own one.

    It is an address if the installed metadata has that of the documentation, and otherwise a path in the repository.
    """
    name = next(one.__name__ for one in kind.__mro__ if one.__module__ in _MODULES)
    address = _documentation()
    return f"{address}/errors/{name}.html" if address else f"docs/errors/{name}.md"


_MODULES = ("scaler.errors", "loops.support.errors")


@functools.cache
def _documentation() -> str:
    try:
        urls = importlib.metadata.metadata("halfstep").get_all("Project-URL", [])
    except importlib.metadata.PackageNotFoundError:
        return ""
    return dict(url.split(", ", 1) for url in urls).get("Documentation", "").rstrip("/")


def sentence(text: str) -> str:
    """The end of a message that AutoGraph has put the places of a trace in front of, then the user's own place.

    AutoGraph writes "in user code:", the lines of the trace, with a star at those of rewritten functions, and at the
    end, after the name of its class, what the error said.
    """
    if not text.lstrip().startswith(_IN_USER_CODE):
        return text
    said = _CLASS.split(text)[-1].strip()
    places = [(file, line) for file, line in _PLACE.findall(text) if not file.startswith(_OWN_FILES)]
    return f"{said}\n(at {places[-1][0]}, line {places[-1][1]})" if places else said


_IN_USER_CODE = "in user code:"
_CLASS = re.compile(r"^[ ]+[A-Za-z_][\w.]*: ", re.MULTILINE)
_PLACE = re.compile(r'^\s*File "([^"]+)", line (\d+), in .*\*\s*$', re.MULTILINE)
_OWN_FILES = tuple(str(pathlib.Path(__file__).parents[1] / name) for name in ("scaler", "loops", "halfstep"))


class InvalidArgument(ScalerError, ValueError):
    """An argument cannot work. The message says what was passed, what is allowed and what to do."""


class StuckError(ScalerError, RuntimeError):
    """The scaler makes no progress. The message says since when, why, and what to try."""


class UnsupportedVersion(ScalerError, RuntimeError):
    """This release of Keras or TensorFlow works otherwise than the tested ones. Nothing was changed."""


class StuckWarning(UserWarning):
    """The scaler makes no progress, and the policy is to warn."""


class ScaleWarning(UserWarning):
    """A step that is probably not what was meant: a loss that nobody scaled, a loss in float16, a missing snapshot."""
