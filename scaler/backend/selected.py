"""Assignments that change a variable only where a flag is true, while an update is traced.

assign, assign_add, assign_sub    of TensorFlow's variables and their components on replicas, shadowed on the object
scatter_add, scatter_sub,         as those, for gradients with indices
scatter_update
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from scaler.backend import replicas

_DENSE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "assign": lambda old, value: value,
    "assign_add": lambda old, value: old + value,
    "assign_sub": lambda old, value: old - value,
}
_FLAG = "halfstep_assigned_where"
_SPARSE = ("scatter_update", "scatter_add", "scatter_sub")


@contextlib.contextmanager
def assigned_where(flag: tf.Tensor, variables: Iterable) -> Iterator[None]:
    """Inside of it an assignment to one of the variables keeps every bit of the old value where `flag` is false.

    Args:
        flag: Scalar bool, the same on all replicas.
        variables: TensorFlow's or Keras's.
    """
    natives = {id(native): native for native in map(replicas.native, variables)}
    parts = {id(part): part for native in natives.values() for part in getattr(native, "values", (native,))}
    for part in parts.values():
        vars(part).update(_shadows(part, flag) | {_FLAG: flag})
    try:
        yield
    finally:
        for part in parts.values():
            for name in (*_DENSE, *_SPARSE, _FLAG):
                del vars(part)[name]


def flag_of(variable: tf.Variable) -> tf.Tensor | None:
    """The flag of the `assigned_where` that the variable is in now, or None."""
    return vars(variable).get(_FLAG)


def assign_from(variable: tf.Variable, before: tf.Tensor, value: tf.Tensor) -> None:
    """Assigns a value where the flag is true, or always without one; `before` is what the variable holds."""
    flag = flag_of(variable)
    assign_chosen(variable, value if flag is None else tf.where(flag, value, before))


def assign_chosen(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value that was chosen by the flag already."""
    type(variable).assign(variable, value)


def _shadows(part: tf.Variable, flag: tf.Tensor) -> dict[str, Callable]:
    def dense(moved: Callable) -> Callable:
        def assign(value: Any, *unused: Any, **options: Any) -> Any:
            old = tf.convert_to_tensor(part)
            new = moved(old, tf.convert_to_tensor(value, part.dtype))
            return type(part).assign(part, tf.where(flag, new, old), **options)

        return assign

    def sparse(name: str) -> Callable:
        def scatter(slices: tf.IndexedSlices, *unused: Any, **options: Any) -> Any:
            # An index may occur twice. All of its rows are then alike, before and after.
            old = tf.gather(part, slices.indices)
            getattr(type(part), name)(part, slices, **options)
            rows = tf.where(flag, tf.gather(part, slices.indices), old)
            return type(part).scatter_update(part, tf.IndexedSlices(rows, slices.indices), **options)

        return scatter

    return {name: dense(moved) for name, moved in _DENSE.items()} | {name: sparse(name) for name in _SPARSE}
