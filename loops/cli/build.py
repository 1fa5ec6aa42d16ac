"""`--build module:function`: a function of the user's own program."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import sys
from typing import Any

import scaler


def built(text: str, run: pathlib.Path) -> Any:
    """Calls the function that `--build` names.

    Args:
        text: Such as "train:make_loop", importable from the current folder.
        run: What it is called with; a function without parameters is called without.

    Raises:
        scaler.InvalidArgument: If there is no such function. What the function itself raises passes.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise scaler.InvalidArgument(f"--build {text!r}: expected module:function, such as train:make_loop.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise scaler.InvalidArgument(
            f"--build {text!r}: there is no module {module!r} in {os.getcwd()}: go to the folder of your program."
        ) from None
    if not callable(function):
        raise scaler.InvalidArgument(
            f"--build {text!r}: module {module!r} has no function {name!r}: expected one of the folder of a run."
        )
    return function(run) if inspect.signature(function).parameters else function()
