"""A function of the user's own program, as `--build module:function` names it."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import scaler
from loops.errors import LoopError


def called(text: str, run: pathlib.Path) -> Any:
    """What the function that `--build` names returns.

    Args:
        text: `module:function`, importable from the current folder.
        run: What the function is called with.

    Raises:
        scaler.InvalidArgument: If there is no such module or function.
        LoopError: If the function raised something.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise scaler.InvalidArgument(f"--build {text}: expected module:function, such as train:build.")
    with _current_folder_on_path():
        return _said(f"--build {text}", lambda: _function(text, module, name)(run))


def _function(text: str, module: str, name: str) -> Callable[[pathlib.Path], Any]:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise scaler.InvalidArgument(
            f"--build {text}: there is no module {error.name!r} here, in {pathlib.Path.cwd()}. Start the command where "
            "the program is."
        ) from None
    function = getattr(found, name, None)
    if not callable(function):
        raise scaler.InvalidArgument(f"--build {text}: module {module!r} has no function {name!r}.")
    return function


def _said(who: str, call: Callable[[], Any]) -> Any:
    """What a function of the user's returns, with its errors told in one sentence."""
    try:
        return call()
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise LoopError(f"{who}: it raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    here = str(pathlib.Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
