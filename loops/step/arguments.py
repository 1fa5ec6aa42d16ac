"""What a `TrainStep` refuses when it is made, rather than at the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

import scaler
from loops.backend.steps import schedule
from loops.step.losses import LOSSES
from loops.step.schedule import ByAttempts
from loops.support.checks import check_count, is_count


def computes_in_float16(model: keras.layers.Layer) -> bool:
    """Whether any layer that the model has so far computes in float16."""
    return any(getattr(layer, "compute_dtype", None) == "float16" for layer in scaler.observe.layers_of(model))


def default_scaler(models: Sequence[keras.layers.Layer], name: str = "loss_scaler") -> scaler.LossScaler:
    """The scaler of a step without `loss_scaler=`: only float16 flushes small gradients to zero and needs scaling."""
    scales = any(computes_in_float16(model) for model in models)
    return scaler.LossScaler(scaler.Dynamic() if scales else scaler.NoScaling(), name=name)


def has_16bit(variables: Sequence) -> bool:
    """Whether any variable is stored in 16 bits, and needs a float32 master."""
    return any(variable.dtype in ("float16", "bfloat16") for variable in variables)


def check_late_layers(model: keras.Model) -> None:
    """Refuses float16 in layers that the model created in its build, after the step had chosen not to scale."""
    if computes_in_float16(model):
        raise scaler.InvalidArgument(
            f"TrainStep: model {model.name!r} computes in float16 in layers that it created when it was built, after "
            "the step had chosen no loss scaling for it. Build the model first, or pass loss_scaler=, such as "
            "hs.LossScaler(hs.Dynamic())."
        )


def check_masters(masters: object, allow_16bit_updates: bool, layerwise: object) -> None:
    """Refuses two ways of treating 16-bit variables at once, and a `layerwise` that is not a `Layerwise`."""
    if masters is not None and (allow_16bit_updates or not callable(masters)):
        raise scaler.InvalidArgument(
            f"TrainStep(masters={masters!r}, allow_16bit_updates={allow_16bit_updates!r}): expected a function of the "
            "variables, such as hs.weights.KahanWeights, and not to train 16-bit variables without it as well."
        )
    if layerwise is not None and not isinstance(layerwise, scaler.layerwise.Layerwise):
        raise scaler.InvalidArgument(
            f"TrainStep(layerwise={layerwise!r}): expected the Layerwise that hs.layerwise.insert_rescales returned."
        )


def check_retry(retry: object, layerwise: object, jit_compile: bool, probes: object) -> None:
    """Refuses a `retry` that is no bool, and steps whose gradients cannot be taken again."""
    if not isinstance(retry, bool):
        raise scaler.InvalidArgument(f"TrainStep(retry={retry!r}): expected True or False.")
    if retry and layerwise is not None:
        raise scaler.InvalidArgument(
            "TrainStep(retry=True, layerwise=...): each group of layers has a scale of its own, which moves by itself. "
            "Use one of the two."
        )
    if retry and probes is not None:
        raise scaler.InvalidArgument(
            "TrainStep(retry=True, probes=...): probes, which an hs.Trace needs, measure the first backward pass and "
            "not the one that is applied. Use one of the two."
        )
    if retry and jit_compile:
        raise scaler.InvalidArgument(
            "TrainStep(retry=True, jit_compile=True): a pass that is compiled by itself is not repeated. Compile the "
            "whole step: tf.function(step, jit_compile=True), or Loop(step, ..., jit_compile=True)."
        )


def check_made_masters(masters: object, variables: list) -> None:
    """Refuses masters from `masters=` that are not those of the model's own variables."""
    if not isinstance(masters, scaler.MasterWeights):
        raise scaler.InvalidArgument(
            f"TrainStep(masters=...): the function returned {masters!r}: expected an hs.MasterWeights, "
            "hs.weights.KahanWeights or hs.weights.StochasticRounding of the variables it is given."
        )
    own = masters.model_variables
    if len(own) != len(variables) or any(one is not other for one, other in zip(own, variables, strict=True)):
        raise scaler.InvalidArgument(
            "TrainStep(masters=...): the function returned masters of other variables than those it was given, the "
            "trainable ones of this model: pass on its argument, as in lambda variables: "
            "hs.weights.KahanWeights(variables)."
        )


def check_scaling(model: keras.Model, optimizer: Any, loss_scaler: scaler.LossScaler, layerwise: object) -> None:
    """Refuses a model, an optimizer and a scaler that would count or scale one thing twice, or not at all."""
    if layerwise is None and any(
        getattr(layer, "scales_gradients", False) for layer in scaler.observe.layers_of(model)
    ):
        raise scaler.InvalidArgument(
            f"TrainStep: model {model.name!r} has layers of hs.layerwise.insert_rescales, and only their Layerwise "
            "removes those scales from the gradients: expected layerwise=, the second object that insert_rescales "
            "returned."
        )
    check_optimizer("TrainStep", optimizer, loss_scaler)


def as_optimizer(who: str, optimizer: Any) -> Any:
    """The optimizer of an argument: a name stands for Keras's optimizer with its defaults, as in `compile`.

    Args:
        who: The start of the sentence.
        optimizer: An optimizer, a function or a name. `scaler.authoring.check_arguments` looks at it more closely.

    Raises:
        scaler.InvalidArgument: For a name that Keras does not know, and for what cannot move variables.
    """
    optimizer = scaler.authoring.from_keras(keras.optimizers, optimizer)
    if isinstance(optimizer, (list, tuple, dict)):
        raise scaler.InvalidArgument(
            f"{who}: optimizer is a {type(optimizer).__name__}: expected one. For several use an hs.ComposedStep "
            "with a part for each, or hs.apply_together in a step of your own."
        )
    moves = callable(optimizer) or hasattr(optimizer, "apply") or hasattr(optimizer, "apply_gradients")
    if moves and not isinstance(optimizer, type):
        return optimizer
    raise scaler.InvalidArgument(
        f"{who}: optimizer={optimizer!r:.100}: expected a Keras optimizer such as keras.optimizers.Adam(1e-3), the "
        "name of one such as 'adam', or a function of (grads, variables)."
        + scaler.authoring.did_you_mean(optimizer, map(str.lower, dir(keras.optimizers)))
    )


def as_loss_scaler(who: str, loss_scaler: Any, name: str = "loss_scaler") -> scaler.LossScaler | None:
    """The scaler of an argument: a strategy stands for a scaler that uses it.

    Args:
        who: The start of the sentence.
        loss_scaler: A scaler, a strategy or None.
        name: Of a scaler that is made.

    Raises:
        scaler.InvalidArgument: For anything else.
    """
    if loss_scaler is None or isinstance(loss_scaler, scaler.LossScaler):
        return loss_scaler
    if isinstance(loss_scaler, scaler.Strategy) and not isinstance(loss_scaler, type):
        return scaler.LossScaler(loss_scaler, name=name)
    raise scaler.InvalidArgument(
        f"{who}: loss_scaler={loss_scaler!r}: expected an hs.LossScaler, or a strategy such as hs.Dynamic()."
    )


def check_optimizer(who: str, optimizer: Any, loss_scaler: scaler.LossScaler | None) -> None:
    """Refuses an optimizer that accumulates, or whose schedule counts the attempts of another scaler.

    Args:
        who: The start of the sentence.
        optimizer: The optimizer.
        loss_scaler: The scaler whose `apply` gets it; None if it is not known yet.
    """
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise scaler.InvalidArgument(
            f"{who}: the optimizer has gradient_accumulation_steps={optimizer.gradient_accumulation_steps!r}, so "
            f"a step that counts as applied might not move the weights. Leave it out, and pass accumulate= to "
            f"{who.partition(':')[0]}."
        )
    rate = schedule(optimizer)
    if isinstance(rate, ByAttempts) and rate.loss_scaler is not loss_scaler:
        raise scaler.InvalidArgument(
            f"{who}: the optimizer's ByAttempts counts the attempts of another loss scaler: expected the one "
            "that is passed as loss_scaler=."
        )


def check_accumulate(accumulate: object, last_window: object) -> None:
    """Refuses windows that are no number and no schedule, and a last window that nothing can end."""
    if isinstance(accumulate, Mapping):
        counts = all(is_count(applied, 0) and is_count(size) for applied, size in accumulate.items())
        if not counts or 0 not in accumulate:
            raise scaler.InvalidArgument(
                f"TrainStep(accumulate={dict(accumulate)!r}): expected micro-batches per step by the number of applied "
                "steps from which they hold, from 0 on, such as {0: 1, 1000: 4}."
            )
    else:
        check_count(f"TrainStep(accumulate={accumulate!r})", accumulate)
    if last_window not in ("keep", "apply"):
        raise scaler.InvalidArgument(f'TrainStep(last_window={last_window!r}): expected "keep" or "apply".')
    if last_window == "apply" and accumulate == 1:
        raise scaler.InvalidArgument(
            'TrainStep(last_window="apply"): without accumulate= each batch is a window of its own. Leave it out, or '
            "pass accumulate=4."
        )


def check_parts(model: object, loss_fn: object) -> None:
    """Refuses arguments of the wrong kind."""
    if not isinstance(model, keras.Model):
        raise scaler.InvalidArgument(
            f"TrainStep(model={model!r}): expected a keras.Model. For anything else write the step yourself: any "
            "callable from a batch to a dict of scalar tensors is a train step."
        )
    if not callable(loss_fn):
        raise scaler.InvalidArgument(
            f"TrainStep(loss_fn={loss_fn!r}): expected a function of (y, prediction), or the name of a Keras loss such "
            f"as 'mse'.{scaler.authoring.did_you_mean(loss_fn, LOSSES)}"
        )
