"""Imports and calls a user's function, given as `--build module:function`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import scaler
from loops.support.errors import LoopError


def called(text: str, run: pathlib.Path, *, option: str = "--build") -> Any:
    """Calls the function that an option names, and returns its result.

    Args:
        text: `module:function`, importable from the current folder.
        run: The argument of the function, unless it has no parameters.
        option: The option's name, for errors.

    Raises:
        scaler.InvalidArgument: If there is no such module or function.
        LoopError: If the function raised something.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise scaler.InvalidArgument(f"{option} {text}: expected module:function, such as train:build.")
    who = f"{option} {text}"
    with _current_folder_on_path():
        try:
            function = _function(who, module, name)
            return function(run) if _by_place(function) else function()
        except scaler.ScalerError:
            raise
        except Exception as error:
            raise LoopError(f"{who}: it raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def in_empty_folders(build: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """Wraps a function that may take a folder into one without arguments: each call passes a new, empty folder.

    Args:
        build: The function; it gets no folder if it has no required parameter.
    """
    if not any(one.default is one.empty and one.kind != one.VAR_POSITIONAL for one in _by_place(build)):
        yield build
        return
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="halfstep-build-") as place:

        def in_a_folder() -> Any:
            run = pathlib.Path(place) / str(next(numbers))
            run.mkdir()
            return build(run)

        yield in_a_folder


def _by_place(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The positional parameters of a function."""
    try:
        found = inspect.signature(function, follow_wrapped=False).parameters.values()
    except ValueError:  # Functions written in C have no signature.
        return []
    return [one for one in found if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]


def _function(who: str, module: str, name: str) -> Callable[..., Any]:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise scaler.InvalidArgument(
            f"{who}: there is no module {error.name!r} here, in {pathlib.Path.cwd()}. "
            + ("Leave out .py." if module.endswith(".py") else "Start the command where the program is.")
        ) from None
    function = getattr(found, name, None)
    if not callable(function):
        raise scaler.InvalidArgument(f"{who}: module {module!r} has no function {name!r}.")
    return function


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    here = str(pathlib.Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
