"""Turns the return value of a user's function into the arguments of lint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import scaler
from loops.diagnose.lint.all_rules import lint
from loops.diagnose.lint.finding import Finding
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep
from loops.support.errors import OutOfData

_PARTS = ("model", "optimizer", "loss", "sample")


def lint_program(built: Any, name: str, *, xla: bool = False, format: str | None = None) -> list[Finding]:
    """Lints the program that a user's function returned.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`, whose dataset gives the sample; or a tuple, or a dict with these
            keys, of model, optimizer, loss and sample. Of a dataset as the sample the first batch is used.
        name: The name of the function, for errors.
        xla: Whether to name the layers that XLA cannot compile, too.
        format: A format whose unfit layers to name, too.

    Raises:
        scaler.InvalidArgument: For anything else.
        OutOfData: If the dataset is empty.
    """
    model, optimizer, loss, sample = _parts(built, name)
    if isinstance(sample, tf.data.Dataset):
        sample = _first(iter(sample), name)
    return lint(model, optimizer, loss, sample, xla=xla, format=format)


def _parts(built: Any, name: str) -> tuple:
    if isinstance(built, Loop):
        step = built.train_step
        if isinstance(step, TrainStep):
            return step.model, step, step.loss_fn, _first(built.position.iterator, name)
        raise scaler.InvalidArgument(
            f"--build {name}: it returned a Loop whose train step is {step!r}, so its model and loss are unknown: "
            "expected an hs.TrainStep, or return (model, optimizer, loss, sample)."
        )
    if isinstance(built, Mapping) and set(built) == set(_PARTS):
        return tuple(built[part] for part in _PARTS)
    if isinstance(built, tuple) and len(built) == len(_PARTS):
        return built
    raise scaler.InvalidArgument(
        f"--build {name}: it returned {type(built).__name__}: expected an hs.Loop, or a tuple or dict of "
        f"{', '.join(_PARTS)}."
    )


def _first(iterator: Any, name: str) -> Any:
    batch = next(iterator, None)
    if batch is None:
        raise OutOfData(f"--build {name}: the dataset is empty.")
    return batch
