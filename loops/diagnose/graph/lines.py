"""Finds the line of Python that created an operation."""

from __future__ import annotations

import pathlib
import traceback

import tensorflow as tf

_SCAN = "loops/diagnose/graph/scan.py"
_PACKAGES = tuple(f"{pathlib.Path(__file__).parents[3] / name}/" for name in ("scaler", "loops", "halfstep"))
_OURS = (*_PACKAGES, "<frozen", "/bin/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_FRAMEWORKS = tuple(f"{folder}{name}/" for folder in _INSTALLED for name in ("tensorflow", "keras", "numpy", "optree"))
"""Frameworks, with the packages through which they call a function of the user or of another package."""
_LAYER = "/keras/src/layers/"
_CALL = f"{_LAYER}layer.py"
_CUSTOM = "tensorflow/python/ops/custom_gradient.py"


def line_of(operation: tf.Operation) -> str | None:
    """The line of the user's code that created an operation, else that of the layer: "file.py:12".

    For a layer of an installed package it is the line in that package.
    """
    return _line(list(operation.traceback or ()))


def line_in_custom_gradient(operation: tf.Operation) -> str | None:
    """The line inside the custom gradient that created an operation: "file.py:12"."""
    frames = list(operation.traceback or ())
    return _line(frames[_last(frames, _CUSTOM) + 1 :])


def _line(frames: list[traceback.FrameSummary]) -> str | None:
    # The frames that called the scan did not create the operation.
    frames = frames[_last(frames, _SCAN) + 1 :]
    own = [place for place, frame in enumerate(frames) if _is_own(frame.filename)]
    packages = [place for place, frame in enumerate(frames) if _is_of_package(frame.filename)]
    layers = [place for place, frame in enumerate(frames) if _LAYER in frame.filename]
    if own and packages and any(own[-1] < place < packages[-1] and _is_call(frames[place]) for place in layers):
        own = []
    for chosen in (own, packages, layers):
        if chosen:
            frame = frames[chosen[-1]]
            return f"{_short(frame.filename)}:{frame.lineno}"
    return None


def _last(frames: list[traceback.FrameSummary], file: str) -> int:
    return max((place for place, frame in enumerate(frames) if frame.filename.endswith(file)), default=-1)


def _is_own(file: str) -> bool:
    return not any(part in file for part in (*_INSTALLED, *_OURS, "/lib/python"))


def _is_of_package(file: str) -> bool:
    installed = any(part in file for part in _INSTALLED)
    return installed and not any(part in file for part in (*_FRAMEWORKS, *_OURS))


def _is_call(frame: traceback.FrameSummary) -> bool:
    return frame.filename.endswith(_CALL)


def _short(filename: str) -> str:
    """A path relative to the current folder or to site-packages."""
    here = f"{pathlib.Path.cwd()}/"
    return filename.removeprefix(here).rpartition("site-packages/")[2]
