"""How a step is traced for an attempt: as it is written, its inner functions inline, its arithmetic in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from loops.loop.signature import taking_batches
from loops.step.composed_step import ComposedStep
from loops.step.train_step import TrainStep


def as_python(moment: Any) -> Callable:
    """The step as a Python function of a batch, without `tf.function`."""
    written = moment.train_step
    while hasattr(written, "python_function"):
        written = written.python_function
    if written is moment.train_step:
        return moment.take
    return taking_batches(written, moment.loop.element_spec)


@contextlib.contextmanager
def inlined() -> Iterator[None]:
    """Traces inner `tf.function`s inline, as a part of their caller's graph."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def not_regrouped() -> Iterator[None]:
    """Prevents TensorFlow from reordering arithmetic."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        # None is the default. Another value would make TensorFlow prepare each compiled function again.
        own = before.get("arithmetic_optimization")
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": own})


@contextlib.contextmanager
def retraced(train_step: Any) -> Iterator[None]:
    """Traces again what a step of this package would keep: what XLA compiled, and whose turn it is."""
    ours = isinstance(train_step, (TrainStep, ComposedStep))
    with train_step.retraced() if ours else contextlib.nullcontext():
        yield
