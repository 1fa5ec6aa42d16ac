"""Steps that people write, right and wrong, each with what should be said of it: "ok", "warn" or "wrong".

A program makes the function to trace, and its arguments, from a `World`. Names say what it does.
"""

import keras
import numpy as np
import tensorflow as tf
from mirrored import mirrored as replicas_of

import scaler
from scaler import gradients
from scaler.gate.gate import Decision, Gate
from scaler.outcome.outcome import Skip, not_skipped

PROGRAMS = []
LOOPS = {"window_in_a_loop"}
"""Those that AutoGraph has to convert."""


def program(right):
    def add(f):
        PROGRAMS.append((f.__name__, right, f))
        return f

    return add


ok, wrong = program("ok"), program("wrong")


def trace_no_branches(monkeypatch):
    """Has no step decide: what is said of it is said before, and a test of that need not trace the rest."""
    monkeypatch.setattr(Gate, "_decide", _moves_always)


def _moves_always(self, strategy, grads, loss_finite, state, when, losses, count):
    """In place of `Gate._decide`. Weights and scale move as ever: what is said of the next calls depends on that."""
    finite = tf.logical_and(when, gradients.all_finite(grads))
    for part, own in zip(self.targets.parts, self.targets.split(grads), strict=True):
        getattr(part.optimizer, "apply", part.optimizer)(gradients.divide(own, self.loss_scale), part.updated)
    skip, norm = Skip.of(not_skipped()), tf.constant(1.0)
    norms = (norm,) * len(self.targets.parts)
    count(scaler.Event(finite), tf.constant(False), when)
    return Decision(when, finite, norms, norms, norm, norm, skip, None, (), None)


def descent(grads, variables):
    for g, v in zip(grads, variables, strict=True):
        v.assign_sub(tf.convert_to_tensor(g))


def slopes(loss, variables):
    """The gradients of what a function returns."""
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, variables)


class World:
    """The scalers and weights of a program."""

    def scaler(self, name="S", static=None):
        strategy = scaler.Static(static) if static else scaler.Dynamic(1024.0, growth_interval=1)
        return scaler.LossScaler(strategy, name=name)

    def update(self, s):
        s.update(scaler.Event(tf.constant(True)))

    def var(self, value, **options):
        return tf.Variable(value, **options)

    def weights(self, *values):
        made = [tf.Variable(value) for value in values or ([0.75, -0.5],)]
        return made if len(made) > 1 else made[0]


def one(w):
    return tf.reduce_sum(w * [2.0, 3.0]) + 1.0


def other(w):
    return tf.reduce_sum(tf.square(w)) + 0.25


def of_loss(name, right, function):
    """A program that differentiates a function of scale and weights and applies."""

    def make(w):
        s, v = w.scaler(), w.weights()

        def step():
            with tf.GradientTape() as tape:
                loss = function(s, v)
            s.apply(descent, [tape.gradient(loss, v)], [v])

        return step, ()

    PROGRAMS.append((name, right, make))


def of_grads(name, right, function, static=None, **options):
    """A program that applies, with options, what `function(scaler, grads, weights, world)` makes of gradients."""

    def make(w):
        s = w.scaler(static=static)
        a, b = w.weights(np.ones([3, 2], np.float32), np.ones([2], np.float32))

        def step(x):
            with tf.GradientTape() as tape:
                scaled = s.scale(tf.reduce_mean(tf.square(tf.tanh(x @ a) + b)))
            grads = tape.gradient(scaled, [a, b])
            s.apply(descent, function(s, grads, [a, b], w), [a, b], **options)

        return step, (tf.ones([4, 3]),)

    PROGRAMS.append((name, right, make))


def L(right):
    return lambda f: of_loss(f.__name__, right, f)


def G(right, static=None, **options):
    return lambda f: of_grads(f.__name__, right, f, static, **options)


# --- functions of the loss
OF_LOSS = {
    "penalty_outside": ("wrong", lambda s, v: s.scale(one(v)) + tf.reduce_sum(tf.square(v))),
    "cond_one_scales": ("wrong", lambda s, v: tf.cond(v[0] > 0.0, lambda: s.scale(one(v)), lambda: other(v))),
    "cond_or_nothing": ("ok", lambda s, v: tf.cond(v[0] > 0.0, lambda: s.scale(one(v)), lambda: tf.constant(0.0))),
    "scaled_twice_behind_a_function": ("wrong", lambda s, v: s.scale(tf.function(lambda: 0.5 * s.scale(one(v)))())),
    "logsumexp_of_two": ("wrong", lambda s, v: tf.reduce_logsumexp(tf.stack([s.scale(one(v)), s.scale(other(v))]))),
    "map_fn_limited": (
        "wrong",
        lambda s, v: tf.reduce_mean(
            tf.map_fn(
                lambda x: tf.minimum(s.loss_scale * tf.square(x * v[0] - v[1]), 2.0), tf.constant([1.0, 2.0, 3.0])
            )
        ),
    ),
    "switch_case": (
        "ok",
        lambda s, v: tf.switch_case(
            tf.cast(v[0] > 0.0, tf.int32),
            [lambda: s.scale(one(v)), lambda: s.scale(other(v)), lambda: 0.5 * s.scale(one(v))],
        ),
    ),
    "cond_with_a_forward_pass": (
        "ok",
        lambda s, v: s.scale(tf.cond(v[0] > 0.0, lambda: tf.exp(one(v)) * 2.0, lambda: other(v))),
    ),
    "euclidean_norm_of_the_scaled": ("ok", lambda s, v: tf.math.reduce_euclidean_norm(v * s.loss_scale)),
    "uncertainty_outside": ("wrong", lambda s, v: s.scale(one(v)) * tf.exp(-v[0]) + v[0]),
}
for name, row in OF_LOSS.items():
    of_loss(name, *row)


@L("wrong")
def double_backprop_scaled(s, v):
    g = slopes(lambda: s.scale(tf.reduce_sum(v**3)), v)
    return s.scale(one(v)) + tf.reduce_sum(tf.square(g))


@L("ok")
def gradient_reversal(s, v):
    @tf.custom_gradient
    def reverse(x):
        return tf.identity(x), lambda d: -0.5 * d

    return s.scale(one(reverse(tf.identity(v))))


@L("wrong")
def backward_that_clips(s, v):
    @tf.custom_gradient
    def limited(x):
        return tf.identity(x), lambda d: tf.clip_by_value(d, -1.0, 1.0)

    return s.scale(one(limited(tf.identity(v))))


@L("ok")
def recompute(s, v):
    block = tf.recompute_grad(lambda x: tf.tanh(x) * tf.exp(x))
    return s.scale(one(block(tf.identity(v))))


@L("wrong")
def recompute_and_square(s, v):
    block = tf.recompute_grad(lambda x: tf.tanh(x) * tf.exp(x))
    return tf.square(s.scale(one(block(tf.identity(v)))))


# --- changes of gradients
def gn(grads, limit):
    return tf.clip_by_global_norm(grads, limit)[0]


def each_way(grads, limit):
    """The first by its value, the second by its norm, and both by the global one."""
    return gn([tf.clip_by_value(grads[0], -limit, limit), tf.clip_by_norm(grads[1], limit)], limit)


@G("ok", 1024.0)
def clip_static_by_hand(s, g, v, w):
    return each_way(g, 1024.0)


@G("ok", 1024.0, unscaled=True)
def divided_by_a_constant_that_is_the_scale(s, g, v, w):
    return [one / 1024.0 for one in g]


@G("wrong")
def clip_by_hand(s, g, v, w):
    return [one * tf.minimum(1.0, 1.0 / (tf.norm(one) + 1e-6)) for one in g]


@G("ok")
def flat_and_split(s, g, v, w):
    flat = tf.concat([tf.reshape(one, [-1]) for one in g], 0)
    return [tf.reshape(part, one.shape) for part, one in zip(tf.split(flat, [6, 2]), g, strict=True)]


@G("ok")
def top_values_only(s, g, v, w):
    def keep(one):
        size = tf.abs(one)
        return tf.where(size >= 0.5 * tf.reduce_max(size), one, tf.zeros_like(one))

    return [keep(one) for one in g]


def plain(v):
    """The gradient of a penalty that nobody scaled."""
    return slopes(lambda: tf.reduce_sum(tf.square(v)), v)


_outside = tf.Variable(tf.zeros([3, 2]), trainable=False)
UNSCALED = {"unscaled": True}
OF_GRADIENTS = {
    "clip_while_scaled": ("wrong", lambda s, g, v, w: gn(g, 1.0)),
    "clip_by_norm_while_scaled": ("wrong", lambda s, g, v, w: [tf.clip_by_norm(one, 1.0) for one in g]),
    "clip_by_value_while_scaled": ("wrong", lambda s, g, v, w: [tf.clip_by_value(one, -1.0, 1.0) for one in g]),
    "clip_after_unscale": ("ok", lambda s, g, v, w: each_way(s.unscale(g), 1.0), UNSCALED),
    "clip_limit_times_S": ("ok", lambda s, g, v, w: each_way(g, 1.0 * s.scale_of_gradients)),
    "noise": ("wrong", lambda s, g, v, w: [one + tf.random.normal(one.shape) for one in g]),
    "weight_decay_by_hand": ("wrong", lambda s, g, v, w: [g[0] + 0.1 * v[0], g[1]]),
    "times_a_number_are_added": (
        "wrong",
        lambda s, g, v, w: [one + plain(own) * 1024.0 for one, own in zip(g, v, strict=True)],
    ),
    "scaled_by_hand_are_added": (
        "ok",
        lambda s, g, v, w: [one + plain(own) * s.loss_scale for one, own in zip(g, v, strict=True)],
    ),
    "one_of_a_list_is_not_scaled": ("wrong", lambda s, g, v, w: [g[0], plain(v[1])]),
    "zeros_for_one": ("ok", lambda s, g, v, w: [g[0], tf.zeros_like(v[1])]),
    "epsilon_added": ("ok", lambda s, g, v, w: [one + 1e-8 for one in g]),
    "a_variable_outside_of_the_model_added": ("ok", lambda s, g, v, w: [g[0] + _outside, g[1]]),
    "centred": ("ok", lambda s, g, v, w: [one - tf.reduce_mean(one) for one in g]),
    "divided_by_what_they_carry": ("ok", lambda s, g, v, w: [one / s.scale_of_gradients for one in g], UNSCALED),
    "unscaled_and_divided_by_hand": (
        "wrong",
        lambda s, g, v, w: [one / s.loss_scale for one in s.unscale(g)],
        UNSCALED,
    ),
    "divided_by_the_square": (
        "wrong",
        lambda s, g, v, w: [one / tf.square(s.scale_of_gradients) for one in g],
        UNSCALED,
    ),
    "unscaled_then_scaled_and_unscaled_by_hand": (
        "ok",
        lambda s, g, v, w: [one * s.loss_scale / s.loss_scale for one in s.unscale(g)],
        UNSCALED,
    ),
    "divided_by_hand_and_by_a_constant": (
        "ok",
        lambda s, g, v, w: [one / s.loss_scale / 1024.0 for one in g],
        UNSCALED,
    ),
    "times_inverse": ("ok", lambda s, g, v, w: [one * (1.0 / s.loss_scale) for one in g], UNSCALED),
    "times_the_reciprocal": ("ok", lambda s, g, v, w: [one * tf.math.reciprocal(s.loss_scale) for one in g], UNSCALED),
    "divided_through_integers": (
        "ok",
        lambda s, g, v, w: [one / tf.cast(tf.cast(s.loss_scale, tf.int32), tf.float32) for one in g],
        UNSCALED,
    ),
    "said_unscaled_but_is_not": ("wrong", lambda s, g, v, w: [one + 0.0 for one in g], UNSCALED),
    "one_forgotten": ("wrong", lambda s, g, v, w: [g[0], *s.unscale([0.5 * g[1]])], UNSCALED),
    "one_unscaled": ("wrong", lambda s, g, v, w: [g[0], *s.unscale([0.5 * g[1]])]),
    "python_between": (
        "ok",
        lambda s, g, v, w: [tf.ensure_shape(tf.py_function(lambda x: x, [one], tf.float32), one.shape) for one in g],
    ),
    "sign_of_scaled": ("wrong", lambda s, g, v, w: [tf.sign(one) for one in g]),
    "normalised_by_the_euclidean_norm": (
        "wrong",
        lambda s, g, v, w: [one / tf.math.reduce_euclidean_norm(one) for one in g],
    ),
    "noise_after_unscale": (
        "ok",
        lambda s, g, v, w: [one + tf.random.normal(one.shape) for one in s.unscale(g)],
        UNSCALED,
    ),
    "through_float16": ("ok", lambda s, g, v, w: [tf.cast(tf.cast(one, tf.float16), tf.float32) for one in g]),
    "weight_decay_times_S": ("ok", lambda s, g, v, w: [g[0] + 0.1 * v[0] * s.scale_of_gradients, g[1]]),
}
for name, (right, function, *unscaled) in OF_GRADIENTS.items():
    of_grads(name, right, function, **(unscaled[0] if unscaled else {}))


# --- two losses, two scalers
@ok
def two_losses_one_scale(w):
    s, v = w.scaler(), w.weights()

    def step():
        with tf.GradientTape(persistent=True) as t:
            a, b = s.scale(one(v)), s.scale(other(v))
        s.apply(descent, [t.gradient(a, v) + t.gradient(b, v)], [v])

    return step, ()


def _applied_often(name, right, *calls):
    """A program that applies the same gradients by several calls, given scaler, gradient, other gradient, weights."""

    def make(w):
        s, (u, v) = w.scaler(), w.weights([0.5, 1.0], [1.0, 2.0])

        def step():
            with tf.GradientTape() as tape:
                scaled = s.scale(tf.reduce_sum(u**2) + 3.0 * tf.reduce_sum(v**2))
            g, h = tape.gradient(scaled, [u, v])
            for call in calls:
                call(s, g, h, u, v)

        return step, ()

    PROGRAMS.append((name, right, make))


def to_both(s, g, h, u, v, **options):
    s.apply(descent, [g, h], [u, v], **options)


def judged_first(s, g, h, u, v):
    s.apply(scaler.move_nothing, [g, h], [u, v], update=False)


def by_either(s, g, h, u, v):
    first = u[0] > 0.0
    to_both(s, g, h, u, v, when=first)
    to_both(s, g, h, u, v, when=tf.logical_not(first))


def in_either_branch(s, g, h, u, v):
    tf.cond(u[0] > 0.0, lambda: to_both(s, g, h, u, v), lambda: to_both(s, g, h, u, v))


_applied_often("applied_twice", "wrong", to_both, to_both)
_applied_often("applied_to_a_part_again", "wrong", to_both, lambda s, g, h, u, v: s.apply(descent, [g], [u]))
_applied_often("judged_and_applied", "ok", judged_first, to_both)
_applied_often("applied_by_either_optimizer", "ok", by_either)
_applied_often("applied_in_either_branch", "ok", in_either_branch)
_applied_often(
    "each_optimizer_has_its_own",
    "wrong",
    lambda s, g, h, u, v: s.apply(descent, [g], [u]),
    lambda s, g, h, u, v: s.apply(descent, [h], [v]),
)
_applied_often(
    "only_the_last_counts",
    "wrong",
    lambda s, g, h, u, v: s.apply(descent, [g], [u], update=False),
    lambda s, g, h, u, v: s.apply(descent, [h], [v]),
)
_applied_often(
    "each_and_an_update",
    "ok",
    lambda s, g, h, u, v: s.apply(descent, [g], [u], update=False),
    lambda s, g, h, u, v: s.apply(descent, [h], [v], update=False),
    lambda s, g, h, u, v: s.update(scaler.Event(finite=scaler.all_finite([g, h]))),
)
_applied_often(
    "one_gradient_for_two_variables",
    "wrong",
    lambda s, g, h, u, v: s.apply(descent, [g], [u]),
    lambda s, g, h, u, v: s.apply(descent, [g], [v]),
)


@wrong
def unscaled_with_a_penalty_outside(w):
    s, v = w.scaler(), w.weights()

    def step():
        grad = slopes(lambda: s.scale(one(v)) + tf.reduce_sum(tf.square(v)), v)
        s.apply(descent, s.unscale([grad]), [v], unscaled=True)

    return step, ()


def _two(right, name, use):
    def make(w):
        s, t, (u, v) = w.scaler("S"), w.scaler("T"), w.weights([0.5, 1.0], [1.0])

        def step():
            with tf.GradientTape(persistent=True) as tape:
                l1 = tf.reduce_sum(u**2) + 3.0 * tf.reduce_sum(v**2)
                l2 = 2.0 * tf.reduce_sum(u**2) + 4.0 * tf.reduce_sum(v**2)
                a, b = s.scale(l1), t.scale(l2)
            use(s, t, tape, a, b, u, v)

        return step, ()

    PROGRAMS.append((name, right, make))


def zipped(function, first, second):
    return [function(x, y) for x, y in zip(first, second, strict=True)]


_two(
    "wrong",
    "gradients_of_two_scalers_added",
    lambda s, t, tape, a, b, u, v: s.apply(
        descent, zipped(tf.add, tape.gradient(a, [u, v]), tape.gradient(b, [u, v])), [u, v]
    ),
)
_two(
    "wrong",
    "subtracted_behind_a_product",
    lambda s, t, tape, a, b, u, v: s.apply(
        descent, zipped(lambda x, y: 0.5 * (x - y), tape.gradient(a, [u, v]), tape.gradient(b, [u, v])), [u, v]
    ),
)
_two(
    "wrong",
    "list_of_two_scalers",
    lambda s, t, tape, a, b, u, v: s.apply(descent, [tape.gradient(a, u), tape.gradient(b, v)], [u, v]),
)
_two(
    "wrong",
    "unscaled_and_scaled_summed",
    lambda s, t, tape, a, b, u, v: s.apply(
        descent, zipped(tf.add, s.unscale(tape.gradient(a, [u, v])), tape.gradient(a, [u, v])), [u, v]
    ),
)
_two(
    "ok",
    "each_its_own",
    lambda s, t, tape, a, b, u, v: (
        s.apply(descent, [tape.gradient(a, u)], [u]),
        t.apply(descent, [tape.gradient(b, v)], [v]),
    ),
)
_two(
    "ok",
    "unscaled_each_and_summed",
    lambda s, t, tape, a, b, u, v: s.apply(
        descent,
        zipped(tf.add, s.unscale(tape.gradient(a, [u, v])), t.unscale(tape.gradient(b, [u, v]))),
        [u, v],
        unscaled=True,
    ),
)


@ok
def penalty_by_another(w):
    """The other's scale is divided out by hand, in the forward pass."""
    s, t, v = w.scaler("S"), w.scaler("T"), w.weights()

    def step():
        with tf.GradientTape() as tape:
            slope = slopes(lambda: tf.reduce_sum(v**2) * t.loss_scale, v) / t.scale_of_gradients
            total = s.scale(one(v) + tf.reduce_sum(tf.square(slope)))
        s.apply(descent, [tape.gradient(total, v)], [v])

    return step, ()


@wrong
def cond_of_two_scalers(w):
    s, t, v = w.scaler("S"), w.scaler("T"), w.weights()

    def step(first):
        s.apply(descent, [slopes(lambda: tf.cond(first, lambda: s.scale(one(v)), lambda: t.scale(one(v))), v)], [v])

    return step, (tf.constant(True),)


# --- the scale moves; what is kept
def grad_of(s, v, k=1.0):
    return slopes(lambda: s.scale(k * tf.reduce_sum(v**2)), v)


def _kept(right):
    def add(body):
        def make(w):
            s, v, k, n = w.scaler(), w.weights([0.5]), w.var([0.0], trainable=True, name="kept"), w.var(0)
            assert s.scale_of_gradients > 0.0  # Somebody has read it before.

            def step():
                return body(w, s, v, k, n)

            return step, ()

        PROGRAMS.append((body.__name__, right, make))
        return body

    return add


@_kept("wrong")
def list_of_two_epochs(w, s, v, k, n):
    a = grad_of(s, v)
    w.update(s)
    b = grad_of(s, v)
    s.apply(descent, [a + b], [v])


_scale_kept = tf.Variable(1.0, trainable=False)


@_kept("ok")
def rescaled_by_the_ratio(w, s, v, k, n):
    g = grad_of(s, v)
    now = tf.identity(s.scale_of_gradients)
    k.assign(0.9 * k * (now / _scale_kept) + g)
    _scale_kept.assign(now)
    s.apply(descent, [k.read_value()], [v])


@_kept("ok")
def filled_by_another_function(w, s, v, k, n):
    s.apply(descent, [k.read_value()], [v])


ZERO = tf.constant(0, tf.int64)


def through(memory, looked=lambda s, late: late, **options):
    """A program whose gradients pass through a queue or a table, and come out of it at another call."""

    def make(w):
        s, v = w.scaler(), w.weights([0.5])
        w.keep = queue = tf.queue.FIFOQueue(4, [tf.float32], [[1]])
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros(1))

        def step():
            grad = looked(s, grad_of(s, v))
            if memory == "queue":
                late = queue.dequeue()
                queue.enqueue(grad)
            else:
                table.insert(ZERO, 0.5 * table.lookup(ZERO) + grad)
                late = tf.ensure_shape(table.lookup(ZERO), [1])
            s.apply(descent, [late], [v], **options)

        return step, ()

    return make


PROGRAMS += [
    ("out_of_a_queue", "wrong", through("queue")),
    ("out_of_a_table", "wrong", through("table")),
    ("unscaled_through_a_queue", "ok", through("queue", looked=lambda s, g: s.unscale([g])[0], unscaled=True)),
    ("through_a_queue_with_a_scale", "ok", through("queue", loss_scale=1.0)),
]


@ok
def looked_up_in_the_forward_pass(w):
    s, v = w.scaler(), w.weights([0.5])
    w.keep = table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.ones(1))

    def step():
        s.apply(descent, [slopes(lambda: s.scale(tf.reduce_sum(v * table.lookup(ZERO))), v)], [v])

    return step, ()


@_kept("ok")
def window_in_a_loop(w, s, v, k, n):
    """The scale moves only where the window ends... it does not here: `when` of the project does."""
    for _ in tf.range(3):
        total = tf.zeros([1])
        for _ in tf.range(2):
            total += grad_of(s, v)
        s.apply(descent, [total], [v])


@wrong
def by_hand_said_unscaled(w):
    s, v = w.scaler(), w.weights([0.5])

    def step():
        read = s.loss_scale
        s.apply(descent, [slopes(lambda: tf.reduce_sum(v**2) * read, v) + 0.0], [v], unscaled=True)

    return step, ()


@ok
def by_hand_and_divided(w):
    s, v = w.scaler(), w.weights([0.5])

    def step():
        read = s.loss_scale
        s.apply(descent, [slopes(lambda: tf.reduce_sum(v**2) * read, v) / read], [v], unscaled=True)

    return step, ()


@ok
def divided_by_what_was_multiplied_before(w):
    s, v, kept = w.scaler(), w.weights([0.5]), w.var(1024.0, trainable=False)

    def step(before):
        s.apply(descent, [s.unscale([grad_of(s, v)])[0] * kept / s.loss_scale], [v], unscaled=True)
        s.apply(descent, [s.unscale([grad_of(s, v)])[0] * before / s.loss_scale], [v], unscaled=True)

    return step, (s.loss_scale + 0.0,)


@ok
def penalty_of_unscaled_slopes_that_nobody_scales(w):
    s, v = w.scaler(), w.weights([0.5])

    def step():
        with tf.GradientTape() as tape:
            (slope,) = s.unscale([slopes(lambda: s.scale(tf.reduce_sum(v**3)), v)])
            by_hand = slopes(lambda: s.loss_scale * tf.reduce_sum(v**3), v) / s.loss_scale
            loss = tf.reduce_sum(v**2) + tf.reduce_sum(tf.square(slope)) + tf.reduce_sum(tf.square(by_hand))
        s.apply(descent, [tape.gradient(loss, v)], [v], unscaled=True)

    return step, ()


@ok
def divided_by_arguments(w):
    s, v = w.scaler(), w.weights([0.5])

    def step(scale, inverse):
        s.apply(descent, [grad_of(s, v) / scale], [v], unscaled=True)
        s.apply(descent, [grad_of(s, v) * inverse], [v], unscaled=True)

    return step, (s.loss_scale + 0.0, 1.0 / s.loss_scale)


@ok
def scale_as_argument(w):
    s, v = w.scaler(), w.weights([0.5])

    def step(S):
        s.apply(descent, [slopes(lambda: tf.reduce_sum(v**2) * S, v)], [v], loss_scale=S)

    return step, (s.loss_scale + 0.0,)


@_kept("wrong")
def weights_moved_by_scaled(w, s, v, k, n):
    v.assign_sub(0.1 * grad_of(s, v))


@_kept("wrong")
def sharpness_along_the_scaled(w, s, v, k, n):
    g = grad_of(s, v)
    v.assign_add(0.05 * g)
    h = grad_of(s, v)
    v.assign_sub(0.05 * g)
    s.apply(descent, [h], [v])


@_kept("wrong")
def carried_over_as_a_choice(w, s, v, k, n):
    g = grad_of(s, v)
    s.apply(descent, [tf.where(v[0] > 0.0, g, k)], [v])
    k.assign(g)


@_kept("ok")
def kept_of_an_unmoved_scale(w, s, v, k, n):
    g = grad_of(s, v)
    k.assign(g)
    s.apply(descent, [k + g], [v])


@L("ok")
def cond_in_a_while(s, v):
    return tf.while_loop(
        lambda i, t: i < 3,
        lambda i, t: (
            i + 1,
            t
            + tf.cond(
                tf.reduce_sum(v) * tf.cast(i, tf.float32) > 1.0,
                lambda: s.scale(tf.tanh(one(v)) ** 2),
                lambda: other(v) * s.loss_scale * 2.0,
            ),
        ),
        [0, 0.0],
    )[1]


@L("ok")
def higher_order_by_hand(s, v):
    return s.scale(
        one(v) + tf.reduce_sum(tf.square(slopes(lambda: tf.reduce_sum(v**3) * s.loss_scale, v) / s.loss_scale))
    )


@wrong
def frozen_backbone_penalty_outside(w):
    s, base = w.scaler(), keras.layers.Dense(6, "relu")
    base.trainable = False
    model = keras.Sequential([keras.Input([6]), base, keras.layers.Dense(3)])

    def step(x):
        with tf.GradientTape() as tape:
            scaled = s.scale(tf.reduce_mean(tf.square(model(x)))) + tf.nn.l2_loss(model.trainable_variables[0])
        s.apply(descent, tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    return step, (tf.ones([4, 6]),)


@ok
def overwritten_beside(w):
    s, (a, b) = w.scaler(), w.weights([1.0, 1.0], [0.0, 0.0])
    b.overwrite_with_gradient = True

    def step(x):
        s.apply(descent, [slopes(lambda: s.scale(tf.reduce_sum(a * x)), a), tf.square(x)], [a, b])

    return step, (tf.ones([2]),)


@wrong
def overwritten_divided(w):
    s, (a, b) = w.scaler(), w.weights([1.0, 1.0], [0.0, 0.0])
    b.overwrite_with_gradient = True

    def step(x):
        with tf.GradientTape() as t:
            value = s.scale(tf.reduce_sum(a * x))
        S = s.loss_scale
        s.apply(descent, [one / S for one in [t.gradient(value, a), tf.square(x)]], [a, b], unscaled=True)

    return step, (tf.ones([2]),)


@wrong
def squared_on_replicas(w):
    strategy = replicas_of(2)
    with strategy.scope():
        s, v = w.scaler(), w.weights([0.5, 1.0])

    def replica(x):
        s.apply(descent, [slopes(lambda: tf.square(s.scale(tf.reduce_sum(v * x))), v)], [v])

    return lambda x: strategy.run(replica, (x,)), (tf.ones([2]),)


# What was suspected once, and is right.


@ok
def summed_from_large_zeros(w):
    s, v = w.scaler(), tf.Variable(tf.ones([80, 80]))

    def step():
        total = np.zeros(v.shape, np.float32)
        for _ in range(2):
            total = total + slopes(lambda: s.scale(tf.reduce_mean(tf.square(v))), v)
        s.apply(descent, [total], [v])

    return step, ()


@L("ok")
def the_largest_losses_count_more(s, v):
    values, indices = tf.math.top_k(tf.square(v) * s.loss_scale, 2)
    return tf.reduce_mean(values * tf.where(indices < 1, 1.0, 0.5))


@L("ok")
def exponential_of_a_difference_that_is_zero(s, v):
    value = s.scale(one(v))
    return tf.exp(value - tf.stop_gradient(value))


@ok
def sums_of_another_function(w):
    s, v = w.scaler(), w.weights(np.ones([3, 2], np.float32))

    def step(total, several):
        s.apply(
            descent, [slopes(lambda: s.scale(tf.reduce_mean(tf.square(v))), v) + total + tf.reduce_sum(several, 0)], [v]
        )

    return step, (tf.TensorSpec([None, None]), tf.TensorSpec([4, 3, 2]))


@ok
def window_of_a_fixed_scale(w):
    s, v = w.scaler(static=1024.0), w.weights(np.ones([3, 2], np.float32))
    kept = tf.Variable(tf.zeros([4, 3, 2]))

    def step(place):
        kept.scatter_nd_update([[place]], slopes(lambda: s.scale(tf.reduce_mean(tf.square(v))), v)[None])
        s.apply(descent, [tf.reduce_sum(kept, 0)], [v])

    return step, (tf.constant(1),)


@ok
def momentum_that_the_first_call_makes(w):
    s, v, made = w.scaler(static=1024.0), w.weights([0.5]), []

    def step():
        if not made:
            made.append(tf.Variable(tf.zeros_like(v), trainable=False))
        made[0].assign(0.9 * made[0] + grad_of(s, v))
        s.apply(descent, [made[0].read_value()], [v])

    return step, ()


@ok
def a_function_that_was_traced_before(w):
    s, v = w.scaler(), w.weights()
    squares = tf.function(lambda x: tf.square(tf.tanh(x * v)))
    squares(tf.ones([2]))

    def step():
        s.apply(descent, [slopes(lambda: s.scale(tf.reduce_sum(squares(tf.ones([2])))), v)], [v])

    return step, ()


@ok
def each_applies_in_a_branch_of_another_condition(w):
    s, t, v = w.scaler("S"), w.scaler("T"), w.weights()

    def step(first):
        grads = [slopes(lambda: tf.cond(first, lambda: s.scale(one(v)), lambda: t.scale(one(v))), v)]
        second = tf.logical_not(first)
        tf.cond(second, lambda: t.apply(descent, grads, [v]).finite, lambda: s.apply(descent, grads, [v]).finite)

    return step, (tf.constant(True),)


@ok
def divided_by_a_vector_from_elsewhere(w):
    s, v, own = w.scaler(), w.weights([0.5]), tf.Variable([1024.0], trainable=False)

    def step():
        s.apply(descent, [grad_of(s, v) / own], [v], unscaled=True)

    return step, ()


@wrong
def squared_and_applied_in_a_branch(w):
    s, v = w.scaler(), w.weights()

    def step(first):
        grads = [slopes(lambda: tf.square(s.scale(one(v))), v)]
        tf.cond(first, lambda: s.apply(descent, grads, [v]).finite, lambda: False)

    return step, (tf.constant(True),)
