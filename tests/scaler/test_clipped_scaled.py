"""A graph warns, once, of scaled gradients that are clipped to a limit which does not move with the scale."""

import warnings

import pytest
import tensorflow as tf
from scaler_cases import gradients_of
from step_programs import trace_no_branches

import scaler


@pytest.fixture(autouse=True)
def _without_branches(monkeypatch):
    trace_no_branches(monkeypatch)


def global_norm(grads, limit):
    return tf.clip_by_global_norm(grads, limit)[0]


def each_norm(grads, limit):
    return [tf.clip_by_norm(grad, limit) for grad in grads]


def each_value(grads, limit):
    return [tf.clip_by_value(grad, -limit, limit) for grad in grads]


CLIPS = {"tf.clip_by_global_norm": global_norm, "tf.clip_by_norm": each_norm, "tf.clip_by_value": each_value}


def taken(change, strategy=None, **arguments):
    weights, loss_scaler = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)], scaler.LossScaler(strategy)

    @tf.function
    def step():
        grads = change(
            loss_scaler,
            gradients_of(loss_scaler, lambda: tf.add_n([tf.reduce_sum(weight**2) for weight in weights]), weights),
        )
        return loss_scaler.apply(scaler.move_nothing, grads, weights, **arguments).finite

    return step.get_concrete_function()


@pytest.mark.parametrize("name", CLIPS)
def test_a_constant_limit_of_scaled_gradients(name):
    with pytest.warns(scaler.ScaleWarning, match=f"{name} limited these gradients while they carried") as said:
        assert taken(lambda _, grads: CLIPS[name](grads, 1.0))
    assert len(said) == 1


def each_way(grads, limit):
    """The first by its value, the second by its norm, and both by the global one."""
    return global_norm([*each_value(grads[:1], limit), *each_norm(grads[1:], limit)], limit)


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (lambda own, grads: each_way(grads, 1.0 * own.scale_of_gradients), {}),
        (lambda own, grads: each_way(own.unscale(grads), 1.0), {"unscaled": True}),
        (lambda own, grads: each_way(grads, 1024.0), {"strategy": scaler.Static(1024.0)}),
        (lambda own, grads: grads, {"clip_norm": 1.0}),
    ],
)
def test_what_is_no_mistake(change, arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(change, **arguments)
