"""The rows of probes that are made of weights, of their gradients and updates, and of an optimizer's slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import scaler
from loops.step.before import Before

_FLOATS = (tf.float16, tf.bfloat16, tf.float32)


class Row(NamedTuple):
    """A row of the probes.

    Attributes:
        values: Returns its tensor from the updates of all variables: read where it is called, and at no other step.
        sparse: Whether it is a gradient of the type `tf.IndexedSlices`.
    """

    values: Callable[[Sequence[tf.Tensor]], Any]
    sparse: bool = False


class Weights(NamedTuple):
    """The trainable variables that are watched.

    Attributes:
        rows: The rows by name.
        layers: For each variable that is watched the path of its innermost layer.
        places: Their positions in the step's trainable variables.
        counted: The positions of those whose values are counted: all but float64.
    """

    rows: dict[str, Row]
    layers: list[str]
    places: list[int]
    counted: list[int]


def weights_of(watch: scaler.observe.Watch, before: Before, grads: Sequence, optimizer: Any) -> Weights:
    """What a watch asks for of the trainable variables.

    Args:
        watch: The watch.
        before: The variables.
        grads: The scaled gradient of each of them, or None.
        optimizer: The optimizer with the slots.
    """
    kinds, variables = watch.kinds, before.variables
    holders, names = _names(watch.model, variables)
    watched, own = watch.holds(), {id(variable) for variable in watch.model.variables}

    def holds(variable: Any) -> bool:
        # A part of a step may move more than the model that is watched. What takes its gradient as its value is no
        # weight: the scales and histories of float8 layers.
        return id(variable) in own and watched(variable) and not scaler.gradients.overwrites(variable)

    held = [place for place, variable in enumerate(variables) if holds(variable)]
    uncounted = [place for place in held if tf.as_dtype(variables[place].dtype) not in _FLOATS]
    if {"weight_gradients", "weights", "updates"} & {*kinds}:
        watch.leave_out([names[place] for place in uncounted], "float64 has exponents outside of the bins.")
    counted = [place for place in held if place not in uncounted]
    rows: dict[str, Row] = {}
    if "weight_gradients" in kinds:
        rows |= {
            f"weight_gradients/{names[place]}": _gradient(grads[place]) for place in counted if grads[place] is not None
        }
    if "weights" in kinds:
        rows |= {f"weights/{names[place]}": _weight(before, place) for place in counted}
    if "updates" in kinds:
        rows |= {f"updates/{names[place]}": _update(place) for place in counted}
    if "slots" in kinds:
        rows |= _slots(optimizer, dict(zip(names, variables, strict=True)), holds)
    return Weights(rows, [holders[place] for place in held], held, counted)


def _gradient(grad: Any) -> Row:
    return Row(lambda updates: grad, isinstance(grad, tf.IndexedSlices))


def _weight(before: Before, place: int) -> Row:
    return Row(lambda updates: before.values[place])


def _update(place: int) -> Row:
    return Row(lambda updates: updates[place])


def _slot(slot: Any) -> Row:
    return Row(lambda updates: tf.convert_to_tensor(slot))


def _names(model: Any, variables: list) -> tuple[list[str], list[str]]:
    """The path of each variable's innermost layer, and a unique name: that path and the variable's name."""
    holders: dict[int, str] = {}
    for path, layer in scaler.observe.layers_by_path(model).items():
        holders |= {id(variable): path for variable in layer.variables}
    paths = [holders.get(id(variable), model.name) for variable in variables]
    names: list[str] = []
    for path, variable in zip(paths, variables, strict=True):
        name = free = f"{path}/{variable.name}"
        number = 1
        while free in names:
            number += 1
            free = f"{name}:{number}"
        names.append(free)
    return paths, names


def _slots(optimizer: Any, variables: dict[str, Any], holds: Callable[[Any], bool]) -> dict[str, Row]:
    """The optimizer's float variables, except those of weights that are not watched; named after their weight."""
    out = tuple(f"{name}/" for name, variable in variables.items() if not holds(variable))
    found: dict[str, Row] = {}
    for slot in getattr(optimizer, "variables", []):
        if tf.as_dtype(slot.dtype) in _FLOATS and not slot.path.endswith("learning_rate"):
            # Drops the optimizer's name: Keras numbers optimizers per process.
            own = slot.path.partition("/")[2] or slot.path
            for name, variable in variables.items():
                own = own.replace(f"{variable.path.replace('/', '_')}_", f"{name}/", 1)
            if not own.startswith(out):
                found[f"slots/{own}"] = _slot(slot)
    return found
