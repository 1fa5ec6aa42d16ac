"""Proposes changes that may help a step, from where its failure began.

Proposes a guarded denominator for a division by 0 or by almost 0.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaler
from loops.backend.variables import cast_with_mask
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.learning_rates import lower_rates, of_part
from loops.diagnose.explain.remedies import Kind, Proposal
from loops.diagnose.graph.changes import (
    APART,
    in_policy,
    moved_away,
    slower,
    with_changed_inputs,
    with_finite_gradient,
    with_value,
    zeroed,
)
from loops.diagnose.graph.models import optimizers_of
from loops.diagnose.graph.origin import Frame
from loops.step.train_step import TrainStep
from loops.support.batches import parts

_LARGE = 3e4
_EXPONENTIALS = ("Exp", "Expm1", "Sinh", "Cosh")
_BOUND = 5.0
"""The bound of an exponent: exp(5) is 148, and float16 can hold sums and squares of that."""


def proposals(
    attempts: Attempts,
    layers: Mapping[str, keras.layers.Layer],
    origin: str | None,
    nearest: str | None,
    *,
    singular: bool,
    order: Sequence[str] = (),
    operation: Frame | None = None,
) -> list[Proposal]:
    """The proposals for a step, in the order in which they are tried.

    Args:
        attempts: The attempts at the step.
        layers: The layers of the model, by path.
        origin: The path of the layer where the failure began, or None.
        nearest: The path of the closest layer before it, if it began in none.
        singular: Whether the value is not finite in float32 either.
        order: The paths of the layers in the order of the forward pass.
        operation: The tensor where it began, or the forward tensor of that gradient; None if it cannot be the cause.
    """
    found = []
    paths = list(dict.fromkeys(path for path in (origin, nearest) if path))
    for path in paths:
        found += _layer_proposals(path, layers[path])
    if operation is not None:
        found += division_proposals(operation, operation.layer)
        found += _exponential_proposals(operation, attempts, layers)
    for path in paths if singular else ():
        found += _singular_point_proposals(path, layers[path])
    narrow = [layer for layer in layers.values() if layer.compute_dtype in ("float16", "bfloat16")]
    found += _loss_proposals(attempts, singular=singular)
    following = _layers_from(origin or nearest, layers, order)
    if len(following) > 1:
        found.append(
            Proposal(
                Kind.FOLLOWING_IN_FLOAT32,
                f"{origin or nearest!r} and all after it in float32",
                f"Give the layer {origin or nearest!r} and those after it dtype='float32'. `halfstep lab cure` finds "
                "the fewest that need it.",
                lambda: in_policy(following, "float32"),
                layer=origin or nearest,
            )
        )
    if narrow:
        found.append(
            Proposal(
                Kind.ALL_IN_FLOAT32,
                "every layer in float32",
                "Compute in float32: keras.mixed_precision.set_dtype_policy('float32'). `halfstep lab cure` finds the "
                "fewest layers that need it.",
                lambda: in_policy(narrow, "float32"),
            )
        )
    if any(layer.compute_dtype == "float16" for layer in narrow):
        found.append(
            Proposal(
                Kind.BFLOAT16,
                "bfloat16",
                "Train in bfloat16, which has float32's range: the policy 'mixed_bfloat16', with hs.NoScaling().",
                lambda: in_policy(narrow, "mixed_bfloat16"),
            )
        )
    found += _state_proposals(attempts)
    if attempts.moment.next_batch is not None:
        found.append(
            Proposal(
                Kind.ANOTHER_BATCH,
                "another batch",
                "Leave this batch out, and check its contents.",
                batch=attempts.moment.next_batch,
            )
        )
    return found


def _layers_from(
    path: str | None, layers: Mapping[str, keras.layers.Layer], order: Sequence[str]
) -> list[keras.layers.Layer]:
    """The 16-bit layers from one layer on, in the order of the forward pass, with the inner layers of the first."""
    if path is None or path not in order:
        return []
    after = [
        *scaler.observe.layers_of(layers[path]),
        *(layers[one] for one in order[order.index(path) :] if one in layers),
    ]
    return [one for one in dict.fromkeys(after) if one.compute_dtype in ("float16", "bfloat16")]


def _layer_proposals(path: str, layer: keras.layers.Layer) -> list[Proposal]:
    found = []
    inside = scaler.observe.layers_of(layer)
    if any(one.compute_dtype in ("float16", "bfloat16") for one in inside):
        found.append(
            Proposal(
                Kind.LAYER_IN_FLOAT32,
                f"{path!r} in float32",
                f"Give the layer {path!r} dtype='float32'.",
                lambda: in_policy(inside, "float32"),
                layer=path,
            )
        )
    for one in inside:
        for name, value in unfit_values(one):
            new = _fit(value)
            found.append(
                Proposal(
                    Kind.NUMBER_OF_A_LAYER,
                    f"{name}={new:g} in {one.name!r}",
                    f"{one.compute_dtype} cannot hold {name}={value:g} of the layer {one.name!r}: use {new:g}.",
                    functools.partial(with_value, one, name, new),
                )
            )
    return found


def _exponential_proposals(
    frame: Frame, attempts: Attempts, layers: Mapping[str, keras.layers.Layer]
) -> list[Proposal]:
    """A proposal to clip the exponent, if the failure began in an exponential; else nothing."""
    if frame.kind not in _EXPONENTIALS:
        return []
    bounds = f"[{-_BOUND:g}, {_BOUND:g}]"
    if frame.layer in layers:
        return [
            Proposal(
                Kind.EXPONENT_CLIPPED,
                f"inputs of {frame.layer!r} clipped to {bounds}",
                f"The exponent in {frame.layer!r} has no bound: clip it to {bounds}, for example with keras.ops.clip.",
                lambda: with_changed_inputs(layers[str(frame.layer)], _bounded),
            )
        ]
    step = attempts.moment.train_step
    advice = f"The exponent in the loss has no bound: clip it to {bounds}, for example with keras.ops.clip."
    name = f"predictions clipped to {bounds}"
    if not isinstance(step, TrainStep):
        return []
    return [Proposal(Kind.EXPONENT_CLIPPED, name, advice, _with_predictions(step, _bounded))]


def _bounded(value: Any) -> Any:
    if not (tf.is_tensor(value) and value.dtype.is_floating):
        return value
    return tf.clip_by_value(value, tf.cast(-_BOUND, value.dtype), tf.cast(_BOUND, value.dtype))


def _with_predictions(step: TrainStep, change: Callable) -> Callable:
    """A function that returns the context in which a function is applied to the predictions before the loss."""
    loss_fn = step.loss_fn

    def loss(labels: Any, prediction: Any, *rest: Any) -> Any:
        return loss_fn(labels, tf.nest.map_structure(change, prediction), *rest)

    return lambda: with_value(step, "loss_fn", loss)


def _singular_point_proposals(path: str, layer: keras.layers.Layer) -> list[Proposal]:
    return [
        Proposal(
            Kind.INPUTS_MOVED,
            f"inputs of {path!r} moved by {APART:g}",
            f"{path!r} computes something that has no value at this input: keep the input away from it, for example by "
            f"adding {APART:g} under a square root, logarithm, division or norm.",
            lambda: with_changed_inputs(layer, moved_away),
        ),
        Proposal(
            Kind.DERIVATIVES_ZEROED,
            f"derivatives of {path!r} that are not finite set to zero",
            f"The derivative of {path!r} has no value at this input, as that of a square root, norm or division at 0: "
            f"add {APART:g} there, or choose another value with tf.where before the operation and after it.",
            lambda: with_changed_inputs(layer, with_finite_gradient),
        ),
    ]


def unfit_values(layer: keras.layers.Layer) -> list[tuple[str, float]]:
    """The layer's numeric attributes, such as epsilon, that become 0, 1 or infinity in its 16-bit compute dtype."""
    dtype = layer.compute_dtype
    if dtype not in ("float16", "bfloat16"):
        return []
    found = []
    for name, value in vars(layer).items():
        if name.startswith("_") or not isinstance(value, float) or not math.isfinite(value) or value in (0.0, 1.0):
            continue
        held = float(tf.cast(tf.constant(value, tf.float64), dtype))
        # A large negative number is a mask. The layer may need a large positive one as it is.
        if held in (0.0, 1.0) or (not math.isfinite(held) and value < 0):
            found.append((name, value))
    return found


def _fit(value: float) -> float:
    if abs(value) > _LARGE:
        return math.copysign(_LARGE, value)
    return 1.0 - APART if value > 0.5 else math.copysign(APART, value)


def _loss_proposals(attempts: Attempts, *, singular: bool) -> list[Proposal]:
    step = attempts.moment.train_step
    if not isinstance(step, TrainStep):
        return []
    clipped = Proposal(
        Kind.PREDICTIONS_CLIPPED,
        f"predictions clipped to [{APART:g}, {1 - APART:g}]",
        "The loss has no value at a probability of 0 or 1: compute it from logits, or clip it to bounds that the "
        "format can represent.",
        _with_predictions(
            step, lambda one: tf.clip_by_value(one, tf.cast(APART, one.dtype), tf.cast(1 - APART, one.dtype))
        ),
    )
    found = [
        Proposal(
            Kind.LOSS_IN_FLOAT32,
            "the loss in float32",
            "Cast the predictions to float32 before the loss.",
            _with_predictions(step, lambda one: cast_with_mask(one, tf.float32) if one.dtype.is_floating else one),
        )
    ]
    if singular:
        found += [
            Proposal(
                Kind.PREDICTIONS_MOVED,
                f"predictions moved by {APART:g}",
                "The loss or its derivative has no value at this prediction: keep the prediction away from it, for "
                f"example by adding {APART:g} under a logarithm or square root.",
                _with_predictions(step, moved_away),
            ),
            *([clipped] if _are_probabilities(attempts) else []),
            Proposal(
                Kind.DERIVATIVES_ZEROED,
                "derivatives of the loss that are not finite set to zero",
                "The derivative of the loss has no value at this prediction: choose another value with tf.where before "
                "the operation and after it.",
                _with_predictions(step, with_finite_gradient),
            ),
        ]
    return found


def _are_probabilities(attempts: Attempts) -> bool:
    """Whether the model's outputs for the batch lie between 0 and 1."""
    x, _, _ = parts(attempts.moment.batch)
    given = [np.asarray(tf.cast(one, tf.float32)) for one in tf.nest.flatten(attempts.moment.train_step.model(x))]
    return all(((one >= 0.0) & (one <= 1.0)).all() for one in given)


def update_proposals(attempts: Attempts) -> list[Proposal]:
    """Proposals for an optimizer that turns finite gradients into non-finite values: that of the part that failed."""
    step = attempts.moment.train_step
    optimizers = optimizers_of(step, attempts.part)
    whose, optimizer = next(((of_part(name), one) for name, one in optimizers.items()), ("", None))
    found = []
    for rate in lower_rates(optimizer, whose) if optimizer is not None else ():
        change = functools.partial(slower, optimizer, rate.part)
        found.append(Proposal(Kind.LEARNING_RATE, rate.name, rate.advice, change))
    epsilon = getattr(optimizer, "epsilon", None)
    if isinstance(epsilon, float):
        found.append(
            Proposal(
                Kind.EPSILON,
                f"epsilon={APART:g} in the optimizer{whose}",
                f"Create the optimizer with epsilon={APART:g}: {epsilon:g} is too small for it, or for 16 bits.",
                lambda: with_value(optimizer, "epsilon", APART),
            )
        )
    if isinstance(step, TrainStep) and step.clip_norm is None:
        advice = "Clip the gradients, for example with clip_norm=1.0."
        found.append(Proposal(Kind.CLIP_NORM, "clip_norm=1", advice, lambda: with_value(step, "clip_norm", 1.0)))
    return found


def _state_proposals(attempts: Attempts) -> list[Proposal]:
    """A proposal to clear the step's own variables, such as sums that were never reset."""
    own = attempts.own_variables
    if not own:
        return []
    names = ", ".join(one.name.split(":")[0] for one in own[:3])
    return [
        Proposal(
            Kind.OWN_VARIABLES_CLEARED,
            "the step's own variables set to zero",
            f"Check how the step updates its own variables: {names}. Clear sums after each update.",
            lambda: zeroed(own),
        )
    ]


_DIVISION = "RealDiv"
_OPERATORS = ("__truediv__", "__rtruediv__")


def division_proposals(frame: Frame, path: str | None) -> list[Proposal]:
    """A proposal to move the denominator, if the failure began in a division; else nothing.

    Args:
        frame: The tensor where it began, or the forward tensor if it began in a gradient.
        path: The path of the layer, or None for the loss and the step itself.
    """
    if frame.kind != _DIVISION:
        return []
    place = "the loss or the step" if path is None else repr(path)
    advice = (
        f"{place[0].upper()}{place[1:]} divides by 0, or by almost 0: move the denominator away from 0 by {APART:g}, "
        "or use tf.math.divide_no_nan."
    )
    name = f"denominator in {place} moved by {APART:g}"
    return [Proposal(Kind.DENOMINATOR, name, advice, lambda: guarded(frame.name), layer=path)]


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Moves the denominator of one division by `APART`, away from 0, while a graph is traced.

    Args:
        name: The name of the quotient's tensor.
    """
    own = {operator: getattr(tf.Tensor, operator) for operator in _OPERATORS}
    try:
        for operator, divide in own.items():
            setattr(tf.Tensor, operator, _guarded(divide, name, reflected=operator == "__rtruediv__"))
        yield
    finally:
        for operator, divide in own.items():
            setattr(tf.Tensor, operator, divide)


def _guarded(divide: Callable, name: str, *, reflected: bool) -> Callable:
    def guarded(one: Any, other: Any) -> Any:
        quotient = divide(one, other)
        if not tf.is_symbolic_tensor(quotient) or quotient.name != name:
            return quotient
        return divide(_moved(one, quotient.dtype), other) if reflected else divide(one, _moved(other, quotient.dtype))

    return guarded


def _moved(denominator: Any, dtype: tf.DType) -> tf.Tensor:
    denominator = tf.convert_to_tensor(denominator, dtype)
    apart = tf.cast(APART, dtype)
    return denominator + tf.where(denominator < 0, -apart, apart)
