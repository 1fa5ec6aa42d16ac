"""Guards that what cannot work is refused before anything runs, in a message with the value and what is allowed.

One table: a call, and what its message has to contain.
"""

import math
import re
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import plain_descent

import scaler
from scaler import Dynamic, LossScaler, MasterWeights, NoScaling, Static
from scaler.strategies import StaticState

SCALES = "[2^-126, 2^126]"
GROWTH = "(1, 2^126]"
BACKOFF = "[2^-126, 1)"
COUNT = "an integer in [1, 2^31)"
CLIP = "a positive finite number"


class VectorState(NamedTuple):
    loss_scale: tf.Tensor


class Made:
    """A strategy with whatever state it was given."""

    def __init__(self, state):
        self.state = state

    def init(self):
        return self.state

    def update(self, state, event):
        return state


def apply(grads=None, variables=None, optimizer=plain_descent, **options):
    variables = [tf.Variable([1.0, 2.0], name="w")] if variables is None else variables
    grads = [tf.constant([1.0, 2.0])] if grads is None else grads
    return LossScaler(Static(1.0)).apply(optimizer, grads, variables, **options)


def variable(dtype, shape=(2,)):
    return tf.Variable(tf.zeros(shape, dtype), name="kernel")


def dynamic(**options):
    """One row: an option of Dynamic."""
    ((name, value),) = options.items()
    return lambda: Dynamic(**options), f"{name}={value!r}"


def rows():
    """Pairs of a call and the parts its message has to have."""
    huge = 10**400
    for value in (0, 0.0, -1.0, 2.0**-127, 2.0**127, 1e300, math.inf, -math.inf, math.nan, huge, True, "1", None, 1j):
        yield lambda v=value: Static(v), repr(value), SCALES
        yield *dynamic(initial_scale=value), SCALES
        yield *dynamic(min_scale=value), SCALES
        yield *dynamic(max_scale=value), SCALES
    for value in (np.float32(np.nan), np.float64(-2), np.bool_(True), [8.0], np.ones(2)):
        yield lambda v=value: Static(v), repr(value), SCALES
    for value in (1, 1.0, 1 + 1e-12, 0.5, 0, -2.0, math.inf, math.nan, 2.0**127, huge, True, "2", None):
        yield *dynamic(growth_factor=value), GROWTH
    for value in (1, 1.0, 1 - 1e-12, 2.0, 0, -0.5, 2.0**-127, math.inf, math.nan, True, "0.5", None):
        yield *dynamic(backoff_factor=value), BACKOFF
    for value in (0, -1, 2000.0, 1.5, math.nan, 2**31, 2**31 + 1, 2**40, True, "2000", None):
        yield *dynamic(growth_interval=value), COUNT + ", such as 2000."
        yield *dynamic(hysteresis=value), COUNT + ", such as 1."
    for value in (1, "no", None):
        yield *dynamic(consecutive_hysteresis=value), "consecutive_hysteresis"
    order = "min_scale <= initial_scale <= max_scale"
    yield lambda: Dynamic(8.0, min_scale=16.0), "min_scale=16.0", "initial_scale=8.0", order
    yield lambda: Dynamic(8.0, max_scale=4.0), "max_scale=4.0", "initial_scale=8.0", order
    yield lambda: Dynamic(8.0, min_scale=32.0, max_scale=4.0), "min_scale=32.0", "max_scale=4.0", order

    for value in (Dynamic, NoScaling, "dynamic", 1024.0, {"loss_scale": 2.0}):
        yield lambda v=value: LossScaler(v), repr(value), "init() and update(state, event)"
    for state in (None, 8.0, (tf.constant(8.0),), {"loss_scale": 8.0}, scaler.Event(tf.constant(True))):
        yield lambda s=state: LossScaler(Made(s)), "Made", repr(state), "loss_scale"
    yield lambda: LossScaler(Made(StaticState(None))), "Made", "loss_scale"
    yield lambda: LossScaler().explain("why"), "explain('why')", "an Outcome from apply, or an hs.Loop"
    yield lambda: LossScaler(Made(VectorState(tf.ones([2])))), "Made", "loss_scale"

    for value in (tf.constant(1.0), tf.constant([True])):
        yield lambda v=value: LossScaler().update(scaler.Event(v)), str(value.shape), "scalar bool"
    for value in (tf.constant(1), tf.constant(True), 3):
        yield lambda v=value: LossScaler().scale(v), tf.convert_to_tensor(value).dtype.name, "floating-point scalar"
    for shape in ([1], [2, 3]):
        yield lambda s=shape: LossScaler().scale(tf.ones(s)), str(tuple(shape)), "expected a scalar"
    yield lambda: LossScaler().scale(tf.ones([0])), "(0,)", "was the batch empty?"

    yield lambda: apply(grads=[]), "empty", "one gradient for each variable"
    yield lambda: apply(variables=[]), "1 gradients for 0 variables", "one for each"
    yield lambda: apply(grads=[tf.ones([2])] * 3), "3 gradients for 1 variables", "one for each"
    yield lambda: apply(grads=[None]), "every gradient is None", "inside the tape", "leave out this apply, share or"
    yield lambda: scaler.all_finite({"w": tf.ones([2])}), "all_finite", "dict", "Pass list(grads.values())"
    yield lambda: scaler.all_finite(None), "all_finite", "NoneType", "expected a list"
    yield lambda: LossScaler().scale(None), "scale(None)", "expected the loss"
    yield lambda: LossScaler().scale(lambda: 1.0), "scale(function)", "the loss alone"
    yield lambda: apply(grads=[tf.ones([3])]), "(3,)", "(2,)", "w:0"
    yield lambda: apply(grads=[tf.ones([2, 1])]), "(2, 1)", "(2,)", "w:0"
    sparse = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), tf.constant([4, 3]))
    yield lambda: apply(grads=[sparse], variables=[variable("float32", (4, 2))]), "(4, 3)", "(4, 2)", "kernel"
    yield lambda: apply(grads=[tf.constant([1, 2])]), "int32", "floating-point", "w:0"
    for kind in ("float16", "bfloat16"):
        yield lambda k=kind: apply(variables=[variable(k)]), kind, "MasterWeights", "allow_16bit_updates=True"
    for kind in ("int32", "bool"):
        yield lambda k=kind: apply(variables=[variable(k)]), kind, "float32", "kernel"
        yield lambda k=kind: apply(variables=[variable(k)], allow_16bit_updates=True), kind, "float32", "kernel"

    pairs = [(tf.ones([2]), variable("float32"))]
    yield lambda: apply(grads=pairs), "pairs", "apply(optimizer, grads, variables)"
    yield lambda: scaler.snapshot(keras.Sequential()), "model.non_trainable_variables"

    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    yield lambda: apply(optimizer=wrapped), "LossScaleOptimizer", "inner_optimizer"
    factor = keras.optimizers.SGD(loss_scale_factor=8.0)
    yield lambda: apply(optimizer=factor), "loss_scale_factor=8.0", "unset"
    for value in (keras.optimizers.SGD, "sgd", None, 0.1):
        yield lambda v=value: apply(optimizer=v), repr(value), "a Keras optimizer", "function"

    built = keras.optimizers.SGD(name="mine")
    built.build([variable("float32")])
    yield lambda: apply(optimizer=built), "mine", "w:0", "other variables"

    for value in (0, 0.0, -1.0, math.inf, math.nan, 1e39, 1e-50, huge, True, "1", [1.0]):
        yield lambda v=value: apply(clip_norm=v), f"clip_norm={value!r}", CLIP
        yield lambda v=value: scaler.ClipByNorm(v), f"ClipByNorm: norm={value!r}", "a positive finite number"
        yield lambda v=value: scaler.ClipByValue(v), f"ClipByValue: value={value!r}", "a positive finite number"
    for value in (1.0, "norm", scaler.ClipByNorm):
        yield lambda v=value: apply(clip=v), f"clip={value!r}", "hs.ClipByNorm(1.0)", "clip_norm=1.0"
    both = {"clip_norm": 1.0, "clip": scaler.ClipByValue(2.0)}
    yield lambda: apply(**both), "clip_norm=1.0", "ClipByValue(value=2.0)", "one of"

    yield lambda: MasterWeights([]), "[]", "at least one variable"
    same = variable("float16")
    yield lambda: MasterWeights([same, same]), "twice"
    for kind in ("int32", "bool"):
        yield lambda k=kind: MasterWeights([variable(k)]), kind, "float16, bfloat16, float32 or float64", "kernel"

    for value in ("half", "float64", "int8", "", tf.int32, np.float64, None, 16, 1, object):
        yield lambda v=value: scaler.float_format(v), repr(value), "float16"
    for method in ("overflows", "underflows", "becomes_subnormal"):
        call = getattr(scaler.float_format("float16"), method)
        yield lambda c=call: c(tf.constant([1, 2])), "int32", "float16, bfloat16, float32 or float64"


ROWS = [
    pytest.param(call, parts, id=re.sub("0x[0-9a-f]+", "", " ".join(part[:40] for part in parts)))
    for call, *parts in rows()
]


@pytest.mark.parametrize(("call", "parts"), ROWS)
def test_refused_with_the_value_and_what_is_allowed(call, parts):
    with pytest.raises(scaler.InvalidArgument) as raised:
        call()
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, scaler.ScalerError)
    message = str(raised.value)
    for part in parts:
        assert part in message


def test_refused_while_a_step_is_traced_and_nothing_has_run():
    w = tf.Variable([1.0])
    loss_scaler = LossScaler(Static(2.0))

    @tf.function
    def step(grad):
        return loss_scaler.apply(plain_descent, [grad], [w])

    with pytest.raises(scaler.InvalidArgument, match="shape"):
        step(np.float32([1, 2]))
    assert w.numpy()[0] == 1.0
    assert int(loss_scaler.counters.attempted) == 0


@pytest.mark.parametrize("kind", [scaler.ScalerError, *scaler.ScalerError.__subclasses__()])
def test_every_error_keeps_its_type_through_a_compiled_function(kind):
    @tf.function
    def run(x):
        if x.shape.rank == 0:
            raise kind("what was passed")
        return x

    with pytest.raises(kind, match="what was passed"):
        run(tf.constant(1.0))


def test_a_loss_of_unknown_rank_is_checked_when_it_runs():
    loss_scaler = LossScaler(Static(2.0))
    scale = tf.function(loss_scaler.scale, input_signature=[tf.TensorSpec(None, tf.float32)])
    assert scale(tf.constant(3.0)).numpy() == 6.0
    with pytest.raises(tf.errors.InvalidArgumentError):
        scale(tf.constant([3.0, 4.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Static(2.0**-126),
        lambda: Static(2.0**126),
        lambda: Static(np.float32(3)),
        lambda: Static(np.int64(3)),
        lambda: Static(2**100),
        lambda: Dynamic(1, min_scale=1, max_scale=1, growth_interval=1, hysteresis=1),
        lambda: Dynamic(np.float16(8), growth_factor=np.float64(2), growth_interval=np.int32(5)),
        lambda: Dynamic(growth_factor=1 + 2.0**-20, backoff_factor=1 - 2.0**-20),
        lambda: Dynamic(growth_interval=2**31 - 1, hysteresis=2**31 - 1),
        lambda: Dynamic(2.0**126, growth_factor=2.0**126, backoff_factor=2.0**-126, max_scale=2.0**126),
    ],
)
def test_what_lies_on_the_border_is_accepted_and_runs(make):
    loss_scaler = LossScaler(make())
    for finite in (True, False):
        loss_scaler.update(scaler.Event(tf.constant(finite)))
    assert 2.0**-126 <= loss_scaler.loss_scale.numpy() <= 2.0**126


@pytest.mark.parametrize("value", [1, 1.0, np.float64(1), np.float32(1), np.int64(1), tf.constant(1.0)])
def test_any_kind_of_number_is_a_clip_norm(value):
    assert apply(clip_norm=value).finite


def test_a_number_given_as_a_tensor_is_read_when_the_step_runs():
    run = tf.function(lambda scale: Static(scale).init().loss_scale)
    assert [run(tf.constant(value)).numpy() for value in (8.0, 3.0)] == [8.0, 3.0]
    assert run.experimental_get_tracing_count() == 1


def test_pairs_as_keras_takes_them_are_told_in_one_sentence():
    variable = tf.Variable([1.0])
    pairs = [(tf.ones(1), variable)]
    for given in ((zip(*zip(*pairs, strict=True), strict=True),), (pairs, [variable])):
        with pytest.raises(scaler.InvalidArgument, match=r"expected two lists.* apply\(optimizer, grads, variables\)"):
            scaler.LossScaler(scaler.Static(1.0)).apply(keras.optimizers.SGD(), *given)
