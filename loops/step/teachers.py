"""A teacher: a model whose weights follow those of a student, as an exponential moving average (EMA)."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.variables import native


class Teacher(tf.Module):
    """A model that follows another one of the same shape, in float32; float64 weights in float64.

        teacher = momentum * teacher + (1 - momentum) * student

    All floating-point weights follow, BatchNorm's statistics too. 16-bit weights of the teacher have float32 copies: an
    average in 16 bits would stand still near its goal. Those of the student are read from its masters. The scales and
    histories of float8 layers, which take their gradient as their value, are copied: an average of largest values is
    too small for the largest.

    Args:
        teacher: A built model.
        student: A built model or layer with weights of the same shapes.
        masters: The student's, or None.
        momentum: How much of the teacher stays.
    """

    def __init__(self, teacher: keras.Model, student: Any, masters: scaler.MasterWeights | None, momentum: float):
        super().__init__(name="teacher")
        self._momentum = momentum
        pairs = [pair for pair in zip(teacher.weights, student.weights, strict=True) if is_floating(pair[0])]
        wide = dict(zip(map(id, masters.model_variables), masters.weights, strict=True)) if masters else {}
        self._students = [wide.get(id(variable), variable) for _, variable in pairs]
        own = [variable for variable, _ in pairs]
        self._copied = [scaler.gradients.overwrites(student) for _, student in pairs]
        narrow = any(variable.dtype in ("float16", "bfloat16") for variable in own)
        self.masters = scaler.MasterWeights(own, name="teacher_weights") if narrow else None
        self._own = self.masters.weights if self.masters else own

    @scaler.authoring.no_autograph
    def follow(self, applied: tf.Tensor) -> None:
        """Takes one step towards the student where it was applied, scalar bool; else keeps every bit."""

        def moved(own: tf.Tensor, student: tf.Tensor, applied: tf.Tensor, share: float) -> tf.Tensor:
            wide = tf.float64 if own.dtype == tf.float64 else tf.float32
            stays, now, goal = tf.constant(share, wide), tf.cast(own, wide), tf.cast(student, wide)
            return tf.where(applied, tf.cast(stays * now + (1.0 - stays) * goal, own.dtype), own)

        @scaler.authoring.no_forward_pass()
        def assign(strategy: tf.distribute.Strategy, students: list, applied: Any) -> None:
            if self.masters:
                self.masters.refresh()
            for variable, student, copied in zip(self._own, students, self._copied, strict=True):
                share = 0.0 if copied else self._momentum
                strategy.extended.update(
                    native(variable),
                    lambda own, goal, applied, share=share: own.assign(
                        moved(tf.convert_to_tensor(own), goal, applied, share)
                    ),
                    args=(student, applied),
                )
            if self.masters:
                self.masters.write()

        students = [tf.convert_to_tensor(variable) for variable in self._students]
        tf.distribute.get_replica_context().merge_call(scaler.authoring.no_autograph(assign), args=(students, applied))


def is_floating(variable: Any) -> bool:
    """Whether it follows: seeds and counters do not."""
    return tf.as_dtype(variable.dtype).is_floating


def check_teacher(who: str, teacher: Any, student: Any, momentum: Any) -> None:
    """Refuses a teacher that cannot follow.

    Args:
        who: The start of the sentence.
        teacher: The argument of `Part`.
        student: Its argument `model`.
        momentum: The argument of `Part`.
    """
    if not isinstance(momentum, float) or not 0.0 <= momentum < 1.0:
        raise scaler.InvalidArgument(f"{who}: momentum={momentum!r}: expected a float from 0.0 up to, not with, 1.0.")
    if teacher is None:
        return
    if not isinstance(teacher, keras.layers.Layer) or not isinstance(student, keras.layers.Layer):
        raise scaler.InvalidArgument(
            f"{who}: teacher={teacher!r}: expected a built Keras model for a part whose `model` is one model as well."
        )
    shapes = [[tuple(variable.shape) for variable in one.weights] for one in (teacher, student)]
    if not shapes[0] or shapes[0] != shapes[1]:
        raise scaler.InvalidArgument(
            f"{who}: the teacher {teacher.name!r} has weights of other shapes than {student.name!r}: build both alike."
        )
    shared = {id(variable) for variable in teacher.weights} & {id(variable) for variable in student.weights}
    if shared:
        raise scaler.InvalidArgument(
            f"{who}: the teacher {teacher.name!r} shares weights with {student.name!r}: expected a model of its own, "
            "such as keras.models.clone_model(student)."
        )
