"""Guards that a release of Keras whose optimizers take other steps is noticed before weights move by other numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from scaler_cases import laid_out

import scaler
from scaler.backend import apply_steps
from scaler.backend.versions import say_once
from scaler.gate import propose

KERAS = next(kind for kind in keras.optimizers.SGD.__mro__ if apply_steps.UPDATE in vars(kind))


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    """Small variables are compiled, too, and each test hears the warning."""
    monkeypatch.setattr(propose, "_WORTH_COMPILING", 2 * propose._HANDLE)
    say_once.cache_clear()


def rename(monkeypatch, *names, keep_the_old=False, caller="_backend_update_step"):
    """Keras as it would be with other names for these methods, which its own `apply` then calls."""
    kind = next(kind for kind in KERAS.__mro__ if caller in vars(kind))
    own = vars(kind)[caller]

    def with_new_names(optimizer, *args):
        hidden = {name: vars(optimizer).pop(name) for name in names if name in vars(optimizer)}
        for name in names:
            setattr(optimizer, name, getattr(optimizer, f"{name}_renamed"))
        try:
            own(optimizer, *args)
        finally:
            for name in names:
                delattr(optimizer, name)
            vars(optimizer).update(hidden)

    monkeypatch.setattr(kind, caller, with_new_names)
    for name in names:
        monkeypatch.setattr(KERAS, f"{name}_renamed", vars(KERAS)[name], raising=False)
        if not keep_the_old:
            monkeypatch.delattr(KERAS, name)


def weights():
    return [keras.Variable(np.arange(6, dtype=np.float32).reshape(2, 3)), keras.Variable([1.0, 2.0, 3.0])]


def step_of(variables):
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic(1024.0)), keras.optimizers.SGD(0.125)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables]))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, variables), variables).finite

    return step


def values(variables):
    return [np.asarray(variable).tolist() for variable in variables]


def moved():
    return [(0.75 * np.asarray(variable)).tolist() for variable in weights()]


def test_as_it_is_the_update_is_compiled(monkeypatch):
    called = laid_out(monkeypatch)
    variables = weights()
    assert step_of(variables)()
    assert called
    assert values(variables) == moved()


@pytest.mark.parametrize("name", [apply_steps.UPDATE, apply_steps.SUM])
def test_under_another_name_the_update_is_slower_and_the_same(monkeypatch, name):
    rename(monkeypatch, name)
    variables = weights()
    with pytest.warns(UserWarning, match=f"Keras .* have no {name}: updates .* not compiled.*same numbers") as seen:
        assert step_of(variables)()
    assert len(seen) == 1
    assert values(variables) == moved()


def test_a_method_that_is_there_and_not_called_is_refused_before_anything_moves(monkeypatch):
    rename(monkeypatch, apply_steps.UPDATE, keep_the_old=True)
    variables = weights()
    with pytest.raises(scaler.UnsupportedVersion, match=r"_distributed_tf_update_step 0 times.*Nothing was changed"):
        step_of(variables)()
    assert values(variables) == values(weights())


@pytest.mark.parametrize(
    ("keep_the_old", "said"),
    [
        (False, r"SGD of Keras .* has no _all_reduce_sum_gradients"),
        (True, r"_all_reduce_sum_gradients 0 times.*Nothing was changed"),
    ],
)
def test_several_replicas_are_refused_where_gradients_would_be_summed_twice(monkeypatch, keep_the_old, said):
    strategy = mirrored(2)
    with strategy.scope():
        variables = weights()
        step = step_of(variables)
    rename(monkeypatch, apply_steps.SUM, keep_the_old=keep_the_old)
    with pytest.raises(scaler.UnsupportedVersion, match=said):
        tf.function(lambda: strategy.run(step))()
    assert values(variables) == values(weights())


def test_weight_decay_that_keras_takes_by_another_step_is_refused(monkeypatch):
    variables, loss_scaler = weights(), scaler.LossScaler(scaler.Static(1.0))
    optimizer = keras.optimizers.SGD(0.125, weight_decay=0.5)
    rename(monkeypatch, apply_steps.DECAY, keep_the_old=True, caller="_backend_apply_gradients")

    @tf.function
    def step():
        loss_scaler.apply(optimizer, [tf.ones(variable.shape) for variable in variables], variables)

    with pytest.raises(scaler.UnsupportedVersion, match=r"_apply_weight_decay 0 times.*Nothing was changed"):
        step()
    assert values(variables) == values(weights())


@pytest.mark.parametrize("name", [apply_steps.WINDOW, apply_steps.GIVEN])
def test_accumulation_is_refused_where_a_window_would_be_added_up_twice(monkeypatch, name):
    owner = next(kind for kind in keras.optimizers.SGD.__mro__ if name in vars(kind))
    variables = weights()
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.125, gradient_accumulation_steps=2))
    monkeypatch.delattr(owner, name)
    with pytest.raises(scaler.UnsupportedVersion, match=name):
        optimizer.build(variables)
