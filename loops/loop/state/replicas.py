"""The variables of a run that goes on with another number of replicas.

    ON_READ with SUM aggregation  added up for the first replica, zeros for the others: the sums of an open window
    other floats that differ      averaged for all: BatchNorm's statistics
    other values that differ      the first replica's for all

Others are alike on all replicas, and kept: weights, masters, slots, the loss scale, counters, seeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from loops.loop.state.variables import Groups, layout

_REPLICA = re.compile(r"(.*)/replica_(\d+)")


def by_variable(entries: Sequence) -> list[list[int]]:
    """The places of each variable's components in a group of a layout, that of the first replica first.

    Args:
        entries: Name, dtype and shape of each component. TensorFlow names them `v`, `v/replica_1`, ...
    """
    found: list[list[int]] = []
    by_name: dict[str, list[list[int]]] = {}
    for place, (name, *_) in enumerate(entries):
        part = _REPLICA.fullmatch(name)
        # Several variables may have one name. A step's components may be listed replica by replica.
        lacking = (one for one in by_name.get(part[1], []) if len(one) == int(part[2])) if part else iter(())
        if (own := next(lacking, None)) is not None:
            own.append(place)
        else:
            found.append([place])
            by_name.setdefault(name, []).append(found[-1])
    return found


def first_of_each(groups: Mapping[str, list], values: Mapping[str, Sequence]) -> dict[str, list]:
    """For each group of a layout the values of first replicas; `values` has one for each entry."""
    return {
        name: [values[name][places[0]] for places in by_variable(entries)]
        for name, entries in groups.items()
        if name in values
    }


def restore(path: str, saved: Mapping[str, list], groups: Groups) -> None:
    """Assigns the values of a checkpoint to other numbers of components.

    Args:
        path: Of the checkpoint.
        saved: Its layout.
        groups: Those to assign. But for their components they are as in the checkpoint.
    """
    reader = tf.train.load_checkpoint(path)
    for name, here in layout(groups).items():
        for then, now in zip(by_variable(saved[name]), by_variable(here), strict=True):
            values = [reader.get_tensor(key_of(name, place)) for place in then]
            components = [groups[name][place] for place in now]
            for component, value in zip(components, _shared(values, components), strict=True):
                component.assign(value)


def key_of(group: str, place: int) -> str:
    """The name of a variable in a checkpoint."""
    return f"{group}/{place}/.ATTRIBUTES/VARIABLE_VALUE"


def _shared(values: Sequence[np.ndarray], components: Sequence[tf.Variable]) -> Iterable:
    """The value of each component."""
    variable, first = components[0], values[0]
    dtype, on_read = variable.dtype, variable.synchronization == tf.VariableSynchronization.ON_READ
    if on_read and variable.aggregation == tf.VariableAggregation.SUM:
        total = tf.add_n([tf.constant(value, dtype) for value in values])
        return [total, *(tf.zeros_like(total) for _ in components[1:])]
    if not dtype.is_floating or all(value.tobytes() == first.tobytes() for value in values):
        return [first] * len(components)
    mean = tf.reduce_mean([tf.cast(tf.constant(value, dtype), tf.float64) for value in values], axis=0)
    return [tf.cast(mean, dtype)] * len(components)
