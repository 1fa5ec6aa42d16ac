"""A step that a user wrote: the models that it refers to, and what its graph reads, assigns and decides."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.steps import COUNTER, SCALE, assigns, is_of_keras_scaler
from loops.backend.variables import native

_BACKWARD = "gradient_tape/"
"""How TensorFlow begins the names of what a tape computes."""


@dataclasses.dataclass(frozen=True)
class KerasScaler:
    """The variables of a `keras.optimizers.LossScaleOptimizer`, which counts neither attempts nor skips.

    An applied step adds 1 to the counter, or sets it to 0 and doubles the scale. A skipped step sets it to 0 and halves
    the scale.
    """

    step_counter: tf.Variable
    dynamic_scale: tf.Variable


@dataclasses.dataclass(frozen=True)
class Found:
    """The loss scalers of a step's graph.

    Attributes:
        scalers: Those that the step updates.
        keras: Keras's own that it updates.
        known: False if the step reads the scale of some but updates none: then it is unknown whether it was applied.
        concerned: Those that the step reads or updates; none if it neither differentiates nor trains, as an evaluation.
    """

    scalers: tuple[scaler.LossScaler, ...] = ()
    keras: tuple[KerasScaler, ...] = ()
    known: bool = True
    concerned: tuple[scaler.LossScaler, ...] = ()

    @property
    def any(self) -> bool:
        """Whether the step updates any."""
        return bool(self.scalers or self.keras)

    def read(self) -> list[tuple[tf.Tensor, ...]]:
        """The counters of each scaler, to be compared before and after a step."""
        ours = [one.counters[:2] for one in self.scalers]
        return [*ours, *((tf.identity(one.step_counter), tf.identity(one.dynamic_scale)) for one in self.keras)]

    def decided(self, before: list[tuple[tf.Tensor, ...]]) -> tuple[tf.Tensor, tf.Tensor]:
        """How many decisions were taken since `before`, and how many were to apply, as scalar int64 tensors."""
        attempted, applied = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        for place, ((first, second), (then, also)) in enumerate(zip(self.read(), before, strict=True)):
            if place < len(self.scalers):
                attempted, applied = attempted + first - then, applied + second - also
            else:  # The counter and the scale of Keras's.
                attempted += 1
                applied += tf.cast(tf.logical_or(first > then, second > also), tf.int64)
        return attempted, applied


def find(concrete: tf.types.experimental.ConcreteFunction) -> Found:
    """The loss scalers of a step.

    Args:
        concrete: Its concrete function.
    """
    moved: dict[int, scaler.LossScaler] = {}
    read: dict[int, scaler.LossScaler] = {}
    others = trains = False
    keras: dict[tuple[str, str], tf.Variable] = {}
    for variable, assigned in captured(concrete):
        owner = scaler.authoring.owner_of(variable)
        trains = trains or (assigned and variable.trainable)
        place, _, name = variable.name.partition(":")[0].rpartition("/")
        if owner is not None:
            read[id(owner)] = owner
            if assigned:
                moved[id(owner)] = owner
        elif name in (COUNTER, SCALE):
            keras[place, name] = variable
        else:
            others = others or is_of_keras_scaler(variable)
    pairs = [
        KerasScaler(variable, keras[place, SCALE])
        for (place, name), variable in keras.items()
        if name == COUNTER and (place, SCALE) in keras
    ]
    # Without the counter the graph only reads the scale; other variables of such a scaler mean unknown names.
    seen = read or others or any(name == SCALE for _, name in keras)
    known = bool(moved or pairs) or not seen
    # A step that computes gradients is meant to train, also if it never applies them.
    trains = trains or any(op.name.startswith(_BACKWARD) for op in concrete.graph.get_operations())
    return Found(tuple(moved.values()), tuple(pairs), known, tuple(read.values()) if trains else ())


def captured(concrete: tf.types.experimental.ConcreteFunction) -> Iterator[tuple[tf.Variable, bool]]:
    """Each variable of a graph, in the order of the trace, and whether the graph assigns it."""
    variables = {
        id(variable.handle): variable for one in concrete.variables for variable in getattr(one, "values", (one,))
    }
    handles = concrete.captured_inputs
    inner = concrete.inputs[len(concrete.inputs) - len(handles) :]
    for handle, placeholder in zip(handles, inner, strict=True):
        if id(handle) in variables:
            yield variables[id(handle)], assigns(placeholder)


_MANY = 1000
"""A container of more parts holds data: containers in it are not searched, which would take seconds."""


def models_of(train_step: object) -> list[keras.layers.Layer]:
    """The models and layers that a step refers to, as `named_by` finds them.

    Args:
        train_step: Any callable.
    """
    return named_by(train_step, keras.layers.Layer)


def named_by(train_step: object, sought: type) -> list[Any]:
    """The objects of a class that a step refers to.

    They are found in its closure, as globals, as default arguments and as attributes of its object, also inside of
    dicts, lists and tuples. Functions of the same module that it refers to are searched, too. Other references are not
    found.

    Args:
        train_step: Any callable.
        sought: The class.
    """
    found: list[Any] = []
    seen: dict[int, object] = {}
    waiting: list[Any] = [train_step, *_attributes(train_step)]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, sought):
            found.append(one)
        elif isinstance(one, (dict, list, tuple)):
            parts = one.values() if isinstance(one, dict) else one
            held = (sought, dict, list, tuple) if len(one) <= _MANY else sought
            waiting += [part for part in parts if isinstance(part, held)]
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            waiting += [one.__func__, *_attributes(one.__self__)]
        elif isinstance(one, types.FunctionType):
            waiting += _named_by(one)
        elif isinstance(getattr(one, "python_function", None), types.FunctionType):
            waiting.append(one.python_function)
    return found


def read_only(
    models: list[keras.layers.Layer], concrete: tf.types.experimental.ConcreteFunction
) -> scaler.weights.TrainableSet:
    """The weights that a step reads and never assigns, each with whether it is trainable now.

    Args:
        models: The models that the step may use.
        concrete: The step's concrete function.
    """
    read = {id(variable) for variable, assigned in captured(concrete) if not assigned}
    weights = {id(weight): weight for model in models for weight in model.weights}
    return scaler.weights.TrainableSet.of(weight for weight in weights.values() if id(_first(weight)) in read)


def _attributes(owner: object) -> list[Any]:
    return list(getattr(owner, "__dict__", {}).values())


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    names = (function.__globals__.get(name) for name in _names(function.__code__))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in (*cells, *defaults, *names):
        if not isinstance(value, types.FunctionType) or value.__module__ == function.__module__:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _first(weight: Any) -> tf.Variable:
    """The TensorFlow variable of a Keras weight, on the first replica."""
    own = native(weight)
    return getattr(own, "values", (own,))[0]
