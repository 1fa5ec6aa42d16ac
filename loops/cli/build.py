"""`--build module:function`: what a subcommand calls to have a user's program made."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import scaler


def function(text: str) -> Callable[..., Any]:
    """The function that `module:function` names, importable from the current folder.

    Raises:
        scaler.InvalidArgument: If there is none.
    """
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise scaler.InvalidArgument(f"--build {text!r}: expected module:function, such as my_run:build.")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(name), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise scaler.InvalidArgument(
            f"--build {text!r}: there is no module {name!r} in the current folder or on the path."
        ) from error
    if not callable(found):
        raise scaler.InvalidArgument(f"--build {text!r}: module {name!r} has no function {attribute!r}.")
    return found
