"""`protect` around models without a `call`: the patterns of published examples, in their smallest form."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import scaler


def mlp(name, inputs, outputs, policy):
    layers = [keras.layers.Dense(8, activation="relu", dtype=policy)]
    layers += [keras.layers.BatchNormalization(dtype=policy), keras.layers.Dropout(0.1, dtype=policy)]
    layers += [keras.layers.Dense(outputs, dtype=policy), keras.layers.Activation("linear", dtype="float32")]
    return keras.Sequential([keras.Input([inputs]), *layers], name=name)


class WithTrackers(keras.Model):
    names: tuple = ()

    def __init__(self):
        super().__init__()
        self.trackers = [keras.metrics.Mean(name=name) for name in self.names]

    def compile(self, **arguments):
        optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scaler.Static(64.0))
        super().compile(optimizer=optimizer, **arguments)

    @property
    def metrics(self):
        return self.trackers

    def track(self, *values):
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def descend(self, loss, part=None):
        """One step, for weights that the model, or a part of it, may make while `loss` is computed."""
        with tf.GradientTape() as tape:
            value = loss()
            scaled = self.optimizer.scale_loss(value)
        weights = (part or self).trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return value


class VAE(WithTrackers):
    names = ("loss", "kl_loss")

    def __init__(self, policy):
        super().__init__()
        self.encoder, self.decoder = mlp("encoder", 4, 4, policy), mlp("decoder", 2, 4, policy)
        self.seeds = keras.random.SeedGenerator(2)

    def train_step(self, data):
        terms = []

        def loss():
            mean, log_variance = tf.split(self.encoder(data, training=True), 2, axis=1)
            code = mean + tf.exp(0.5 * log_variance) * keras.random.normal([8, 2], seed=self.seeds)
            terms.append(-0.5 * tf.reduce_mean(1 + log_variance - mean**2 - tf.exp(log_variance)))
            return tf.reduce_mean((self.decoder(code, training=True) - data) ** 2) + terms[0]

        return self.track(self.descend(loss), *terms)


class Diffusion(WithTrackers):
    """With a network that follows the trained one, and is trainable too."""

    names = ("n_loss",)

    def __init__(self, policy):
        super().__init__()
        self.network = mlp("network", 4, 4, policy)
        self.ema_network = keras.models.clone_model(self.network)
        self.seeds = keras.random.SeedGenerator(3)

    def train_step(self, data):
        noise = keras.random.normal([8, 4], seed=self.seeds)

        def off_the_noise():
            return tf.reduce_mean((self.network(data + noise, training=True) - noise) ** 2)

        loss = self.descend(off_the_noise, self.network)
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return self.track(loss)


def batches(*bad):
    x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)
    for index in bad:
        x[index, 2] = np.nan
    return x


def take(model, batch):
    model.fit(tf.data.Dataset.from_tensor_slices(batch[np.newaxis]), verbose=0, shuffle=False)


def made(kind, policy, **mode):
    keras.utils.set_random_seed(5)
    model = kind(policy)
    model.compile(**{"jit_compile": False, **mode})
    assert scaler.protect(model) is model
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "mode"), [("mixed_float16", {}), ("float16", {"run_eagerly": True})], ids=["graph", "eager"]
)
def test_a_skipped_batch_never_happened(policy, mode):
    """Trains with a bad batch and without it: one model, set back in between."""
    x, ends, model = batches(1), [], made(Diffusion, policy, **mode)
    take(model, batches()[0])
    start = [(variable, np.asarray(variable)) for variable in (*model.variables, *model.optimizer.variables)]
    for own in (x, np.delete(x, 1, 0)):
        history = model.fit(tf.data.Dataset.from_tensor_slices(own), verbose=0, shuffle=False).history
        assert int(model.optimizer.iterations) == len(x)
        assert all(np.isfinite(np.asarray(v, np.float64)).all() for v in model.variables if "seed" not in v.path)
        ends.append((history, raw(model.variables), raw(model.metrics_variables)))
        for variable, value in start:
            variable.assign(value)
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_variables_that_cannot_be_put_back_are_named():
    class Late(VAE):
        def train_step(self, data):
            if not hasattr(self, "late") and tf.executing_eagerly():
                self.late = keras.layers.BatchNormalization(center=False, scale=False)
                self.late(data, training=True)
            return super().train_step(data)

    model = made(Late, "mixed_float16", run_eagerly=True)
    with pytest.raises(scaler.InvalidArgument, match=r"made the variables \[.*moving_mean"):
        take(model, batches()[0])
