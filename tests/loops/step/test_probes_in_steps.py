"""Guards what a `TrainStep` returns of its probes: the same however it is run, and nothing without them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, dataset, static
from models import one_layer, plain_model, squared_error

import loops
from scaler import observe

pytestmark = pytest.mark.slow

SCALE = 8.0
RATE = 0.125


def step_of(kind="float32", every=1, kinds=observe.KINDS, watched=True, model=plain_model, **arguments):
    model = model(kind)
    probes = observe.watch(model, every=every, kinds=kinds) if watched else None
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    return loops.TrainStep(model, squared_error, optimizer, loss_scaler=static(SCALE), probes=probes, **arguments)


def row(step, outputs, name):
    place = step.probes.names.index(name)
    return outputs["counts"][place].numpy(), float(outputs["amax"][place])


@pytest.mark.exhaustive
def test_every_kind_is_what_it_should_be_by_hand():
    step = step_of()
    x, y = batch()
    first, second = step.model.layers
    weights = [value.numpy() for value in step.model.trainable_variables]
    with tf.GradientTape(persistent=True) as tape:
        hidden = first(x)
        tape.watch(hidden)
        prediction = second(hidden)
        loss = SCALE * squared_error(y, prediction)
    outputs = tf.function(step)((x, y))
    after = [value.numpy() for value in step.model.trainable_variables]
    expected = {
        "activations/dense": hidden,
        "activations/dense_1": prediction,
        "activation_gradients/dense": tape.gradient(loss, hidden),
        "activation_gradients/dense_1": tape.gradient(loss, prediction),
    }
    names = ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]
    grads = tape.gradient(loss, step.model.trainable_variables)
    expected |= {f"weight_gradients/{name}": grad for name, grad in zip(names, grads, strict=True)}
    expected |= {f"weights/{name}": value for name, value in zip(names, weights, strict=True)}
    expected |= {f"updates/{name}": now - then for name, now, then in zip(names, after, weights, strict=True)}
    slots = [variable for variable in step.optimizer.variables if "momentum" in variable.path]
    expected |= {f"slots/{name}/momentum": variable for name, variable in zip(names, slots, strict=True)}
    assert step.probes.names == list(expected)
    assert (outputs["counts"].dtype, outputs["counts"].shape) == (tf.int64, [len(expected), observe.BINS])
    for name, value in expected.items():
        counts, amax = row(step, outputs, name)
        values = np.asarray(tf.convert_to_tensor(value))
        assert counts.sum() == values.size
        np.testing.assert_allclose(amax, np.abs(values).max(), rtol=1e-5, err_msg=name)
        # Sums round otherwise in a graph, so that a value may lie on the other side of a power of two.
        assert np.abs(counts - observe.exponents(value).numpy()).sum() <= 2, name
    assert np.isnan(outputs["swallowed_updates"]).all()


@pytest.fixture(scope="module")
def eager():
    """Two steps of the float16 model, taken without a graph."""
    step = step_of("float16", model=one_layer)
    return step, [step(batch(seed)) for seed in range(2)]


def test_a_loop_measures_the_same(eager):
    expected_step, expected = eager
    step, seen = step_of("float16", model=one_layer), []
    loops.Loop(step, dataset(2), steps_per_call=2, actions=[seen.append], jit_compile=False).run(2)
    outputs = [{name: value[number] for name, value in seen[0].vectors.items()} for number in range(2)]
    assert step.probes.names == expected_step.probes.names
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(ours["counts"], theirs["counts"])
        np.testing.assert_allclose(ours["amax"], theirs["amax"], rtol=5e-3)
        np.testing.assert_allclose(ours["swallowed_updates"], theirs["swallowed_updates"], atol=0.05)


def test_masters_tell_updates_and_how_many_would_be_swallowed(eager):
    step, (first, second) = eager
    assert all(float(output["amax"][step.probes.names.index("updates/dense/kernel")]) > 0 for output in (first, second))
    assert np.isfinite(second["swallowed_updates"]).all()
    values = step.masters.weights[0].numpy().astype(np.float16)
    np.testing.assert_array_equal(values, step.model.trainable_variables[0].numpy())


def test_a_small_update_is_swallowed_and_a_skip_has_none():
    step = step_of("float16", kinds=["updates"], model=one_layer)
    step.optimizer.learning_rate = 2.0**-22
    for variable in step.model.trainable_variables:
        variable.assign(tf.ones_like(variable))
    call = tf.function(step)
    small = call(batch())
    assert small["applied"]
    np.testing.assert_array_equal(small["swallowed_updates"], np.ones(2))
    assert (small["amax"].numpy() > 0).all()
    skipped = call(batch(bad=np.inf))
    assert not skipped["applied"]
    assert np.isnan(skipped["swallowed_updates"]).all()
    np.testing.assert_array_equal(skipped["amax"], np.zeros(2))
    assert (skipped["counts"].numpy()[:, 0] == [4, 1]).all()


def test_an_overflow_is_seen_where_it_is():
    step = step_of()
    outputs = step(batch(bad=np.inf))
    amax = dict(zip(step.probes.names, outputs["amax"].numpy(), strict=True))
    assert np.isinf(amax["weights/dense/kernel"]) == np.False_
    assert not np.isfinite(amax["weight_gradients/dense/kernel"])
    assert row(step, outputs, "weight_gradients/dense/kernel")[0][[observe.INFINITY, observe.NAN]].sum() > 0


def test_histograms_at_every_nth_attempt():
    step = step_of(every=2, kinds=["activations", "weight_gradients"], model=one_layer)
    call = tf.function(step)
    outputs = [call(batch(seed)) for seed in range(5)]
    counted = [int(output["counts"].numpy().sum()) for output in outputs]
    # 8 examples of an activation, and 5 weights.
    whole = 8 + 5
    assert counted == [0, whole, 0, whole, 0]
    assert [(output["amax"].numpy() > 0).all() for output in outputs] == [number > 0 for number in counted]


def test_without_probes_a_step_has_the_operations_it_had():
    def operations(step):
        graph = tf.function(step).get_concrete_function(batch()).graph
        return [operation.type for operation in graph.get_operations()]

    plain, turned_off = operations(step_of(watched=False)), step_of()
    turned_off.probes = None
    assert operations(turned_off) == plain
    assert not {"Bitcast", "DenseBincount", "IdentityN"} & {*plain}


def test_an_rnn_says_what_it_does_not_show():
    model = keras.Sequential(
        [keras.Input([3, 4]), keras.layers.RNN(keras.layers.SimpleRNNCell(1, name="cell"), name="rnn")]
    )
    step = loops.TrainStep(model, squared_error, keras.optimizers.SGD(0.1), probes=observe.watch(model))
    x, y = tf.ones([2, 3, 4]), tf.ones([2, 1])
    with pytest.warns(UserWarning, match="shows nothing of 'rnn/cell'"):
        outputs = tf.function(step)((x, y))
    assert step.probes.left_out == ["rnn/cell"]
    assert "activations/rnn" in step.probes.names
    assert len(outputs["amax"]) == len(step.probes.names)


def test_an_unrolled_rnn_shows_its_cell_at_all_steps():
    rnn = keras.layers.RNN(keras.layers.GRUCell(2, name="cell"), unroll=True, name="gru")
    model = keras.Sequential([keras.Input([3, 4]), rnn, keras.layers.Dense(1)])
    watch = observe.watch(model, ["gru/cell"], kinds=["activations"])
    with watch.collect() as collection:
        model(tf.ones([2, 3, 4]))
    # The output and the state of three steps, for two examples and two units.
    assert int(tf.reduce_sum(observe.measured(collection.rows()).counts)) == 2 * 3 * 2 * 2


@pytest.mark.parametrize("chosen", [{"layers": ["dense_1"]}, {"only": ["dense_1"]}])
def test_weights_are_those_of_the_chosen_layers(chosen):
    step = step_of("float16")
    watch = observe.watch(step.model, chosen.get("layers"), kinds=observe.KINDS)
    step.probes = watch.only(chosen["only"]) if "only" in chosen else watch
    outputs = step(batch())
    assert step.probes.names == [
        "activations/dense_1",
        "activation_gradients/dense_1",
        *(f"{kind}/dense_1/{name}" for kind in observe.KINDS[2:5] for name in ("kernel", "bias")),
        *(f"slots/dense_1/{name}/momentum" for name in ("kernel", "bias")),
    ]
    assert outputs["swallowed_updates"].shape == [2]
    assert len(outputs["amax"]) == len(step.probes.names)


def test_weights_are_also_those_of_the_layers_in_a_chosen_one_and_of_a_part_all():
    inner = keras.Sequential([keras.layers.Dense(2, name="deep")], name="inner")
    model = keras.Sequential([keras.Input([2]), inner, keras.layers.Dense(1, name="last")])
    deep, last = model.trainable_variables[:2], model.trainable_variables[2:]
    watch = observe.watch(model)
    holds = watch.only(["inner"]).holds()
    assert [holds(variable) for variable in deep + last] == [True, True, False, False]
    assert all(map(watch.part([], ["weight_gradients"]).holds(), deep + last))
    holds = watch.only(["last"]).part([], ["weight_gradients"]).holds()
    assert [holds(variable) for variable in deep + last] == [False, False, True, True]
