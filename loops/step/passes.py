"""The forward and backward pass of a step, and the repetition of both for a retry.

A retry repeats the forward pass inside of the branch that needs it: differentiating the first pass again would need its
activations, which the graph would then keep in every step until the decision, up to a third more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import scaler
from loops.backend.steps import has_effects, kinds_of_operations
from loops.step.losses import Loss, replica_count
from loops.step.probing import Probing, Seen, collect_all, unseen
from loops.step.user_steps import captured

Differentiate = Callable[[tf.Tensor], list]
_PYTHON = "EagerPyFunc"


class Role(NamedTuple):
    """A loss and what its gradients move, as a step is traced: a part of a `ComposedStep`, or all of a `TrainStep`.

    Attributes:
        name: Of the part.
        loss_scaler: Scales the loss.
        optimizer: Moves the variables.
        variables: The trainable ones.
        masters: Their masters, or None.
        models: Those whose own losses are added: weight regularisation, and what layers add.
        read: From what the forward pass returned to the loss.
        no_gradient: The message for a loss that gives no gradient.
        probing: Measures the passes.
        clip_norm: As for `scaler.LossScaler.apply`.
        clip: As for `apply`.
        allow_16bit_updates: As for `apply`.
        layerwise: Takes the gradients, each at the scale of its layers, or None.
    """

    name: str
    loss_scaler: scaler.LossScaler
    optimizer: Any
    variables: list
    masters: scaler.MasterWeights | None
    models: Sequence[keras.layers.Layer]
    read: Callable[[Any], Loss]
    no_gradient: str
    probing: Probing
    clip_norm: float | None
    clip: Any
    allow_16bit_updates: bool = False
    layerwise: scaler.layerwise.Layerwise | None = None


class Taken(NamedTuple):
    """The forward and backward pass of a role.

    Attributes:
        loss: Scalar float32, unscaled.
        extra: The scalars that the loss function returned with it.
        grads: Scaled gradients, or None.
        seen: What its probes measured; None without probes.
        weight: Of a `WeightedLoss`, scalar float32; else None.
        groups: What the groups of layers saw, with `layerwise`.
        again: From an output gradient to the same gradients, for a retry; None if they cannot be had from this pass.
    """

    loss: tf.Tensor
    extra: dict[str, tf.Tensor]
    grads: list
    seen: Seen | None = None
    weight: tf.Tensor | None = None
    groups: Any = None
    again: Differentiate | None = None


@scaler.authoring.no_autograph
def take(
    roles: Sequence[Role],
    forward: Callable[[], Any],
    length: int | tf.Tensor,
    *,
    turns: Sequence[tf.Tensor | bool],
    due: Sequence[tf.Tensor | None],
    again: bool = False,
) -> list[Taken]:
    """One forward pass, and the gradients of each role's loss; those of a role whose turn it is not are undefined.

    Args:
        roles: The roles that share the pass.
        forward: Returns what they read their losses from.
        length: Micro-batches of the window.
        turns: Whether it is the turn of each.
        due: Whether the probes of each measure this call; None for always.
        again: Whether the gradients may have to be taken from this pass a second time.
    """
    probings = {role.name: role.probing for role in roles}
    with tf.GradientTape(persistent=again or len(roles) > 1) as tape, collect_all(probings) as collections:
        result = forward()
        found = [role.read(result) for role in roles]
        losses = [_whole(one, role.models) for one, role in zip(found, roles, strict=True)]
        scaled = [
            # The scaler would remember a loss that is not finite until it decides, which it does at the next turn.
            role.loss_scaler.scale(_share(loss, length) if turn is True else tf.where(turn, _share(loss, length), 0.0))
            for role, loss, turn in zip(roles, losses, turns, strict=True)
        ]
    taken = []
    for place, role in enumerate(roles):
        collection = collections.get(role.name)
        if collection is not None:
            # In a shared pass it has also seen the gradients of the losses of other parts.
            collection.forget_gradients()
        grads, groups = _gradients(role, tape, scaled[place])
        seen = None if role.layerwise else role.probing.measured(collection, due[place])
        # A window checks that each micro-batch has the same gradients.
        if isinstance(length, int) and length == 1 and not role.layerwise:
            scaler.authoring.check_connected(role.loss_scaler, grads, role.variables)
        look = _looks_again(role, tape, scaled[place]) if again else None
        taken.append(Taken(losses[place], found[place].extra, grads, seen, found[place].weight, groups, look))
    return taken


def _gradients(role: Role, tape: tf.GradientTape, scaled: tf.Tensor) -> tuple[list, Any]:
    if role.layerwise:
        grads, groups = role.layerwise.gradient(tape, scaled, role.variables)
    else:
        grads, groups = tape.gradient(scaled, role.variables), None
    if all(grad is None for grad in grads):
        raise scaler.InvalidArgument(role.no_gradient)
    return grads, groups


def _looks_again(role: Role, tape: tf.GradientTape, scaled: tf.Tensor) -> Differentiate:
    @scaler.authoring.no_autograph
    def again(small: tf.Tensor) -> list:
        return tape.gradient(scaled, role.variables, output_gradients=small)

    return again


def _whole(found: Loss, models: Sequence[keras.layers.Layer]) -> tf.Tensor:
    """The loss in float32, plus the models' own losses; 0 for a batch with a weight of 0."""
    loss = tf.cast(found.mean, tf.float32)
    for penalty in penalties(models):
        loss += tf.cast(penalty, tf.float32)
    return loss if found.weight is None else loss * tf.cast(tf.not_equal(found.weight, 0.0), tf.float32)


def _share(loss: tf.Tensor, length: int | tf.Tensor) -> tf.Tensor:
    """Of the mean over micro-batches and replicas, whose gradients are summed."""
    count = length * replica_count()
    return loss / (count if isinstance(count, int) else tf.cast(count, loss.dtype))


def repeat(
    roles: Sequence[Role],
    own: Sequence[Role],
    forward: Callable[[], Any],
    length: int | tf.Tensor,
    loss_scale: tf.Tensor,
) -> tuple[Differentiate | None, bool]:
    """From an output gradient to the gradients of some roles, with a forward pass as the one that is taken next.

    All variables that the pass moves are put back before it, and are left as they are then: statistics, seeds, random
    generators, metrics, on several replicas those of this one. Called just before a pass is taken, and traced here, so
    that what the pass moves is known by then. It needs nothing of the pass itself, which may be inside of a branch.

    Args:
        roles: All that share the pass.
        own: Those whose gradients are wanted, with one scaler.
        forward: Returns what they read their losses from.
        length: Micro-batches of the window.
        loss_scale: Of that scaler, as the pass will find it.

    Returns:
        The function, and whether the gradients may be taken from the first pass instead. The function is None in eager
        mode, where nothing is traced, and for a pass with an effect that cannot be undone: one that prints, draws from
        an iterator or fills a table. A pass that calls Python can be differentiated only once.
    """
    if tf.executing_eagerly():
        return None, True
    wanted = {role.name for role in own}

    @scaler.authoring.no_autograph
    def differentiate(small: tf.Tensor) -> list:
        with tf.GradientTape(persistent=True) as tape:
            result = forward()
            # Also those of the others: where several loss functions call one Dropout, each moves its seed.
            losses = [(role, _whole(role.read(result), role.models)) for role in roles]
            scaled = [(role, _share(loss, length) * loss_scale) for role, loss in losses if role.name in wanted]
        found = [tape.gradient(loss, role.variables, output_gradients=small) for role, loss in scaled]
        return [grad for grads in found for grad in grads]

    concrete = scaler.authoring.nested(differentiate).get_concrete_function(tf.TensorSpec([], tf.float32))
    if has_effects(concrete):
        return None, _PYTHON not in kinds_of_operations(concrete)
    before = scaler.snapshot([variable for variable, assigned in captured(concrete) if assigned])

    @scaler.authoring.no_autograph
    def again(small: tf.Tensor) -> list:
        now = scaler.snapshot(before.variables)
        before.restore()
        grads = concrete(small)
        now.restore()
        return list(grads)

    return again, False


@scaler.authoring.no_autograph
def take_if(turn: tf.Tensor, take_pass: Callable[[], Taken]) -> Taken:
    """What `take_pass` returns in a part's turn; else nothing is computed, numbers are NaN, gradients and counts 0.

    So is what probes measure: NaN, but for counts and largest magnitudes, which are 0.

    Args:
        turn: Scalar bool.
        take_pass: The forward and backward pass of a part.
    """
    found: list[Taken] = []

    @scaler.authoring.no_autograph
    def taken() -> tuple[tf.Tensor, list, list, list]:
        found[:] = [take_pass()]
        (one,) = found
        return one.loss, list(one.extra.values()), [grad for grad in one.grads if grad is not None], _tensors(one.seen)

    @scaler.authoring.no_autograph
    def left_out() -> tuple[tf.Tensor, list, list, list]:
        extra = [nothing(value.dtype) for value in found[0].extra.values()]
        grads = [_zeros(grad) for grad in found[0].grads if grad is not None]
        return nothing(tf.float32), extra, grads, _tensors(unseen(found[0].seen))

    loss, extra, grads, seen = tf.cond(turn, taken, left_out)
    rest = iter(grads)
    whole = [None if grad is None else next(rest) for grad in found[0].grads]
    measured = None if not seen else Seen(scaler.observe.Measured(*seen[:2]), *(seen[2:] or [None]))
    return Taken(loss, dict(zip(found[0].extra, extra, strict=True)), whole, measured)


def nothing(dtype: tf.DType) -> tf.Tensor:
    """What a part returns as a scalar where it is not its turn."""
    return tf.constant(float("nan"), dtype) if dtype.is_floating else tf.zeros([], dtype)


def _tensors(seen: Seen | None) -> list[tf.Tensor]:
    return [] if seen is None else [one for one in (*seen.rows, seen.attention) if one is not None]


def _zeros(grad: tf.Tensor | tf.IndexedSlices) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values, indices = tf.zeros([0, *grad.values.shape[1:]], grad.dtype), tf.zeros([0], grad.indices.dtype)
        shape = None if grad.dense_shape is None else tf.constant(grad.shape.as_list(), grad.dense_shape.dtype)
        return tf.IndexedSlices(values, indices, shape)
    return tf.zeros(grad.shape, grad.dtype)


def replicas_meet(models: Sequence[keras.layers.Layer]) -> bool:
    """Whether replicas wait for each other in a pass, which would hang in the branch of a retry or of a turn."""
    layers = [layer for model in models for layer in scaler.observe.layers_of(model)]
    return replica_count() > 1 and any(getattr(layer, "synchronized", False) for layer in layers)


def penalties(models: Sequence[keras.layers.Layer]) -> list[tf.Tensor]:
    """The own losses of several models, each once: those of a layer that several of them share, too.

    Args:
        models: Models and layers, of which one may be in another.
    """
    inside = [id(layer) for model in models for layer in scaler.observe.layers_of(model)]
    if len(set(inside)) == len(inside):
        return [loss for model in models for loss in model.losses]
    # Keras counts the layers and the weights in a layer once.
    around = keras.layers.Layer(name="around")
    around.models = list(models)
    return around.losses
