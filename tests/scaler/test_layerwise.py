"""Guards layer-wise scales: gradients that no one scale can hold, the same in every mode, skips for one group."""

import layerwise_cases as cases
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import scaler
from scaler.layerwise import AdaptiveScale, Layerwise, rescale

ONE = np.float32(1.0)


def error(found, wanted):
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.mark.slow
def test_gradients_that_no_single_scale_holds():
    gains = [2.0**13] * 4
    x, y = cases.batch()
    wanted = cases.exact_gradients(gains, x, y)
    run = cases.Run(cases.chain(gains), cases.cuts(gains), rate=0.0)
    step = tf.function(run.step)
    for _ in range(40):
        finite, grads, _ = step(x, y, ONE)
    assert finite
    assert max(error(grad.numpy(), want) for grad, want in zip(grads, wanted, strict=True)) < 0.02

    model = cases.chain(gains)

    @tf.function
    def single(loss_scale):
        with tf.GradientTape() as tape:
            scaled = cases.loss_of(model, x, y) * loss_scale
        return tape.gradient(scaled, model.trainable_variables)

    for exponent in range(-70, 71, 5):
        found = single(tf.constant(2.0**exponent))
        flushed = any(not np.any(grad.numpy()) for grad in found)
        assert flushed or not scaler.all_finite(found), exponent


def test_a_loss_that_is_not_finite_is_no_groups_fault():
    run = cases.Run(cases.chain([1.0]), cases.cuts([1.0]), scaler.Dynamic(8.0))
    before = [value.numpy().tolist() for value in run.layerwise.state]
    for factor in np.float32([np.inf, np.nan]):
        assert not run.step(*map(tf.constant, cases.batch()), factor)[0]
        assert [value.numpy().tolist() for value in run.layerwise.state] == before


def test_an_overflow_where_a_group_ends_is_that_groups_fault():
    # The weights of the first group stay finite; what it hands on does not.
    weight, deep = tf.Variable([[200.0]], dtype=tf.float16), tf.Variable([[1.0]], dtype=tf.float16)
    layerwise = Layerwise({"near": [weight], "far": [deep]}, strategy=scaler.Static(1.0))
    with tf.GradientTape() as tape:
        hidden = layerwise.rescale(deep * tf.constant([[0.125]], tf.float16), "far")
        loss = tf.cast(layerwise.rescale(hidden * weight, "near"), tf.float32)[0, 0] * 1000.0
    grads, seen = layerwise.gradient(tape, loss, [weight, deep])
    assert grads[0].numpy() == 125.0
    assert np.isinf(grads[1].numpy())
    assert seen.finite.numpy().tolist()[0] is False
    assert seen.observed.numpy().tolist() == [True, False]


def test_scales_are_powers_of_two_within_bounds_whatever_was_restored():
    layerwise = Layerwise({"only": [tf.Variable(1.0)]}, strategy=scaler.Dynamic(8.0, max_scale=2.0**100))
    for stored, used in ((12.0, 8.0), (np.inf, 2.0**60), (0.0, 2.0**-14), (np.nan, 8.0), (-1.0, 2.0**-14)):
        layerwise._scales["*"]._state["loss_scale"].assign([stored])
        assert layerwise.scales.numpy().tolist() == [used]


def test_the_identity_multiplies_gradients_only():
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        x = tf.constant([1.5, -2.0], dtype)
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = rescale(x, 2.0**20)
            loss = tf.reduce_sum(out * tf.constant([2.0**-20, 1.0 if dtype != tf.float16 else 0.0], dtype))
        assert out.numpy().tolist() == x.numpy().tolist()
        assert tape.gradient(loss, x).numpy().tolist()[0] == 1.0


def not_rescaled(variable, _):
    with tf.GradientTape() as tape:
        loss = variable * 2.0
    Layerwise({"a": [variable]}).gradient(tape, loss, [variable])


def of_strategy(strategy):
    return lambda head, body: Layerwise({"head": [head], "body": [body]}, strategy=strategy)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda v, w: Layerwise({}), "at least one group"),
        (lambda v, w: Layerwise({"a": [v], "b": [v]}), "in group 'a' and in 'b'"),
        (lambda v, w: Layerwise({"a": [v], "b": [w], "c": []}, parents={"b": "c"}), "parent of group 'b' is 'c'"),
        (lambda v, w: Layerwise({"a": [v]}, strategy=scaler.Histogram()), "histogram"),
        (lambda v, w: Layerwise({"a": [v]}).rescale(1.0, "b"), "expected one of the groups a"),
        (lambda v, w: Layerwise({"a": [v]}).unscale([tf.constant(1.0)], [w]), "belongs to none of the groups"),
        (not_rescaled, "did not pass a rescale"),
        (lambda v, w: rescale(tf.constant([1]), 2.0), "int32"),
        (
            lambda v, w: scaler.LossScaler(AdaptiveScale()).update(scaler.Event(tf.constant(True))),
            "a rule for groups of layers",
        ),
        (lambda v, w: Layerwise([v]), "expected a dict of lists of variables"),
        (lambda v, w: Layerwise({0: [v]}), "expected a dict of lists of variables"),
        (lambda v, w: Layerwise({"a": v}), "group 'a' is .*: expected a list of variables"),
        (lambda v, w: Layerwise({"a": ["kernel"]}), "expected a list of variables"),
        (lambda v, w: Layerwise({"a": [v]}, parents=["a"]), "expected a dict of names"),
        (lambda v, w: Layerwise({"a": [v]}, parents={"z": "a"}), "expected a dict of names"),
        (lambda v, w: Layerwise({"a": [v]}).update(tf.constant(True)), "expected what Layerwise.gradient returned"),
        (of_strategy({}), "expected a strategy, or a dict"),
        (of_strategy({1: scaler.Dynamic()}), "expected a strategy, or a dict"),
        (of_strategy({"body": scaler.Dynamic()}), "group 'head' fits none of its keys"),
        (of_strategy({"*": scaler.Dynamic(), "head": scaler.Dynamic()}), "'head' is the first key of no group"),
        (of_strategy({"head": scaler.Dynamic(), "*": 8.0}), "Layerwise"),
    ],
)
def test_what_cannot_work_is_told_in_one_sentence(make, words):
    with pytest.raises(scaler.InvalidArgument, match=words):
        make(tf.Variable(1.0, name="v"), tf.Variable(2.0, name="w"))


def test_an_overflow_of_rescaling_counts_where_no_weight_is_trained():
    near, frozen = tf.Variable(1.0, dtype=tf.float16), tf.Variable(1.0, dtype=tf.float16)
    layerwise = Layerwise({"near": [near], "far": [frozen]}, strategy=scaler.Dynamic(1.0))
    layerwise._scales["*"]._state["loss_scale"].assign([1.0, 2.0**20])
    with tf.GradientTape() as tape:
        loss = tf.cast(layerwise.rescale(layerwise.rescale(frozen * 1.0, "far") * near, "near"), tf.float32)
    grads, seen = layerwise.gradient(tape, loss, [near])
    assert grads[0].numpy() == 1.0
    assert seen.finite.numpy().tolist() == [True, False]


STRATEGIES = {
    "outputs": scaler.Static(4.0),
    "steep_[01]": scaler.Dynamic(2.0**3, growth_interval=2),
    "*": AdaptiveScale(),
}
GAINS = [2.0**-5] * 3


def test_each_group_moves_by_its_own_strategy_and_is_restored(tmp_path):
    """Driven by the same events, as all groups with that strategy alone would; in whatever order they are given."""
    run = cases.Run(cases.chain(GAINS), cases.cuts(GAINS), STRATEGIES)
    groups = {name: [tf.Variable(0.0)] for name in run.layerwise.names}
    alone = {key: Layerwise(groups, strategy=own) for key, own in STRATEGIES.items()}
    of = {"outputs": "outputs", "steep_0": "steep_[01]", "steep_1": "steep_[01]", "steep_2": "*"}
    for number in range(4):
        factor = np.float32(2.0**30 if number == 2 else 1.0)
        finite, _, seen = run.step(*map(tf.constant, cases.batch(number)), factor)
        assert bool(finite) == (number != 2)
        for other in alone.values():
            other.update(scaler.layerwise.LayerEvent(*(tf.identity(value) for value in seen)))
        for name, scale in cases.log2_scales(run.layerwise).items():
            assert scale == cases.log2_scales(alone[of[name]])[name], (number, name)
    assert list(run.layerwise.strategies.values()) == [STRATEGIES[of[name]] for name in run.layerwise.names]
    assert {key: state._fields for key, state in run.layerwise.state.items()} == {
        key: own.init()._fields for key, own in STRATEGIES.items()
    }
    assert len(set(cases.log2_scales(run.layerwise).values())) > 2
    turned = {key: STRATEGIES[key] for key in ("steep_[01]", "outputs", "*")}
    fresh = cases.Run(cases.chain(GAINS), cases.cuts(GAINS), turned)
    assert cases.log2_scales(run.layerwise) != cases.log2_scales(fresh.layerwise)
    fresh.checkpoint.restore(run.checkpoint.save(str(tmp_path / "ckpt"))).assert_consumed()
    assert cases.log2_scales(run.layerwise) == cases.log2_scales(fresh.layerwise)
    assert sorted(raw(run.layerwise.variables)) == sorted(raw(fresh.layerwise.variables))
