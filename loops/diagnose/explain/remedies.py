"""The remedies for a failed step, one row for each: its kind, name and advice, when it applies, and the change."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from loops.backend.variables import cast_with_mask
from loops.diagnose.explain.case import Case, Words, lower_rates, narrow_of, unfit_numbers
from loops.diagnose.graph.changes import (
    APART,
    in_policy,
    moved_away,
    scheduled,
    slower,
    with_changed_inputs,
    with_finite_gradient,
    with_value,
)
from loops.step.train_step import TrainStep


class Kind(str, enum.Enum):
    """What a remedy changes. Decisions depend on this kind, never on a remedy's name."""

    LOSS_SCALE = "loss_scale"
    LAYER_IN_FLOAT32 = "layer_in_float32"
    FOLLOWING_IN_FLOAT32 = "following_in_float32"
    ALL_IN_FLOAT32 = "all_in_float32"
    LOSS_IN_FLOAT32 = "loss_in_float32"
    BFLOAT16 = "bfloat16"
    NUMBER_OF_A_LAYER = "number_of_a_layer"
    DENOMINATOR = "denominator"
    EXPONENT_CLIPPED = "exponent_clipped"
    PREDICTIONS_CLIPPED = "predictions_clipped"
    INPUTS_MOVED = "inputs_moved"
    PREDICTIONS_MOVED = "predictions_moved"
    DERIVATIVES_ZEROED = "derivatives_zeroed"
    """It makes a step pass without removing the cause."""
    OWN_VARIABLES_CLEARED = "own_variables_cleared"
    ANOTHER_BATCH = "another_batch"
    LEARNING_RATE = "learning_rate"
    WEIGHT_DECAY = "weight_decay"
    EPSILON = "epsilon"
    CLIP_NORM = "clip_norm"


IN_PLACE = (Kind.LAYER_IN_FLOAT32, Kind.FOLLOWING_IN_FLOAT32)
"""More precision where the failure began."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A remedy and the result of the step with it.

    Attributes:
        kind: What was changed.
        name: The change as a short phrase.
        tried: Whether the step could be run with it.
        finite: Whether loss and gradients were finite with it.
        loss: The loss of the step with it, or NaN if unknown.
        advice: What to change in the program, as a sentence.
        at_scale: The lower loss scale that it needs as well, or None.
        gradients_left: The number of non-zero gradient values with it, as a share of the most that any remedy leaves.
            None if unknown, and for another batch.
        loss_ratio: The magnitude of the loss over the usual one, which is the median of the earlier applied steps, or
            without any the smallest loss that a remedy gives. None if unknown.
        helps: Whether the step is finite with it, and trains.
        why_not: Why it does not help although the step is finite, or None.
        layer: The path of the layer that was changed, or None.
        since_checkpoint: Whether all steps since the checkpoint were replayed with the change.
    """

    kind: Kind
    name: str
    tried: bool
    finite: bool
    loss: float
    advice: str
    at_scale: float | None = None
    gradients_left: float | None = None
    loss_ratio: float | None = None
    helps: bool = False
    why_not: str | None = None
    layer: str | None = None
    since_checkpoint: bool = False


class Row(NamedTuple):
    """A remedy. In its templates `it` is the `Case`, as in its functions, and `each` may add words.

    Attributes:
        kind: What it changes.
        name: The change as a short phrase, a template.
        advice: What to change in the program, as a sentence, likewise.
        change: The context manager of the change; something false if the remedy does not apply.
        each: The further words for each thing to change, if there may be several. `change` gets them, too.
        layer: The path of the layer that it changes, or None.
    """

    kind: Kind
    name: str
    advice: str
    change: Callable[..., Any]
    each: Callable[[Case], Iterable[Words]] = lambda it: [{}]
    layer: Callable[[Case], Any] = lambda it: None


def _with_predictions(step: TrainStep, change: Callable) -> contextlib.AbstractContextManager[None]:
    """Applies a function to the predictions before the loss."""
    loss_fn = step.loss_fn

    def loss(labels: Any, prediction: Any, *rest: Any) -> Any:
        return loss_fn(labels, tf.nest.map_structure(change, prediction), *rest)

    return with_value(step, "loss_fn", loss)


def _bounded(value: Any, low: float = -5.0, high: float = 5.0) -> Any:
    """A tensor within bounds: exp(5) is 148, and float16 can hold sums and squares of that."""
    if not (tf.is_tensor(value) and value.dtype.is_floating):
        return value
    return tf.clip_by_value(value, tf.cast(low, value.dtype), tf.cast(high, value.dtype))


def _inside_0_and_1(value: tf.Tensor) -> tf.Tensor:
    return _bounded(value, APART, 1 - APART)


def _wide(value: tf.Tensor) -> tf.Tensor:
    return cast_with_mask(value, tf.float32) if value.dtype.is_floating else value


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Moves the denominator of one division by `APART`, away from 0, while a graph is traced.

    Args:
        name: The name of the quotient's tensor.
    """
    with contextlib.ExitStack() as stack:
        for operator in ("__truediv__", "__rtruediv__"):
            divide = _guarded(getattr(tf.Tensor, operator), name, reflected=operator == "__rtruediv__")
            stack.enter_context(with_value(tf.Tensor, operator, divide))
        yield


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


def _cleared_before_each(owner: Any, name: str, own: Sequence[tf.Variable]) -> contextlib.AbstractContextManager[None]:
    """Sets variables to zero before each step that an attribute of an object takes."""
    take = getattr(owner, name)

    def cleared(batch: Any) -> Any:
        for one in own:
            one.assign(tf.zeros_like(one))
        return take(batch)

    return with_value(owner, name, cleared)


AT_THE_STEP = (
    Row(
        Kind.LAYER_IN_FLOAT32,
        "{it.path!r} in float32",
        "Give the layer {it.path!r} dtype='float32'.",
        lambda it: narrow_of(it.inside) and in_policy(it.inside, "float32"),
        layer=lambda it: it.path,
    ),
    Row(
        Kind.NUMBER_OF_A_LAYER,
        "{number}={fit:g} in {owner.name!r}",
        "{owner.compute_dtype} cannot hold {number}={value:g} of the layer {owner.name!r}: use {fit:g}.",
        lambda it, owner, number, value, fit: with_value(owner, number, fit),
        unfit_numbers,
    ),
    Row(
        Kind.DENOMINATOR,
        "denominator in {it.place} moved by 0.001",
        "{it.begin} divides by 0, or by almost 0: move the denominator away from 0 by 0.001, or use "
        "tf.math.divide_no_nan.",
        lambda it: it.operation is not None and it.operation.kind == "RealDiv" and guarded(it.operation.name),
        layer=lambda it: it.operation and it.operation.layer,
    ),
    Row(
        Kind.EXPONENT_CLIPPED,
        "inputs of {it.exponential_in!r} clipped to [-5, 5]",
        "The exponent in {it.exponential_in!r} has no bound: clip it to [-5, 5], for example with keras.ops.clip.",
        lambda it: it.exponential_in and with_changed_inputs(it.attempts.layers[it.exponential_in], _bounded),
    ),
    Row(
        Kind.EXPONENT_CLIPPED,
        "predictions clipped to [-5, 5]",
        "The exponent in the loss has no bound: clip it to [-5, 5], for example with keras.ops.clip.",
        lambda it: it.exponential_in == "" and it.step and _with_predictions(it.step, _bounded),
    ),
    Row(
        Kind.INPUTS_MOVED,
        "inputs of {it.path!r} moved by 0.001",
        "{it.path!r} computes something that has no value at this input: keep the input away from it, for example by "
        "adding 0.001 under a square root, logarithm, division or norm.",
        lambda it: it.singular and it.inside and with_changed_inputs(it.inside[0], moved_away),
    ),
    Row(
        Kind.DERIVATIVES_ZEROED,
        "derivatives of {it.path!r} that are not finite set to zero",
        "The derivative of {it.path!r} has no value at this input, as that of a square root, norm or division at 0: "
        "add 0.001 there, or choose another value with tf.where before the operation and after it.",
        lambda it: it.singular and it.inside and with_changed_inputs(it.inside[0], with_finite_gradient),
    ),
    Row(
        Kind.LOSS_IN_FLOAT32,
        "the loss in float32",
        "Cast the predictions to float32 before the loss.",
        lambda it: it.step and _with_predictions(it.step, _wide),
    ),
    Row(
        Kind.PREDICTIONS_MOVED,
        "predictions moved by 0.001",
        "The loss or its derivative has no value at this prediction: keep the prediction away from it, for example by "
        "adding 0.001 under a logarithm or square root.",
        lambda it: it.singular and it.step and _with_predictions(it.step, moved_away),
    ),
    Row(
        Kind.PREDICTIONS_CLIPPED,
        "predictions clipped to [0.001, 0.999]",
        "The loss has no value at a probability of 0 or 1: compute it from logits, or clip it to bounds that the "
        "format can represent.",
        lambda it: it.singular and it.gives_probabilities and _with_predictions(it.step, _inside_0_and_1),
    ),
    Row(
        Kind.DERIVATIVES_ZEROED,
        "derivatives of the loss that are not finite set to zero",
        "The derivative of the loss has no value at this prediction: choose another value with tf.where before the "
        "operation and after it.",
        lambda it: it.singular and it.step and _with_predictions(it.step, with_finite_gradient),
    ),
    Row(
        Kind.FOLLOWING_IN_FLOAT32,
        "{it.path!r} and all after it in float32",
        "Give the layer {it.path!r} and those after it dtype='float32'. `halfstep lab cure` finds the fewest that need "
        "it.",
        lambda it: len(it.following) > 1 and in_policy(it.following, "float32"),
        layer=lambda it: it.path,
    ),
    Row(
        Kind.ALL_IN_FLOAT32,
        "every layer in float32",
        "Compute in float32: keras.mixed_precision.set_dtype_policy('float32'). `halfstep lab cure` finds the fewest "
        "layers that need it.",
        lambda it: it.narrow and in_policy(it.narrow, "float32"),
    ),
    Row(
        Kind.BFLOAT16,
        "bfloat16",
        "Train in bfloat16, which has float32's range: the policy 'mixed_bfloat16', with hs.NoScaling().",
        lambda it: "float16" in {one.compute_dtype for one in it.narrow} and in_policy(it.narrow, "mixed_bfloat16"),
    ),
    Row(
        Kind.OWN_VARIABLES_CLEARED,
        "the step's own variables set to zero",
        "Check how the step updates its own variables: {it.own_names}. Clear sums after each update.",
        lambda it: it.attempts.own_variables and _cleared_before_each(it.attempts, "step", it.attempts.own_variables),
    ),
    Row(
        Kind.ANOTHER_BATCH,
        "another batch",
        "Leave this batch out, and check its contents.",
        lambda it: it.attempts.moment.next_batch is not None and contextlib.nullcontext(),
    ),
)
"""Tried at the failed step."""

OF_THE_UPDATE = (
    Row(
        Kind.LEARNING_RATE,
        "{factor:g} of the learning rate{of}",
        "Lower the learning rate{of} to {factor:g} of its value{to}.",
        lambda it, lowered, of, factor, to: slower(lowered, factor),
        lambda it: lower_rates(dict([*it.optimizers.items()][:1])),
    ),
    Row(
        Kind.EPSILON,
        "epsilon=0.001 in the optimizer{it.whose}",
        "Create the optimizer with epsilon=0.001: {it.epsilon:g} is too small for it, or for 16 bits.",
        lambda it: it.epsilon is not None and with_value(it.optimizer, "epsilon", 1e-3),
    ),
    Row(
        Kind.CLIP_NORM,
        "clip_norm=1",
        "Clip the gradients, for example with clip_norm=1.0.",
        lambda it: it.step and it.step.clip_norm is None and with_value(it.step, "clip_norm", 1.0),
    ),
)
"""Tried first if an optimizer turned finite gradients into non-finite values."""

_LOWER, _EPSILON, _CLIP = OF_THE_UPDATE
SINCE_THE_CHECKPOINT = (
    Row(
        Kind.LEARNING_RATE,
        "the learning rate{it.whose} kept at {it.rate_before:g}",
        "Keep the learning rate{it.whose} near {it.rate_before:g}.",
        lambda it: (
            math.isfinite(it.rate_before)
            and scheduled(it.optimizer, keras.optimizers.schedules.ExponentialDecay(it.rate_before, 1, 1.0))
        ),
    ),
    _LOWER._replace(each=lambda it: lower_rates(it.optimizers)),
    Row(
        Kind.WEIGHT_DECAY,
        "no weight decay{it.whose}",
        "Change the sign of weight_decay={it.decay:g}: a negative one makes the weights grow.",
        lambda it: it.decay < 0 and with_value(it.optimizer, "weight_decay", None),
    ),
    Row(
        Kind.WEIGHT_DECAY,
        "no weight decay{it.whose}",
        "Lower weight_decay={it.decay:g}: multiplied by the learning rate it must be well below 1.",
        lambda it: it.decay and not it.decay < 0 and with_value(it.optimizer, "weight_decay", None),
    ),
    _EPSILON._replace(
        advice="Create the optimizer with epsilon=0.001; in 16 bits a smaller one may be 0. Or use masters."
    ),
    _CLIP._replace(advice="Clip the gradients, for example with clip_norm=1."),
    Row(
        Kind.OWN_VARIABLES_CLEARED,
        "the step's own variables set to zero before each step",
        "Check how the step updates its own variables: {it.own_names}. Clear sums before each update.",
        lambda it: (
            it.attempts.own_variables and _cleared_before_each(it.attempts.moment, "take", it.attempts.own_variables)
        ),
    ),
)
"""Tried in all steps since the checkpoint if the weights may have diverged."""
