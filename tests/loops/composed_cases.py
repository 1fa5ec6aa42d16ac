"""Two players whose losses depend on each other: a `ComposedStep` of them, and the same step by hand."""

import keras
import numpy as np
import tensorflow as tf
from models import batch, normalized, one_layer, squared_error

import loops
import scaler

SHAPES = ("turns", "shared", "one scaler")


def batches(count, bad=(), size=8):
    """Batches of x, y and what the actor's loss is multiplied by.

    Args:
        count: How many.
        bad: Pairs of the number of a batch, from 1, and the part whose loss is infinite in it.
        size: Rows of each.
    """
    bad = dict(bad)
    for number in range(1, count + 1):
        x, y = batch(number, size)
        y[0] = np.inf if bad.get(number) == "critic" else y[0]
        push = np.float32(np.inf if bad.get(number) == "actor" else 1.0)
        yield x, y, np.full([size, 1], push)


def dataset(count, **arguments):
    return tf.data.Dataset.from_tensor_slices(
        tuple(np.stack(part) for part in zip(*batches(count, **arguments), strict=True))
    )


def dynamic():
    return scaler.Dynamic(2.0**6)


def float32(tensor):
    return tf.cast(tensor, tf.float32)


class Players:
    """A critic, and an actor with BatchNorm and dropout.

    Args:
        shape: One of `SHAPES`.
        kind: The dtype policy.
        every: How often it is the actor's turn.
        strategy: Makes the strategy of each scaler.
        dropout: Of the actor; XLA draws other numbers.
        clip_norm: Of the actor.
        momentum: With which the actor has a teacher, or None for none.
        arguments: Further ones of the `ComposedStep`.
    """

    def __init__(
        self,
        shape="turns",
        kind="float32",
        every=1,
        strategy=dynamic,
        dropout=0.25,
        clip_norm=None,
        momentum=None,
        **arguments,
    ):
        self.shape, self.every, self.clip_norm = shape, every, clip_norm
        self.critic, self.actor = one_layer(kind), normalized(kind, dropout)
        self.optimizers = {name: keras.optimizers.SGD(0.1, momentum=0.9) for name in ("critic", "actor")}
        self.teacher = normalized(kind, dropout) if momentum is not None else None
        shared = shape == "one scaler"
        own = {} if shared else {name: scaler.LossScaler(strategy(), name=name) for name in self.optimizers}
        parts = [
            loops.Part(
                "critic", self.critic, self.critic_loss, self.optimizers["critic"], loss_scaler=own.get("critic")
            ),
            loops.Part(
                "actor",
                self.actor,
                self.actor_loss,
                self.optimizers["actor"],
                loss_scaler=own.get("actor"),
                every=every,
                clip_norm=clip_norm,
                teacher=self.teacher,
                momentum=0.5 if momentum is None else momentum,
            ),
        ]
        arguments |= {"loss_scaler": scaler.LossScaler(strategy())} if shared else {}
        self.step = loops.ComposedStep(parts, None if shape == "turns" else self.forward, **arguments)

    def forward(self, given):
        x, _, _ = given
        moved = x * float32(self.actor(x, training=True))
        return float32(self.critic(moved, training=True)), given

    def _seen(self, given):
        return self.forward(given) if self.shape == "turns" else given

    def critic_loss(self, given):
        value, (_, y, _) = self._seen(given)
        return squared_error(y, value), {"value": tf.reduce_mean(value)}

    def actor_loss(self, given):
        value, (_, _, push) = self._seen(given)
        return tf.reduce_mean(-value * push)

    def held(self, name):
        """What the step of one player moves, found without the code under test."""
        return [*self.weights(name), *getattr(self, name).non_trainable_variables]

    def weights(self, name):
        """Its weights, masters and slots."""
        weights, place = getattr(self, name).trainable_variables, ("critic", "actor").index(name)
        masters = [one for group in self.step.groups for one in group.masters][place]
        return [*weights, *self.optimizers[name].variables, *(masters.weights if masters else ())]

    def variables(self):
        scalers = {id(one): one for one in self.step.scalers.values()}.values()
        return [*self.held("critic"), *self.held("actor"), *(v for one in scalers for v in one.variables)]


class ByHand(Players):
    """The same in float32, without a scaler, written down."""

    def take(self, given, number, skipped=()):
        """Takes the step of this number, from 1, but for the parts that a fault skips. Returns the losses."""
        shared, losses = self.shape != "turns", {}
        before = [variable.numpy() for variable in self.actor.non_trainable_variables]
        with tf.GradientTape(persistent=True) as tape:
            seen = self.forward(given) if shared else given
            losses["critic"], _ = self.critic_loss(seen)
            losses["actor"] = self.actor_loss(seen) if shared else None
        grads = tape.gradient(losses["actor"], self.actor.trainable_variables) if shared else None
        if "critic" in skipped and not shared:
            self._put_back(before)
        if "critic" not in skipped:
            weights = self.critic.trainable_variables
            self.optimizers["critic"].apply(tape.gradient(losses["critic"], weights), weights)
        if number % self.every:
            return losses
        if not shared:
            before = [variable.numpy() for variable in self.actor.non_trainable_variables]
            with tf.GradientTape() as tape:
                losses["actor"] = self.actor_loss(given)
            grads = tape.gradient(losses["actor"], self.actor.trainable_variables)
        if "actor" in skipped:
            self._put_back(before)
            return losses
        if self.clip_norm:
            grads, _ = tf.clip_by_global_norm(grads, self.clip_norm)
        self.optimizers["actor"].apply(grads, self.actor.trainable_variables)
        return losses

    def _put_back(self, before):
        for variable, value in zip(self.actor.non_trainable_variables, before, strict=True):
            variable.assign(value)
