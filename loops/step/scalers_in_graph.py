"""What a train step decided, read from the loss scalers that its graph updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

import scaler
from loops.backend.steps import COUNTER, SCALE, assigns, is_of_keras_scaler

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
        after = self.read()
        for (first, second), (then, also) in list(zip(after, before, strict=True))[: len(self.scalers)]:
            attempted, applied = attempted + first - then, applied + second - also
        for (count, scale), (then, also) in list(zip(after, before, strict=True))[len(self.scalers) :]:
            attempted += 1
            applied += tf.cast(tf.logical_or(count > then, scale > also), tf.int64)
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
    variables = {id(variable.handle): variable for one in concrete.variables for variable in _parts(one)}
    handles = concrete.captured_inputs
    inner = concrete.inputs[len(concrete.inputs) - len(handles) :]
    for handle, placeholder in zip(handles, inner, strict=True):
        if id(handle) in variables:
            yield variables[id(handle)], assigns(placeholder)


def _parts(variable: tf.Variable) -> list:
    return list(getattr(variable, "values", (variable,)))
