"""What strategies around others share: needs and bounds, a flat state of which each field is a variable, schedules."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from scaler.errors import InvalidArgument
from scaler.strategies.base import Needs, Strategy, bounds_of, needs_of, takes_int64


class Around:
    """A strategy around another one, its `strategy`, which needs what that one needs."""

    strategy: Strategy

    @property
    def int64_counts(self) -> bool:
        """Whether the strategy can count in int64."""
        return takes_int64(self.strategy)

    @property
    def needs(self) -> Needs:
        """What the strategy needs."""
        return needs_of(self.strategy)


class AroundWithBounds(Around):
    """A strategy around another one, with the bounds of that one."""

    @property
    def min_scale(self) -> Any:
        """The strategy's own floor."""
        return bounds_of(self.strategy)[0]

    @property
    def max_scale(self) -> Any:
        """The strategy's own ceiling."""
        return bounds_of(self.strategy)[1]


def join(name: str, inner: Any, **own: tf.Tensor) -> Any:
    """A NamedTuple with all fields of `inner` and those of `own`.

    Args:
        name: Of the type.
        inner: A NamedTuple, or () for the other fields alone.
        own: Further fields. If `inner` already has a field of this name, because a strategy holds another of its kind,
            the name gets a number.
    """
    inner_type: Any = type(inner)
    return _type_around(name, inner_type, tuple(own))(*inner, *own.values())


def inner_of(state: Any) -> Any:
    """The state of the strategy inside, from a state that `join` made."""
    return type(state).inner_type(*state[: len(type(state).inner_type._fields)])


def own_of(state: Any) -> tuple[tf.Tensor, ...]:
    """The further fields that `join` added to it."""
    return tuple(state[len(type(state).inner_type._fields) :])


def count_up(steps: tf.Tensor) -> tf.Tensor:
    """A count of steps plus one, in its dtype; it stays at the largest integer of int32."""
    return tf.clip_by_value(steps, 0, 2**31 - 2) + 1


def as_schedule(name: str, schedule: Any) -> tuple[tuple[int, Any], ...]:
    """A mapping from steps, or pairs of them, as pairs in ascending order.

    Raises:
        InvalidArgument: If it is empty, or its keys are not different integers in [0, 2^31).
    """
    expected = f"{name}={schedule!r}: expected a dict from steps, different integers in [0, 2^31), to values."
    try:
        pairs = tuple(schedule.items()) if isinstance(schedule, Mapping) else tuple((k, v) for k, v in schedule)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(expected) from error
    steps = [step for step, _ in pairs]
    if not steps or any(isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < 2**31 for s in steps):
        raise InvalidArgument(expected)
    if len(set(steps)) < len(steps):
        raise InvalidArgument(expected)
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


@functools.cache
def _type_around(name: str, inner_type: Any, own: tuple[str, ...]) -> Any:
    """The type of a joined state, the same for the same arguments."""
    fields = list(getattr(inner_type, "_fields", ()))
    for field in own:
        unique, number = field, 2
        while unique in fields:
            unique, number = f"{field}_{number}", number + 1
        fields.append(unique)
    joined = collections.namedtuple(name, fields)  # type: ignore[misc]
    setattr(joined, "inner_type", inner_type)  # noqa: B010 - a type checker knows the fields alone
    return joined
