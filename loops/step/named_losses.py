"""The losses of a model with several outputs, by output and with weights, as for Keras's `compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import scaler
from loops.backend.replica_losses import as_loss
from loops.step.loss_result import WeightedLoss
from loops.support.errors import BadOutputs

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
        missing = [key for key in self._losses if key not in given]
        if missing or (not isinstance(next(iter(self._losses)), str) and len(self._losses) != _count(given)):
            shown = [key for key in given if isinstance(key, str)] or list(given)
            raise scaler.InvalidArgument(
                f"TrainStep(loss_fn=...): losses for {', '.join(map(repr, self._losses))}, but the {what} has "
                f"{', '.join(map(repr, shown))}: expected one loss per output, by its name or in the order of the "
                "outputs."
            )
        return given


def _by_key(values: Mapping | Sequence) -> dict:
    return dict(values) if isinstance(values, Mapping) else dict(enumerate(values))


def _count(given: dict) -> int:
    return sum(isinstance(key, int) for key in given)
