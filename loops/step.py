"""The order of a train step, written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.accumulate import Window


class TrainStep(tf.Module):
    """A train step for a Keras model: forward, backward, accumulate, then apply or skip.

        step = loops.TrainStep(model, loss_fn, optimizer, loss_scaler=scaler.LossScaler(scaler.Dynamic()))
        outputs = step((x, y))

    Variables of the model that are float16 or bfloat16 are trained through float32 master weights. A skipped step
    also puts back the model's non-trainable state (BatchNorm's statistics, seed generators). The model's own losses,
    such as weight regularisation, are added to the loss.

    With `accumulate=k` each call takes one micro-batch, and every k-th call decides once over the mean gradient of
    the k: equal to the large batch, but for BatchNorm and rounding. A micro-batch that overflows makes the window a
    skipped step. A window that the data does not fill changes nothing.

    Args:
        model: A Keras model.
        loss_fn: `(y, prediction) -> scalar`, or `(y, prediction, sample_weight) -> scalar` for batches with weights.
        optimizer: A Keras optimizer, or a function `(grads, variables) -> None`.
        loss_scaler: Scales the loss; without one, `scaler.LossScaler(scaler.NoScaling())`.
        accumulate: Micro-batches to a step.
        clip_norm: Largest global norm of the unscaled gradients, or None.
        allow_16bit_updates: Train 16-bit variables without masters, unsafely: see `scaler.LossScaler.apply`.

    Raises:
        scaler.InvalidArgument: For an argument that cannot work.
    """

    def __init__(
        self,
        model: keras.Model,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        *,
        loss_scaler: scaler.LossScaler | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        allow_16bit_updates: bool = False,
    ):
        super().__init__(name="train_step")
        _check(model, loss_fn, loss_scaler, accumulate)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler or scaler.LossScaler(scaler.NoScaling())
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.allow_16bit_updates = allow_16bit_updates
        self.masters: scaler.MasterWeights | None = None
        self.window: Window | None = None
        self._ready = False

    def __call__(self, batch) -> dict[str, tf.Tensor]:
        """Takes one (micro-)batch.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            Scalars. `loss`: float32, unscaled. `attempted`: bool, whether a decision was taken, which only the last
            micro-batch of a window does. `applied`: bool, whether the weights moved. `loss_scale`: float32, the scale
            of this call. `grad_norm`: float32, of the unscaled gradients before clipping; NaN where none was attempted.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        self._build(x)
        loss_scale = self.loss_scaler.loss_scale
        before = self.window.open() if self.window else scaler.snapshot(self.model.non_trainable_variables)
        loss, grads = self._differentiate(x, y, sample_weight)
        attempted, applied, norm = self._decide(grads, before)
        return {
            "loss": loss,
            "attempted": attempted,
            "applied": applied,
            "loss_scale": loss_scale,
            "grad_norm": norm,
        }

    def _build(self, x) -> None:
        if self._ready:
            return
        if not self.model.built:
            # Masters copy initial values, which exist only for variables made outside of the graph.
            with tf.init_scope():
                self.model(tf.nest.map_structure(_example, x), training=False)
        variables = self.model.trainable_variables
        if not variables:
            raise scaler.InvalidArgument(f"TrainStep: model {self.model.name!r} has no trainable variables.")
        if not self.allow_16bit_updates and any(v.dtype in ("float16", "bfloat16") for v in variables):
            self.masters = scaler.MasterWeights(variables)
        if self.accumulate > 1:
            self.window = Window(self.accumulate, variables, self.model.non_trainable_variables)
        self._ready = True

    def _differentiate(self, x, y, sample_weight) -> tuple[tf.Tensor, list]:
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            prediction = self.model(x, training=True)
            arguments = (y, prediction) if sample_weight is None else (y, prediction, sample_weight)
            loss = tf.cast(self.loss_fn(*arguments), tf.float32)
            for penalty in self.model.losses:
                loss += tf.cast(penalty, tf.float32)
            scaled = self.loss_scaler.scale(loss)
        return loss, tape.gradient(scaled, weights)

    def _decide(self, grads: list, before: scaler.Snapshot) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Whether a step was attempted, whether it was applied, and the norm of its gradients."""
        if self.window is None:
            outcome = self._apply(grads, before)
            return tf.constant(True), outcome.finite, outcome.grad_norm
        window = self.window
        window.add(grads)
        tf.cond(window.whole, lambda: None, before.restore)

        def close() -> tuple[tf.Tensor, tf.Tensor]:
            outcome = self._apply(window.mean(grads), before)
            window.close()
            return outcome.finite, outcome.grad_norm

        complete = window.complete
        applied, norm = tf.cond(complete, close, lambda: (tf.constant(False), tf.constant(float("nan"))))
        return complete, applied, norm

    def _apply(self, grads: list, before: scaler.Snapshot) -> scaler.Outcome:
        return self.loss_scaler.apply(
            self.optimizer,
            grads,
            self.masters or self.model.trainable_variables,
            clip_norm=self.clip_norm,
            rollback=before,
            allow_16bit_updates=self.allow_16bit_updates,
        )


def _example(tensor: tf.Tensor) -> tf.Tensor:
    return tf.zeros([size or 1 for size in tensor.shape], tensor.dtype)


def _check(model: object, loss_fn: object, loss_scaler: object, accumulate: object) -> None:
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(
            f"TrainStep(model={model!r}): expected a keras.Model. For anything else write the step yourself: any "
            "callable from a batch to a dict of scalar tensors is a train step."
        )
    if not callable(loss_fn):
        raise scaler.InvalidArgument(f"TrainStep(loss_fn={loss_fn!r}): expected a function of (y, prediction).")
    if loss_scaler is not None and not isinstance(loss_scaler, scaler.LossScaler):
        raise scaler.InvalidArgument(
            f"TrainStep(loss_scaler={loss_scaler!r}): expected a scaler.LossScaler, such as "
            "scaler.LossScaler(scaler.Dynamic())."
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise scaler.InvalidArgument(f"TrainStep(accumulate={accumulate!r}): expected an integer of at least 1.")
