"""The variables of a run, found and listed so that another process can match them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from loops.backend import captured
from loops.backend.variables import native

Groups = dict[str, list[tf.Variable]]

_PARTS: dict[str, Callable[[Any], Iterable]] = {
    "model": lambda part: part.variables,
    "optimizer": lambda part: getattr(part, "variables", ()),
    "masters": lambda part: part.weights,
    "loss_scaler": lambda part: part.variables,
    "window": lambda part: part.variables,
}
_REST = "step"


def variable_groups(train_step: object, concrete: tf.types.experimental.ConcreteFunction) -> Groups:
    """Every variable that a train step reads or writes, on every replica, in an order that depends only on the program.

    Variables of the step's attributes `model`, `optimizer`, `masters`, `loss_scaler` and `window` are listed under
    these names; all others that its graph captured under "step". If a variable has a component on each replica, every
    component is listed: `tf.train.Checkpoint` would save only the first, although BatchNorm's statistics and the sums
    of a window differ between replicas.

    Args:
        train_step: Any callable.
        concrete: Its concrete function.
    """
    groups: Groups = {}
    seen: set[int] = set()

    def add(name: str, found: Iterable) -> None:
        own = groups.setdefault(name, [])
        for component in (part for variable in found for part in components(variable)):
            if id(component) not in seen:
                seen.add(id(component))
                own.append(component)

    for name, variables_of in _PARTS.items():
        part = getattr(train_step, name, None)
        if part is not None:
            add(name, variables_of(part))
    # A graph's variables are a set without order; its captures are in the order of the trace.
    by_handle = {id(part.handle): part for variable in concrete.variables for part in components(variable)}
    by_handle |= captured.owners(captured.variables_by_handle(concrete, by_handle))
    rest = (by_handle[id(handle)] for handle in concrete.captured_inputs if id(handle) in by_handle)
    add(_REST, captured.without_tokens(part for part in rest if id(part) not in seen))
    return {name: found for name, found in groups.items() if found}


def components(variable: tf.Variable | keras.Variable) -> list[tf.Variable]:
    """The components of a variable on the local replicas; the variable itself if it has none."""
    own = native(variable)
    return list(own.values) if isinstance(own, tf.distribute.DistributedValues) else [own]


def layout(groups: Groups) -> dict[str, list]:
    """Name, dtype and shape of each variable, as JSON."""

    def facts(variable: tf.Variable) -> list:
        return [variable.name.split(":")[0], variable.dtype.name, variable.shape.as_list()]

    return {group: list(map(facts, found)) for group, found in groups.items()}
