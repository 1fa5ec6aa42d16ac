"""Guards that a `ComposedStep` measures the probes of each part as a `TrainStep` does its own, in its own pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from composed_cases import SHAPES, Players, batches
from loop_cases import batch, static
from models import plain_model, squared_error
from rigs import raw
from step_cases import part, tensors

import loops
from scaler import observe

SCALE = 64.0
"""Of `composed_cases`."""
ALL = [*observe.KINDS, "update_rms"]
VECTORS = ("counts", "amax", "swallowed_updates", "update_rms", "update_ratio", "noise_scale")


def watched(players, names=("critic", "actor"), **arguments):
    """The step of these players with probes, and otherwise as it was."""
    arguments = {"kinds": ALL} | arguments
    step = players.step
    probes = {name: observe.watch(getattr(players, name), **arguments) for name in names}
    return loops.ComposedStep(
        step.parts, step.forward, loss_scaler=step.loss_scaler, accumulate=step.accumulate, probes=probes
    )


def rows(step, outputs, part):
    """The largest magnitudes of a part, by row."""
    return dict(zip(step.probes[part].names, outputs[f"{part}/amax"].numpy(), strict=True))


@pytest.mark.slow
def test_one_part_alone_is_measured_as_a_train_step():
    models = [plain_model() for _ in range(2)]
    probes = [observe.watch(model, kinds=ALL) for model in models]
    optimizers = [keras.optimizers.SGD(0.125, momentum=0.5) for _ in models]
    step = loops.TrainStep(models[0], squared_error, optimizers[0], loss_scaler=static(8.0), probes=probes[0])
    own = part("only", models[1], optimizer=optimizers[1], scale=8.0)
    composed = loops.ComposedStep([own], probes={"only": probes[1]})
    for seed in range(3):
        one, other = (take(batch(seed, bad=np.inf if seed == 2 else None)) for take in (step, composed))
        assert probes[0].names == probes[1].names
        assert probes[0].gauges == probes[1].gauges
        found = [name for name in one if one[name].shape.rank]
        assert found == [name.removeprefix("only/") for name in other if other[name].shape.rank]
        assert {*found} <= {*VECTORS}
        for name in found:
            np.testing.assert_array_equal(one[name], other[f"only/{name}"], err_msg=f"{name} at {seed}")


def by_hand(players, given, part):
    """The largest magnitudes of a part's activations and gradients, from its layers one after the other."""
    x, y, push = (tf.constant(one) for one in given)
    found, seen = {}, []

    def through(model, value, own):
        for layer in model.layers:
            value = layer(value, training=True)
            if own:
                tape.watch(value)
                seen.append((layer.name, value))
        return value

    with tf.GradientTape(persistent=True) as tape:
        moved = x * through(players.actor, x, part == "actor")
        value = through(players.critic, moved, part == "critic")
        loss = squared_error(y, value) if part == "critic" else tf.reduce_mean(-value * push)
        scaled = SCALE * loss
    found |= {f"activations/{name}": value for name, value in seen}
    found |= {f"activation_gradients/{name}": tape.gradient(scaled, value) for name, value in seen}
    variables = getattr(players, part).trainable_variables
    grads = tape.gradient(scaled, variables)
    found |= {
        f"weight_gradients/{one.path.removeprefix('sequential/')}": grad
        for one, grad in zip(variables, grads, strict=True)
    }
    return {name: float(tf.reduce_max(tf.abs(value))) for name, value in found.items()}


def test_a_part_has_the_gradients_of_its_own_loss_in_its_own_pass():
    players, (given,) = Players("shared", dropout=0.0), batches(1)
    step = watched(players, kinds=observe.KINDS[:3])
    expected = {name: by_hand(players, given, name) for name in ("actor", "critic")}
    outputs = step(tensors(given))
    for name, values in expected.items():
        found = rows(step, outputs, name)
        assert set(found) == set(values)
        for row, value in values.items():
            np.testing.assert_allclose(found[row], value, rtol=2e-5, atol=1e-6, err_msg=f"{name}: {row}")


@pytest.mark.exhaustive
def test_where_it_is_not_its_turn_a_part_has_nothing():
    players = Players("turns", every=2, dropout=0.0)
    eager, step = Players("turns", every=2, dropout=0.0), watched(players)
    reference, call = watched(eager), tf.function(step)
    for number, given in enumerate(batches(4), 1):
        outputs, expected = call(tensors(given)), reference(tensors(given))
        if number % 2:
            assert not outputs["actor/amax"].numpy().any()
            assert not outputs["actor/counts"].numpy().any()
            assert np.isnan(outputs["actor/update_rms"]).all()
            assert np.isnan(outputs["actor/swallowed_updates"]).all()
        # Eagerly nothing is known of a part before its first turn.
        assert set(expected) == set(outputs) - ({f"actor/{name}" for name in VECTORS} if number == 1 else set())
        for name, value in expected.items():
            if value.shape.rank and "counts" not in name:
                np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
            elif value.shape.rank:
                np.testing.assert_array_equal(tf.reduce_sum(outputs[name], 1), tf.reduce_sum(value, 1), err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES)
def test_a_skip_shows_where_it_is_and_has_no_updates(shape):
    players = Players(shape)
    step = watched(players)
    call = tf.function(step)
    _, outputs = (call(tensors(given)) for given in batches(2, bad=((2, "actor"),)))
    assert not outputs["actor/applied"]
    assert np.isnan(outputs["actor/update_rms"]).all()
    assert not np.isfinite(rows(step, outputs, "actor")["weight_gradients/dense/kernel"])
    assert rows(step, outputs, "actor")["updates/dense/kernel"] == 0.0
    critic = rows(step, outputs, "critic")
    # The losses share a pass, and the gradient of one has none of the other's infinity.
    assert all(np.isfinite(value) for value in critic.values())
    moved = shape != "one scaler"
    assert bool(outputs["critic/applied"]) == moved
    assert (critic["updates/dense/kernel"] > 0.0) == moved
    assert np.isfinite(outputs["critic/update_rms"]).all() == moved


@pytest.mark.slow
def test_probes_change_no_bit_of_what_moves():
    bits = []
    for names in ((), ("actor", "critic")):
        players = Players("shared", kind="float16", every=2)
        call = watched(players, names) if names else players.step
        for given in batches(3, bad=((2, "critic"),)):
            call(tensors(given))
        moved = [getattr(players, name) for name in ("critic", "actor")]
        bits.append(raw(*(model.variables for model in moved), *(one.variables for one in players.optimizers.values())))
    assert bits[0] == bits[1]


class Shows(keras.layers.Layer):
    def call(self, x):
        return observe.probe(x * 2.0, "hidden") + 0.0


def test_what_is_probed_by_hand_belongs_to_the_model_whose_layer_it_is_in():
    kinds = ["activations", "activation_gradients"]
    models = {name: keras.Sequential([keras.Input([2]), Shows(), keras.layers.Dense(1)]) for name in ("a", "b")}

    def forward(x):
        return [observe.probe(tf.add_n([model(x) for model in models.values()]), "outside")] * 2

    parts = [
        part(name, model, lambda found, by=by: by * tf.reduce_mean(found[0]))
        for by, (name, model) in enumerate(models.items(), 1)
    ]
    # One of the watches does not take the layer that holds the probe.
    chosen = {"a": None, "b": [models["b"].layers[-1]]}
    watches = {name: observe.watch(models[name], layers, kinds=kinds) for name, layers in chosen.items()}
    step = loops.ComposedStep(parts, forward, probes=watches)
    outputs = step(tf.ones([4, 2]))
    for by, name in enumerate(models, 1):
        found = rows(step, outputs, name)
        assert [row.partition("/")[2] for row in found if row.startswith("activations/")].count("hidden") == 1
        assert found["activations/hidden"] == 2.0
        # 4 rows, and twice the loss in the second.
        assert found["activation_gradients/outside"] == pytest.approx(by / 4)
    assert int(tf.reduce_sum(outputs["a/counts"][step.probes["a"].names.index("activations/hidden")])) == 8


@pytest.mark.slow
def test_of_a_part_of_several_models_the_rows_are_those_of_the_watched_one():
    encoder, head = plain_model(), keras.Sequential([keras.Input([1]), keras.layers.Dense(1, name="head")])

    def loss(given):
        return squared_error(given[1], head(encoder(given[0])))

    own = part("both", [encoder, head], loss, keras.optimizers.SGD(0.1, momentum=0.9))
    step = loops.ComposedStep([own], probes={"both": observe.watch(encoder, kinds=ALL)})
    outputs = step(batch())
    assert not [name for name in step.probes["both"].names if "head" in name]
    assert [name for name in step.probes["both"].names if name.startswith("slots/")] == [
        f"slots/{layer}/{name}/momentum" for layer in ("dense", "dense_1") for name in ("kernel", "bias")
    ]
    assert outputs["both/swallowed_updates"].shape == [4]
    assert outputs["both/update_rms"].shape == [2]


@pytest.mark.slow
def test_the_noise_scale_of_a_part_is_of_the_examples_of_a_batch():
    """Two micro-batches, of which the second window is not the actor's turn."""
    players = Players("shared", every=2, dropout=0.0, accumulate=2)
    step = watched(players, kinds=["noise_scale"])
    call = tf.function(step)
    found = [call(tensors(given)) for given in batches(4)]
    known = {name: [bool(np.isfinite(one[f"{name}/noise_scale"]).all()) for one in found] for name in step.probes}
    assert known == {"critic": [False, True] * 2, "actor": [False, False, False, True]}


def test_two_parts_of_one_model_are_measured_each_in_its_own_pass():
    whole = plain_model()
    loss = lambda given: squared_error(given[1], whole(given[0]))  # noqa: E731
    parts = [part(name, layer, loss) for name, layer in zip(("first", "second"), whole.layers, strict=True)]
    step = loops.ComposedStep(parts, probes={name: observe.watch(whole) for name in ("first", "second")})
    step(batch())
    weights = [[name for name in one.names if name.startswith("weight_")] for one in step.probes.values()]
    assert weights == [[f"weight_gradients/{name}/{of}" for of in ("kernel", "bias")] for name in ("dense", "dense_1")]
