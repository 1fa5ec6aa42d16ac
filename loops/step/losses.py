"""The loss of a step: what a user may give for it, as for Keras's `compile`, and what its function returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.backend.replica_losses import as_loss
from loops.support.errors import BadBatch, BadOutputs


@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """A loss as a sum and what it is to be divided by: tokens, examples that a mask leaves, or sample weights.

        def loss_fn(y, logits):
            mask = tf.cast(y != PADDING, tf.float32)
            each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return loops.WeightedLoss(tf.reduce_sum(each * mask), tf.reduce_sum(mask))

    A `TrainStep` divides the sum of the totals by the sum of the weights, over the micro-batches of a window and over
    replicas: the gradient is that of one large batch. A mean of means is not, where micro-batches differ in weight.
    Keras's `compile` takes no such loss: it raises an error.

    Attributes:
        total: Scalar, the sum over the batch, each term times its weight.
        weight: Scalar, the sum of the weights, at least 0. A batch with a weight of 0 counts for nothing.
    """

    # No tuple: Keras would take the mean of the two. TensorFlow's functions may return it all the same.
    total: Any
    weight: Any

    def __tf_flatten__(self) -> tuple[tuple, tuple]:
        """Nothing fixed, and two tensors."""
        return (), (self.total, self.weight)

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple, components: tuple) -> WeightedLoss:
        """The loss again."""
        del metadata
        return cls(*components)


class Loss(NamedTuple):
    """What a loss function returned, read.

    Attributes:
        mean: The loss, of a `WeightedLoss` the total over the weight, in float32.
        shown: What a look at the loss's precision is to see: a total in 16 bits in place of the mean.
        weight: Of a `WeightedLoss`, scalar float32; else None.
        extra: Further scalars by name.
    """

    mean: tf.Tensor
    shown: tf.Tensor
    weight: tf.Tensor | None
    extra: dict[str, tf.Tensor]


def read_loss(result: Any, taken: Container[str]) -> Loss:
    """The loss, and the scalars that its function returned with it.

    Args:
        result: What the function returned.
        taken: Names that the step itself returns.

    Raises:
        BadBatch: If the loss is one of no rows.
        BadOutputs: If it returned something else, or a scalar with a name that is taken.
    """
    pair = isinstance(result, tuple) and len(result) == 2
    loss, extra = result if pair else (result, {})
    weighted = isinstance(loss, WeightedLoss)
    if not isinstance(extra, dict) or (not weighted and isinstance(loss, (tuple, list, dict))) or loss is None:
        raise BadOutputs(
            f"the loss function returned {result!r}: expected a scalar or an hs.WeightedLoss(total, weight), alone "
            "or with a dict of scalars by name."
        )
    if not weighted and tf.TensorShape(getattr(loss, "shape", ())) == tf.TensorShape([0]):
        raise BadBatch(
            "the batch has no rows: Keras's losses give no scalar for it, but an empty tensor. Leave such batches out "
            "of what gives them. As a batch of a tf.data.Dataset with an open number of rows, such as (None, 6), it "
            "is a step with a loss of 0."
        )
    twice = [name for name in extra if name in taken]
    if twice:
        raise BadOutputs(
            f"the loss function returned a scalar named {twice[0]!r}, which the step itself returns: rename it."
        )
    return _of_weighted(loss, extra) if weighted else Loss(loss, loss, None, extra)


def _of_weighted(loss: WeightedLoss, extra: dict[str, tf.Tensor]) -> Loss:
    for name, value in vars(loss).items():
        shape = getattr(value, "shape", ())
        if isinstance(value, (tuple, list, dict, str)) or value is None or tf.TensorShape(shape).rank not in (0, None):
            raise BadOutputs(
                f"the loss function returned a WeightedLoss with {name}={value!r}: expected a scalar, the sum over the "
                "batch. Use tf.reduce_sum."
            )
    weight = tf.cast(loss.weight, tf.float32)
    # A weight below 0, infinite or NaN makes the loss NaN, and the step a skip.
    sound = tf.logical_and(tf.math.is_finite(weight), weight >= 0.0)
    divisor = tf.where(sound, positive(weight), float("nan"))
    mean = tf.cast(loss.total, tf.float32) / divisor
    total = tf.convert_to_tensor(loss.total)
    return Loss(mean, total if total.dtype in (tf.float16, tf.bfloat16) else mean, weight, extra)


def replica_count() -> int:
    """How many replicas share a batch."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def share_of_weight(weight: tf.Tensor) -> tf.Tensor:
    """What a replica's mean counts for in a mean over replicas, scalar float32: 1 where all have the same weight.

    Args:
        weight: This replica's, scalar float32.
    """
    return replica_count() * weight / positive(sum_over_replicas(weight))


def sum_over_replicas(weight: tf.Tensor | tf.Variable) -> tf.Tensor:
    """The sum of a number that each replica has."""
    context: Any = tf.distribute.get_replica_context()
    weight = tf.identity(weight)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, weight) if context.num_replicas_in_sync > 1 else weight


def positive(weight: tf.Tensor) -> tf.Tensor:
    """A sum of weights to divide by; 1 in place of 0, where nothing was summed."""
    return tf.where(tf.equal(weight, 0.0), 1.0, weight)


LOSSES = (*dir(keras.losses), "mse", "mae", "mape", "msle")
"""Names that Keras has for losses, the short ones included."""


def as_loss_function(model: keras.Model, loss_fn: Any, loss_weights: Any) -> Callable[..., Any]:
    """The loss function itself, or one that adds up those of a dict or list.

    Args:
        model: The model; a dict of losses has the names of its outputs, a list their order.
        loss_fn: The argument of `TrainStep`: a function or a name, or a dict or list of these.
        loss_weights: Numbers in the same structure, or None for 1 each.

    Raises:
        scaler.InvalidArgument: If the weights do not match the losses, or a loss is not a function.
    """
    if not isinstance(loss_fn, (dict, list, tuple)):
        loss_fn = _from_name(loss_fn)
        if loss_weights is not None:
            raise scaler.InvalidArgument(
                f"TrainStep(loss_weights={loss_weights!r}): expected loss_fn to be a dict or list of losses, with a "
                "weight for each."
            )
        return loss_fn
    losses = {key: _from_name(loss) for key, loss in _by_key(loss_fn).items()}
    if not losses:
        raise scaler.InvalidArgument(f"TrainStep(loss_fn={loss_fn!r}): expected at least one loss.")
    weights = {key: 1.0 for key in losses} if loss_weights is None else _by_key(loss_weights)
    if (type(loss_fn) is not type(loss_weights) and loss_weights is not None) or set(weights) != set(losses):
        raise scaler.InvalidArgument(
            f"TrainStep(loss_weights={loss_weights!r}): expected a number for each loss, in the same structure as "
            f"loss_fn, a {type(loss_fn).__name__} with {', '.join(map(repr, losses)) or 'nothing'}."
        )
    for key, loss in losses.items():
        if not callable(loss):
            raise scaler.InvalidArgument(
                f"TrainStep(loss_fn=...): the loss of {key!r} is {loss!r}: expected a function of (y, prediction), "
                "such as keras.losses.MeanSquaredError(), or the name of one. Leave out an output without a loss."
                + scaler.authoring.did_you_mean(loss, LOSSES)
            )
    return _Sum(model, losses, weights)


def _from_name(loss_fn: Any) -> Any:
    """Keras's loss of a name, which is a mean; the function that Keras finds gives a number for each example."""
    found = scaler.authoring.from_keras(keras.losses, loss_fn)
    classes = {name.lower(): name for name in dir(keras.losses) if name[0].isupper()}
    name = classes.get(getattr(found, "__name__", "").replace("_", ""))
    return getattr(keras.losses, name)() if name and found is not loss_fn else found


class _Sum:
    """Adds up losses, and returns the sum and each of them."""

    def __init__(self, model: keras.Model, losses: dict, weights: dict):
        self._names, self._losses, self._weights = list(getattr(model, "output_names", ())), losses, weights

    def __call__(self, y: Any, prediction: Any, sample_weight: Any = None) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        predictions, targets = self._by_loss("prediction", prediction), self._by_loss("y", y)
        weights = None
        if sample_weight is not None:
            several = isinstance(sample_weight, (Mapping, list, tuple))
            weights = self._by_loss("weights", sample_weight) if several else dict.fromkeys(self._losses, sample_weight)
        found, total = {}, tf.constant(0.0)
        for key, loss in self._losses.items():
            arguments = (targets[key], predictions[key], *(() if weights is None else (weights[key],)))
            given = as_loss(loss)(*arguments)
            if isinstance(given, WeightedLoss):
                raise BadOutputs(
                    f"TrainStep(loss_fn=...): the loss of {key!r} returned a WeightedLoss: expected a scalar from each "
                    "of several losses. Write one function of all outputs that returns one WeightedLoss."
                )
            value = tf.cast(given, tf.float32)
            found[f"{key}_loss" if isinstance(key, str) else f"loss_{key}"] = value
            total += self._weights[key] * value
        return total, found

    def _by_loss(self, what: str, values: Any) -> dict:
        """The value for each loss, by the loss's key, which is an output's name or position."""
        given = _by_key(values if isinstance(values, (dict, list, tuple)) else [values])
        if given and all(isinstance(key, int) for key in given) and len(self._names) == len(given):
            given |= dict(zip(self._names, list(given.values()), strict=True))
        elif all(isinstance(key, str) for key in given):
            given |= {place: given[name] for place, name in enumerate(self._names) if name in given}
        missing, places = [key for key in self._losses if key not in given], sum(isinstance(key, int) for key in given)
        if missing or (not isinstance(next(iter(self._losses)), str) and len(self._losses) != places):
            shown = [key for key in given if isinstance(key, str)] or list(given)
            raise scaler.InvalidArgument(
                f"TrainStep(loss_fn=...): losses for {', '.join(map(repr, self._losses))}, but the {what} has "
                f"{', '.join(map(repr, shown))}: expected one loss per output, by its name or in the order of the "
                "outputs."
            )
        return given


def _by_key(values: Mapping | Sequence) -> dict:
    return dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
