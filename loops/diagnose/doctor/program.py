"""Takes the return value of a user's function apart into model, optimizer, loss and data, and creates steps of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.diagnose.graph.changes import loss_in_float32
from loops.diagnose.graph.models import taken_apart
from loops.diagnose.memory.footprint import copy_of
from loops.loop.loop import Loop
from loops.step.train_step import TrainStep
from loops.support.batches import explaining, parts
from loops.support.errors import LoopError, OutOfData


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to diagnose.

    Attributes:
        model: The model, which is built.
        loss: A function of (y, prediction), or of (y, prediction, sample_weight).
        optimizer: A Keras optimizer without a loss scaler around it, or a function of (grads, variables).
        strategy: The strategy of the loss scaler, or None if the program has none.
        settings: Further arguments of its `TrainStep`.
        batch: The first batch, as tensors.
        dataset: The dataset of the batches; None if the program gives a single batch.
        compiled: Whether XLA compiles the whole step, as with `Loop(jit_compile=True)`.
        steps_per_call: The `steps_per_call` of its `Loop`; None if the loop chooses it.
    """

    model: keras.Model
    loss: Callable[..., Any]
    optimizer: Any
    strategy: Any
    settings: Mapping[str, Any]
    batch: Any
    dataset: tf.data.Dataset | None
    compiled: bool = False
    steps_per_call: int | None = 1

    def step(self, *, as_it_is: bool = True, **changes: Any) -> TrainStep:
        """A new step of the program, with a new optimizer and loss scaler.

        Args:
            as_it_is: Whether to use the program's own strategy. If False, as under another dtype policy, the loss
                scaler is the default one for the policy.
            **changes: Other settings of the step, such as `jit_compile`.
        """
        keras_one = isinstance(self.optimizer, keras.optimizers.Optimizer)
        chosen = as_it_is and self.strategy is not None
        return TrainStep(
            self.model,
            loss_in_float32(self.loss),
            copy_of(self.optimizer) if keras_one else self.optimizer,
            loss_scaler=scaler.LossScaler(self.strategy) if chosen else None,
            **{**self.settings, **changes},
        )


_SETTINGS = ("accumulate", "clip_norm", "clip", "jit_compile", "allow_16bit_updates")


def program_of(built: Any, name: str) -> Program:
    """Takes the return value of a user's function apart.

    Args:
        built: A `loops.Loop` of a `loops.TrainStep`; or a tuple, or a dict with these keys, of model, optimizer, loss
            and sample, which is a batch or a dataset.
        name: The name of the function, for errors.

    Raises:
        scaler.InvalidArgument: For anything else, and for a model without trainable variables.
        OutOfData: If the dataset is empty.
        BadBatch: If a batch does not fit the model.
    """
    model, optimizer, loss, sample = taken_apart(built, name)
    step: Any = built.train_step if isinstance(built, Loop) else None
    if step is not None and (step.layerwise is not None or built.replicas > 1):
        raise scaler.InvalidArgument(
            f"{name}: it returned a Loop on {built.replicas} replicas, or with layerwise=, whose step cannot be "
            "created again under another policy: return one for a single device, without layerwise=."
        )
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(f"{name}: its model is {model!r}: expected a keras.Model.")
    if not callable(loss):
        raise scaler.InvalidArgument(f"{name}: its loss is {loss!r}: expected a function of (y, prediction).")
    dataset = sample if isinstance(sample, tf.data.Dataset) else None
    batch = _first(sample, name)
    _build(model, batch, name)
    if not model.trainable_variables:
        raise scaler.InvalidArgument(
            f"{name}: model {model.name!r} has no trainable variables, so there is no training step to diagnose."
        )
    optimizer, strategy = (step.optimizer, step.loss_scaler.strategy) if step else _unwrapped(optimizer, name)
    called = (built.calls.jit_compile, built.steps_per_call) if isinstance(built, Loop) else ()
    settings = {setting: getattr(step, setting) for setting in _SETTINGS} if step else {}
    if step is not None and step.masters is not None and type(step.masters) is not scaler.MasterWeights:
        settings["masters"] = type(step.masters)
    return Program(model, loss, optimizer, strategy, settings, batch, dataset, *called)


def _first(sample: Any, name: str) -> Any:
    if isinstance(sample, tf.data.Dataset):
        batch = next(iter(sample), None)
        if batch is None:
            raise OutOfData(f"{name}: the dataset is empty.")
    else:
        batch = sample
    _, y, _ = parts(batch, name)
    given = tuple(one for one in parts(batch, name) if one is not None)
    if y is None or not all(hasattr(one, "shape") for one in tf.nest.flatten(given)):
        raise scaler.InvalidArgument(
            f"{name}: its sample is {type(sample).__name__}: expected a batch (x, y) or (x, y, sample_weight) of "
            "arrays or tensors, or a dataset of such batches."
        )
    return tf.nest.map_structure(lambda one: one if tf.is_tensor(one) else tf.convert_to_tensor(one), given)


def _build(model: keras.Model, batch: Any, name: str) -> None:
    if model.built:
        return
    try:
        with explaining(name, model, batch[0], batch[1]):
            model(batch[0], training=False)
    except scaler.ScalerError:
        raise
    except Exception as error:
        raise LoopError(f"{name}: the model cannot be built: {type(error).__name__}: {error}") from error


def _unwrapped(optimizer: Any, name: str) -> tuple[Any, Any]:
    """The optimizer without its loss scaler, and the strategy of that scaler."""
    if isinstance(optimizer, scaler.LossScaleOptimizer):
        return optimizer.inner_optimizer, optimizer.loss_scaler.strategy
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer, scaler.Dynamic(float(optimizer.initial_scale))
    if isinstance(optimizer, keras.optimizers.Optimizer) or callable(optimizer):
        return optimizer, None
    raise scaler.InvalidArgument(
        f"{name}: its optimizer is {optimizer!r}: expected a Keras optimizer, an hs.LossScaleOptimizer, or a "
        "function of (grads, variables)."
    )
