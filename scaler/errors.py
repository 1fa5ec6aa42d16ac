"""Every exception and warning that `scaler` raises by itself.

Exception
└── ScalerError
    ├── InvalidArgument (also a ValueError)         an argument that cannot work, refused before anything ran
    ├── StuckError (also a RuntimeError)            the scaler makes no progress
    ├── UnsupportedVersion (also a RuntimeError)    a Keras or TensorFlow that works differently from the tested ones
    └── LoopError                                   what `loops` raises: see loops/support/errors.py

UserWarning
├── StuckWarning                                    the scaler makes no progress, and the policy is to warn
└── ScaleWarning                                    a step that is probably not what was meant
"""

import functools
import pathlib
import re


class ScalerError(Exception):
    """Base of every exception that Halfstep raises by itself: catch it to catch them all.

    A message says what happened, what is allowed and what to do. Ctrl-C and errors of your own code are no
    `ScalerError`.
    """

    # AutoGraph keeps the type of an exception raised while a tf.function is traced only if this is its constructor;
    # any other class reaches the caller as a StagingError that no `except ScalerError` catches.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        return sentence(super().__str__())

    # The list that PEP 678 describes, to which `add_note` adds. It is made when it is first read, so it needs no
    # constructor, and a copy or an unpickled error has it once.
    @functools.cached_property
    def __notes__(self) -> list[str]:
        # The nearest class of this package: a user's own one has no help of ours.
        name = next(one.__name__ for one in type(self).__mro__ if one.__module__ in _MODULES)
        return [f'halfstep: help("halfstep.{name}") says what to do']


_MODULES = ("scaler.errors", "loops.support.errors")


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
    """An argument cannot work, or the order of the calls would give a wrong result.

    The message says what was passed, what is allowed and what to do. An argument is refused before anything ran. What
    only the gradients of a step show is refused before that step moves a weight. If the message is about gradients
    (`apply(grads): ...`, `unscale(grads): ...`), check the order of the calls: `scale` the loss inside of the tape,
    differentiate its result, and pass these gradients to `apply` in the same step.
    """


class StuckError(ScalerError, RuntimeError):
    """The loss scaler skips too many steps, so that the run makes no progress.

    `LossScaler.check` raises it, which a `Loop` calls at each visit, and `LossScaleLogger` in `fit`. The message says
    since when, why the last step was skipped, and what to try. Skipped steps change nothing: the weights are those
    after the last applied step.

    If no loss scale helps, the data or the model is the cause: look for NaN, infinities, wrong labels and a forward
    pass that overflows; `halfstep explain` and `halfstep.Explain()` find where it began. If the scale is at its floor,
    lower `min_scale`. If the run is meant to search for longer, pass another `StuckPolicy`.
    """


class UnsupportedVersion(ScalerError, RuntimeError):
    """This release of Keras or TensorFlow works differently from the tested ones, which the message names.

    Nothing was changed, unless the message ends with "The weights have moved: load them again". `pip install halfstep`
    chooses versions that fit.
    """


class StuckWarning(UserWarning):
    """The loss scaler skips too many steps, and its policy is `StuckPolicy("warn")`.

    The run continues, and may skip all further steps. What to do is the same as for a `StuckError`.
    """


class ScaleWarning(UserWarning):
    """A step is probably not what was meant: an unscaled loss, a loss in float16, a missing snapshot.

    The step is taken as it was written, and may train wrongly or not at all. The end of the message says what to do.
    In tests make it an error: `warnings.simplefilter("error", halfstep.ScaleWarning)`.
    """
