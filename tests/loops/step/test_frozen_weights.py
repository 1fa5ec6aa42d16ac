"""Guards where a loop looks for the models of a step that somebody wrote by hand."""

import functools

import keras
import pytest
import tensorflow as tf

from loops.step.user_steps import models_of

GLOBAL = keras.layers.Dense(1, name="global")


def names_a_global(x):
    return GLOBAL(x)


def by_way_of_another(x):
    return names_a_global(x)


def inside_of_an_inner_function(x):
    return (lambda: GLOBAL(x))()


class Holder:
    def __init__(self, held):
        self.held = held

    def __call__(self, x):
        return self.held(x)

    def step(self, x):
        return self(x)


def in_a_closure():
    layer, unset = GLOBAL, None
    del unset
    return lambda x: (layer(x), unset)  # noqa: F821


def closes_over(held):
    return lambda x: held(x)


def nested():
    layers = {"first": [{"body": (GLOBAL,)}]}
    layers["itself"] = layers
    return layers


def as_a_default(x, layer=GLOBAL):
    return layer(x)


HELD = {"body": GLOBAL}


def as_a_keyword_default():
    def step(x, *, layers=HELD):
        return layers["body"](x)

    return lambda x: step(x)


STEPS = {
    "global": names_a_global,
    "helper": by_way_of_another,
    "inner": inside_of_an_inner_function,
    "closure": in_a_closure(),
    "list": closes_over([GLOBAL]),
    "dict": closes_over({"body": GLOBAL}),
    "nested": closes_over(nested()),
    "default": as_a_default,
    "keyword default": as_a_keyword_default(),
    "object with a dict": Holder({"body": [GLOBAL]}),
    "method with a dict": Holder({"body": [GLOBAL]}).step,
    "partial with a dict": functools.partial(lambda layers, x: layers["body"](x), {"body": GLOBAL}),
    "object": Holder(GLOBAL),
    "method": Holder(GLOBAL).step,
    "partial": functools.partial(lambda layer, x: layer(x), GLOBAL),
    "tf.function": tf.function(names_a_global),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_model_is_found(step):
    assert models_of(step) == [GLOBAL]


def test_what_names_no_model_has_none():
    assert models_of(lambda x: x) == models_of(len) == models_of(tf.function(lambda x: keras.ops.abs(x))) == []
