"""`protect` around models without a `call`: the patterns of published examples, in their smallest form."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import scaler


def wrapped(rate=1e-2):
    return scaler.LossScaleOptimizer(keras.optimizers.Adam(rate), scaler.Static(64.0))


def mlp(name, inputs, outputs, policy, lazy=False, batch_norm=True):
    layers = [keras.layers.Dense(8, activation="relu", dtype=policy)]
    layers += [keras.layers.BatchNormalization(dtype=policy), keras.layers.Dropout(0.1, dtype=policy)]
    layers += [keras.layers.Dense(outputs, dtype=policy), keras.layers.Activation("linear", dtype="float32")]
    return keras.Sequential(layers if lazy else [keras.Input([inputs]), *layers], name=name)


class WithTrackers(keras.Model):
    names: tuple = ()

    def __init__(self):
        super().__init__()
        self.trackers = [keras.metrics.Mean(name=name) for name in self.names]

    @property
    def metrics(self):
        return self.trackers

    def track(self, *values):
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def optimizers(self):
        return [self.optimizer]


def descend(optimizer, loss, *models):
    """One step of `optimizer`, for weights that the models may make while `loss` is computed."""
    with tf.GradientTape() as tape:
        value = loss()
        scaled = optimizer.scale_loss(value)
    weights = [weight for model in models for weight in model.trainable_weights]
    optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
    return value


class GAN(WithTrackers):
    names = ("d_loss", "g_loss")

    def __init__(self, policy, lazy):
        super().__init__()
        self.discriminator = mlp("discriminator", 4, 1, policy, lazy)
        self.generator = mlp("generator", 3, 4, policy, lazy)
        self.seeds = keras.random.SeedGenerator(1)

    def compile(self, **arguments):
        super().compile(**arguments)
        self.d_optimizer, self.g_optimizer = wrapped(), wrapped()

    def train_step(self, real):
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal([8, 3], seed=self.seeds)
        fake = self.generator(noise, training=True)
        both = tf.concat([fake, real], 0)
        labels = tf.concat([tf.ones([8, 1]), tf.zeros([8, 1])], 0)

        def of_discriminator():
            return loss(labels, self.discriminator(both, training=True))

        def of_generator():
            g_loss = loss(tf.zeros([8, 1]), self.discriminator(self.generator(noise, training=True), training=True))
            return g_loss * (1.0 + 0.0 * tf.reduce_mean(real))  # A batch that breaks one loss is to break both.

        d_loss = descend(self.d_optimizer, of_discriminator, self.discriminator)
        return self.track(d_loss, descend(self.g_optimizer, of_generator, self.generator))

    def optimizers(self):
        return [self.d_optimizer, self.g_optimizer]


class VAE(WithTrackers):
    names = ("loss", "kl_loss")

    def __init__(self, policy, lazy):
        super().__init__()
        self.encoder, self.decoder = mlp("encoder", 4, 4, policy, lazy), mlp("decoder", 2, 4, policy, lazy)
        self.seeds = keras.random.SeedGenerator(2)

    def compile(self, **arguments):
        super().compile(optimizer=wrapped(), **arguments)

    def train_step(self, data):
        terms = []

        def loss():
            mean, log_variance = tf.split(self.encoder(data, training=True), 2, axis=1)
            code = mean + tf.exp(0.5 * log_variance) * keras.random.normal([8, 2], seed=self.seeds)
            terms.append(-0.5 * tf.reduce_mean(1 + log_variance - mean**2 - tf.exp(log_variance)))
            return tf.reduce_mean((self.decoder(code, training=True) - data) ** 2) + terms[0]

        return self.track(descend(self.optimizer, loss, self), *terms)


class Diffusion(WithTrackers):
    """With a network that follows the trained one, and is trainable too."""

    names = ("n_loss",)

    def __init__(self, policy, lazy):
        super().__init__()
        del lazy  # What is cloned has to be built.
        self.network = mlp("network", 4, 4, policy)
        self.ema_network = keras.models.clone_model(self.network)
        self.seeds = keras.random.SeedGenerator(3)

    def compile(self, **arguments):
        super().compile(optimizer=wrapped(), **arguments)

    def train_step(self, data):
        noise = keras.random.normal([8, 4], seed=self.seeds)

        def off_the_noise():
            return tf.reduce_mean((self.network(data + noise, training=True) - noise) ** 2)

        loss = descend(self.optimizer, off_the_noise, self.network)
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return self.track(loss)


class Contrastive(WithTrackers):
    names = ("c_loss", "p_loss", "p_acc")

    def __init__(self, policy, lazy):
        super().__init__()
        self.encoder, self.head = mlp("encoder", 4, 4, policy, lazy), mlp("head", 4, 4, policy, lazy)
        self.probe = keras.Sequential([keras.layers.Dense(2, dtype="float32")], name="probe")

    def compile(self, **arguments):
        super().compile(**arguments)
        self.contrastive_optimizer, self.probe_optimizer = wrapped(), wrapped()

    def train_step(self, data):
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        labels, logits = tf.cast(data[:, 0] > 0, tf.int32), []

        def contrast():
            one, other = (self.head(self.encoder(data + shift, training=True), training=True) for shift in (0.0, 0.1))
            return entropy(tf.range(8), tf.matmul(one, other, transpose_b=True))

        def probe():
            logits.append(self.probe(self.encoder(data, training=False)))
            return entropy(labels, logits[0])

        c_loss = descend(self.contrastive_optimizer, contrast, self.encoder, self.head)
        p_loss = descend(self.probe_optimizer, probe, self.probe)
        right = tf.equal(tf.argmax(logits[0], 1, tf.int32), labels)
        return self.track(c_loss, p_loss, tf.reduce_mean(tf.cast(right, tf.float32)))

    def optimizers(self):
        return [self.contrastive_optimizer, self.probe_optimizer]


def batches(*bad):
    x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)
    for index in bad:
        x[index, 2] = np.nan
    return x


def take(model, batch):
    model.fit(tf.data.Dataset.from_tensor_slices(batch[np.newaxis]), verbose=0, shuffle=False)


def made(kind, policy, lazy=False, **mode):
    keras.utils.set_random_seed(5)
    model = kind(policy, lazy)
    model.compile(**{"jit_compile": False, **mode})
    assert scaler.protect(model) is model
    return model


def run(kind, policy, lazy, x, **mode):
    model = made(kind, policy, lazy, **mode)
    history = model.fit(tf.data.Dataset.from_tensor_slices(x), verbose=0, shuffle=False).history
    return model, history


def check(kind, policy, lazy, bad, **mode):
    x = batches(*bad)
    model, history = run(kind, policy, lazy, x, **mode)
    clean, expected = run(kind, policy, lazy, np.delete(x, bad, 0), **mode)
    assert [int(optimizer.iterations) for optimizer in model.optimizers()] == [4 - len(bad)] * len(model.optimizers())
    assert history == expected
    assert raw(model.variables) == raw(clean.variables)
    assert raw(model.metrics_variables) == raw(clean.metrics_variables)
    assert all(np.isfinite(np.asarray(v, np.float64)).all() for v in model.variables if "seed" not in v.path)


@pytest.mark.slow
@pytest.mark.exhaustive_with("GAN-mixed_float16", "VAE-float16")
@pytest.mark.parametrize(
    ("kind", "policy"),
    [(GAN, "mixed_float16"), (VAE, "float16"), (Diffusion, "mixed_float16")],
)
def test_a_skipped_batch_never_happened(kind, policy):
    check(kind, policy, False, [1])


@pytest.mark.slow
@pytest.mark.exhaustive_with("{'jit_compile': True}")
@pytest.mark.parametrize("mode", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_in_other_modes(mode):
    check(Diffusion, "float16", False, [1], **mode)


@pytest.mark.slow
@pytest.mark.exhaustive_with("VAE", "Contrastive")
@pytest.mark.parametrize(
    ("kind", "mode"), [(VAE, {"run_eagerly": True}), (Contrastive, {})], ids=["VAE", "Contrastive"]
)
def test_what_the_first_step_makes_is_put_back_too(kind, mode):
    check(kind, "float16", True, [0, 2], **mode)


@pytest.mark.exhaustive
def test_a_teacher_is_put_back_where_the_optimizer_was_built_for_it_too():
    model = made(Diffusion, "float16")
    model.optimizer.build(model.trainable_variables)
    x = batches(1)
    take(model, x[0])
    before, followed = raw(model.variables), raw(model.ema_network.trainable_variables)
    take(model, x[1])
    assert raw(model.variables) == before
    take(model, x[2])
    assert raw(model.ema_network.trainable_variables) != followed


@pytest.mark.exhaustive
def test_one_optimizer_that_applies_keeps_what_it_did_where_another_skips():
    """The generator's loss alone is broken: the discriminator has moved, with its slots."""
    model = made(GAN, "mixed_float16")
    scale = model.g_optimizer.scale_loss
    model.g_optimizer.scale_loss = lambda loss: scale(loss * float("nan"))
    before = {name: raw(getattr(model, name).variables) for name in ("discriminator", "generator")}
    take(model, batches()[0])
    assert int(model.d_optimizer.iterations) == 1
    assert int(model.g_optimizer.iterations) == 0
    assert raw(model.generator.variables) == before["generator"]
    moved = [a != b for a, b in zip(raw(model.discriminator.variables), before["discriminator"], strict=True)]
    trained = [variable.trainable for variable in model.discriminator.variables]
    assert moved == trained


@pytest.mark.exhaustive
def test_each_optimizer_of_a_model_is_logged_under_its_name():
    model = made(GAN, "mixed_float16", run_eagerly=True)
    model.g_optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(), scaler.Static(32.0))
    x = np.concatenate(batches(1)[:2])
    history = model.fit(x, batch_size=8, shuffle=False, verbose=0, callbacks=[scaler.LossScaleLogger()]).history
    logs = {name: values[-1] for name, values in history.items() if "optimizer" in name}
    assert (logs["d_optimizer_loss_scale"], logs["g_optimizer_loss_scale"]) == (64.0, 32.0)
    assert logs["d_optimizer_skipped_steps"] == int(model.d_optimizer.loss_scaler.counters.skipped) > 0
    assert set(logs) == {
        f"{one}_optimizer_{what}" for one in "dg" for what in ("loss_scale", "skipped_steps", "last_skip")
    }


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
