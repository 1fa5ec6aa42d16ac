"""Finds out that a layer was frozen or unfrozen after a step was made for its variables."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Iterable

import tensorflow as tf

from scaler.backend.graphs import at_each_call
from scaler.errors import InvalidArgument, ScaleWarning

_SHOWN = 3


@dataclasses.dataclass(frozen=True, eq=False)
class TrainableSet:
    """Which of some variables are to be trained, as `layer.trainable` said when this was made.

        trainable = scaler.weights.TrainableSet.of(model.weights)
        trainable.keep("my step", "Create the step and its optimizer again.")  # in the step

    Attributes:
        variables: Keras's or TensorFlow's.
        flags: `trainable` of each.
    """

    variables: tuple
    flags: tuple[bool, ...]

    @classmethod
    def of(cls, variables: Iterable) -> TrainableSet:
        """The set as it is now."""
        variables = tuple(variables)
        return cls(variables, _flags(variables))

    def rest_of(self, variables: Iterable) -> TrainableSet:
        """The set of those variables that are not in this one."""
        known = {id(variable) for variable in self.variables}
        return TrainableSet.of(variable for variable in variables if id(variable) not in known)

    def keep(self, step: str, remedy: str) -> None:
        """Refuses a change since this was made, now and at each later call of the function that is being traced.

        A function may set `trainable` itself while it is traced: that does not count as a change.

        Args:
            step: Who trains, to begin the sentence with.
            remedy: What to do, to end it with.

        Raises:
            InvalidArgument: With the names of the variables that were frozen or made trainable.
        """
        key = (step, *map(id, self.variables))
        at_each_call(lambda: _flags(self.variables), lambda now: self._check(now, step, remedy), key)

    def warn_of_unfrozen(self, step: str, remedy: str) -> None:
        """Warns of variables that were made trainable since, before later calls of the function that is being traced.

        It warns once of each set of variables. Nothing happens outside of such a function, which may use lists of its
        own choice: only whoever knows that the step trains all that is trainable may refuse a change, with `keep`.

        Args:
            step: Who trains, to begin the sentence with.
            remedy: What to do, to end it with.
        """
        key = ("unfrozen", step, *map(id, self.variables))
        said: set[tuple[str, ...]] = set()

        def check(now: tuple[bool, ...]) -> None:
            _, names = self._changed(now)
            if names and tuple(names) not in said:
                said.add(tuple(names))
                warnings.warn(
                    f"{step}: made trainable since the step was traced: {listed(names)}. The step goes on with the "
                    f"old list of variables, and does not train them. {remedy}",
                    ScaleWarning,
                    stacklevel=2,
                )

        at_each_call(lambda: _flags(self.variables), check, key)

    def _changed(self, now: tuple[bool, ...]) -> tuple[list[str], list[str]]:
        """The names of the variables that were frozen since, and of those that were made trainable."""
        changed = [pair for *pair, old in zip(self.variables, now, self.flags, strict=True) if pair[1] != old]
        frozen = [name_of(variable) for variable, flag in changed if not flag]
        return frozen, [name_of(variable) for variable, flag in changed if flag]

    def _check(self, now: tuple[bool, ...], step: str, remedy: str) -> None:
        if now == self.flags:
            return
        parts = dict(zip(("frozen (trainable=False)", "made trainable"), self._changed(now), strict=True))
        since = "since this step was made or traced"
        said = "; ".join(f"{what} {since}: {listed(names)}" for what, names in parts.items() if names)
        raise InvalidArgument(f"{step}: {said}. The step would go on with the old list of variables. {remedy}")


_flag = operator.attrgetter("trainable")


def _flags(variables: tuple) -> tuple[bool, ...]:
    """Asked for before each step, so that it takes as little as it can."""
    return tuple(map(_flag, variables))


def name_of(variable: tf.Variable) -> str:
    """Its path or name, quoted."""
    return repr(getattr(variable, "path", None) or variable.name.split(":")[0])


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
