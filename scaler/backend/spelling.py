"""Names that a user wrote: the nearest one to a wrong name, and the objects that Keras has under a name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_DONE: set[Callable] = set()
"""A class may be public in two modules, or have the constructor of another public class."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about a wrong name, such as " Did you mean 'adam'?"; empty if no known one is near."""
    names = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), names, n=1) if isinstance(name, str) else []
    return f" Did you mean {names[found[0]]!r}?" if found and names[found[0]] != name else ""


def from_keras(module: Any, given: Any) -> Any:
    """What Keras's `compile` makes of a name; an unknown name, and anything else, as it is.

    Args:
        module: `keras.optimizers`, `keras.losses` or `keras.metrics`.
        given: The argument of a user.
    """
    try:
        return module.get(given) if isinstance(given, str) else given
    except (ValueError, KeyError, TypeError):  # The latter two where its class needs arguments.
        return given


def suggest_arguments(namespace: Mapping[str, Any]) -> None:
    """Makes the public classes of a module answer a wrong keyword argument with the nearest name.

    Args:
        namespace: The module's `globals()`, with `__all__`.
    """
    for cls in (namespace.get(name) for name in namespace["__all__"]):
        method = "__new__" if isinstance(cls, type) and issubclass(cls, tuple) else "__init__"
        make = getattr(cls, method, None)
        # The function of a Protocol replaces itself when it is first called.
        if isinstance(cls, type) and inspect.isfunction(make) and make.__module__ != "typing" and make not in _DONE:
            suggesting = _suggesting(cls, make)
            _DONE.add(suggesting)
            setattr(cls, method, staticmethod(suggesting) if method == "__new__" else suggesting)


def _suggesting(cls: type, make: Callable) -> Callable:
    """A class's constructor, which names the nearest argument."""

    @functools.wraps(make)
    def suggesting(self: Any, /, *arguments: Any, **named: Any) -> Any:
        try:
            return make(self, *arguments, **named)
        except TypeError:
            parameters = inspect.signature(make).parameters
            wrong = next((name for name in named if name not in parameters), None)
            if wrong is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                raise
            # A subclass may pass a wrong name to the constructor of its base.
            own = self if isinstance(self, type) else type(self)
            who = own if getattr(own, make.__name__) is suggesting else cls
            known = list(parameters)[1:]
            raise TypeError(f"{who.__name__}() has no argument {wrong!r}.{did_you_mean(wrong, known)}") from None

    return suggesting
