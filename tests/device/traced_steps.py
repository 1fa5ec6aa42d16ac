"""One traced step of each kind that the project offers, by name: what the audits look at."""

import functools
import inspect
import tempfile

import keras
import tensorflow as tf

import loops
import scaler
from scaler import observe, presets, strategies, weights

BATCH = tf.zeros([32, 64]), tf.zeros([32], tf.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STRATEGIES = {
    "none": scaler.NoScaling(),
    "static": scaler.Static(2.0**10),
    "dynamic": scaler.Dynamic(),
    "headroom": scaler.Headroom(),
    "log_normal": scaler.LogNormal(),
    "delayed_amax": scaler.DelayedAmax(),
    "smooth": scaler.Smooth(),
    "bounded": strategies.Bounded(scaler.Headroom(), 2.0, 2.0**18),
    "warmup": strategies.Warmup(scaler.Dynamic(), 100),
    "rising_floor": strategies.RisingFloor(scaler.Dynamic()),
    "spike_guard": scaler.SpikeGuard(scaler.Dynamic()),
    "spike_guard that clips": scaler.SpikeGuard(scaler.Dynamic(), by_tensor="clip"),
    "scheduled": strategies.Scheduled({0: scaler.Static(2.0**8), 1000: scaler.Dynamic()}),
}
BY_TENSOR = scaler.SpikeGuard(scaler.Histogram(), by_tensor="skip")
PRESETS = ("apex", "chainer", "dalle", "fairseq", "guided_diffusion", "metaseq", "mxnet", "pytorch")
"""One of each rule."""
WEIGHTS = {"masters": scaler.MasterWeights, "stochastic": weights.StochasticRounding, "kahan": weights.KahanWeights}


def model(policy="mixed_float16", *more):
    """Layers with variables of more and of fewer elements than the audit lets the host have, and with statistics."""
    keras.config.set_dtype_policy(policy)
    norm = keras.layers.BatchNormalization(center=False, scale=False, dtype="float32")
    hidden = [keras.layers.Dense(128, "relu", use_bias=False, name="hidden"), norm, *more]
    return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10, dtype="float32")])


def made(strategy=None, *, optimizer=keras.optimizers.Adam, policy="mixed_float16", probes=None, **options):
    """A `TrainStep`."""
    built = model(policy)
    if probes is not None:
        options["probes"] = observe.watch(built, **probes)
    loss_scaler = scaler.LossScaler(strategy or scaler.Dynamic())
    return loops.TrainStep(built, LOSS, optimizer(1e-3), loss_scaler=loss_scaler, **options)


def traced(*arguments, **options):
    return tf.function(made(*arguments, **options)).get_concrete_function(BATCH)


def applied(kind):
    """A step by hand, with what holds its weights."""
    built = model("float16")
    held, optimizer, loss_scaler = WEIGHTS[kind](built.trainable_variables), keras.optimizers.Adam(1e-3), _scaler()

    @tf.function
    def step(batch):
        x, y = batch
        before = scaler.snapshot(scaler.state_of(built))
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(LOSS(y, built(x, training=True)))
        grads = tape.gradient(scaled, built.trainable_variables)
        return loss_scaler.apply(optimizer, grads, held, rollback=before).finite

    return step.get_concrete_function(BATCH)


def emulated(name, **options):
    """A step in an emulated format."""
    step = made(scaler.NoScaling(), policy="float32")
    scaler.formats.emulated(name, **options)(step.model)
    return tf.function(step).get_concrete_function(BATCH)


def new_values():
    """A step with micro-batches, in which the gradient of a variable is its new value, as in Keras's float8 layers."""

    class Noting(keras.layers.Layer):
        def build(self, shape):
            self.largest = self.add_weight(shape=[1024], initializer="zeros", name="largest", dtype="float32")
            self.largest.overwrite_with_gradient = True

        def call(self, x):
            @tf.custom_gradient
            def noting(x, known):
                return x, lambda upstream: (upstream, known + tf.cast(tf.reduce_max(tf.abs(upstream)), tf.float32))

            return noting(x, tf.convert_to_tensor(self.largest))

    built = model("mixed_float16", Noting())
    loss_scaler, optimizer = scaler.LossScaler(scaler.Dynamic()), keras.optimizers.Adam(1e-3)
    step = loops.TrainStep(built, LOSS, optimizer, loss_scaler=loss_scaler, accumulate=4)
    return tf.function(step).get_concrete_function(BATCH)


def narrow_convolution():
    """A step of a convolution whose sums are narrow."""
    keras.config.set_dtype_policy("float32")
    layers = [keras.layers.Reshape([8, 8, 1]), keras.layers.Conv2D(32, 3, 2, "same"), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input([64]), *layers, keras.layers.Dense(10)])
    scaler.formats.emulated("float32", accumulators="bfloat16", chunk=8)(model)
    loss_scaler = scaler.LossScaler(scaler.NoScaling())
    step = loops.TrainStep(model, LOSS, keras.optimizers.Adam(1e-3), loss_scaler=loss_scaler)
    return tf.function(step).get_concrete_function(BATCH)


def unit_scaled():
    """A step of a unit-scaled model."""
    step = made(scaler.NoScaling())
    scaler.formats.unit_scaled(step.model)
    return tf.function(step).get_concrete_function(BATCH)


def layerwise():
    rescaled, groups = scaler.layerwise.insert_rescales(model(), after=["hidden"])
    own = scaler.LossScaler(BY_TENSOR)
    step = loops.TrainStep(rescaled, LOSS, keras.optimizers.Adam(1e-3), loss_scaler=own, layerwise=groups)
    return tf.function(step).get_concrete_function(BATCH)


def per_loss(embeds=False):
    built, optimizer = embedding() if embeds else model(), keras.optimizers.Adam(1e-3)
    batch = (tf.zeros([32, 64], tf.int64), BATCH[1]) if embeds else BATCH
    losses = scaler.PerLoss({"task": scaler.Dynamic(), "penalty": scaler.Headroom()})

    @tf.function
    def step(batch):
        x, y = batch
        before = scaler.snapshot(scaler.state_of(built))
        with tf.GradientTape(persistent=True) as tape:
            penalty = tf.add_n([tf.nn.l2_loss(variable) for variable in built.trainable_variables])
            scaled = losses.scale({"task": LOSS(y, built(x, training=True)), "penalty": penalty})
        grads = {name: tape.gradient(loss, built.trainable_variables) for name, loss in scaled.items()}
        return losses.apply(optimizer, grads, built.trainable_variables, rollback=before).finite

    return step.get_concrete_function(batch)


def composed(in_turn, probes=None, **options):
    """Two models with an optimizer each: in turn, one with a teacher, or decided about together."""
    names = "first", "second"
    models = {name: model("float16") for name in names}
    if probes is not None:
        options["probes"] = {name: observe.watch(one, **probes) for name, one in models.items()}
    every, teachers = ({"second": 2}, {"second": model("float16")}) if in_turn else ({}, {})

    def losses(batch):
        return {name: LOSS(batch[1], one(batch[0], training=True)) for name, one in models.items()}

    def loss(name):
        return (lambda batch: LOSS(batch[1], models[name](batch[0], training=True))) if in_turn else _item(name)

    parts = [
        loops.Part(
            name,
            models[name],
            loss(name),
            keras.optimizers.Adam(1e-3),
            every=every.get(name, 1),
            teacher=teachers.get(name),
            clip_norm=1.0,
        )
        for name in names
    ]
    step = (
        loops.ComposedStep(parts, **options)
        if in_turn
        else loops.ComposedStep(parts, losses, loss_scaler=_scaler(), **options)
    )
    return tf.function(step).get_concrete_function(BATCH)


def _item(name):
    return lambda found: found[name]


def embedding():
    """A model with a gradient that is a `tf.IndexedSlices`, with indices that come twice."""
    keras.config.set_dtype_policy("mixed_float16")
    layers = [keras.layers.Embedding(500, 16), keras.layers.Flatten(), keras.layers.Dense(10, dtype="float32")]
    # Of int32 indices the embedding itself computes in the host's memory.
    return keras.Sequential([keras.Input([64], dtype="int64"), *layers])


def embedded(**options):
    step = loops.TrainStep(embedding(), LOSS, keras.optimizers.Adam(1e-3), loss_scaler=_scaler(), **options)
    return tf.function(step).get_concrete_function((tf.zeros([32, 64], tf.int64), BATCH[1]))


def measured():
    """What looks at tensors, called by hand."""

    @tf.function
    def look(*tensors):
        updates = tf.cast(tensors[0], tf.float32)
        shares = [observe.swallowed_share(values, updates) for values in tensors]
        statistics = scaler.gradients.amax(tensors), scaler.gradients.histogram(tensors, [1.0, 8.0])
        return observe.exponents(tensors), observe.measured({"rows": tensors}), shares, statistics

    return look.get_concrete_function(*(tf.TensorSpec([4096], name) for name in ("float16", "bfloat16", "float32")))


def fitted(protect, **options):
    """Keras's train function, as `fit` makes it."""
    built = model("mixed_float16", keras.layers.Dropout(0.5))
    optimizer = scaler.LossScaleOptimizer(keras.optimizers.Adam(1e-3, **options), scaler.Dynamic())
    built.compile(optimizer, LOSS, metrics=["accuracy"], jit_compile=False)
    if protect:
        scaler.protect(built)
    dataset = tf.data.Dataset.from_tensors(BATCH)
    built.fit(dataset, verbose=0, shuffle=False)
    # Keras holds what it traced in a function that stays eager.
    inside = inspect.getclosurevars(built.train_function).nonlocals.values()
    function = next(one for one in inside if hasattr(one, "get_concrete_function"))
    return function.get_concrete_function(iter(dataset))


def looped(steps_per_call, *, epochs=None, traces=False, **options):
    """What a `Loop` calls between two visits, with a `Trace` or without."""
    dataset = tf.data.Dataset.from_tensors(BATCH).repeat(epochs)
    with tempfile.TemporaryDirectory() as folder:
        actions = [loops.Trace(f"{folder}/steps.trace", every=1)] if traces else []
        loop = loops.Loop(made(**options), dataset, steps_per_call=steps_per_call, actions=actions, jit_compile=False)
        if traces:
            loop.run(steps_per_call)
    if steps_per_call == 1:
        return tf.function(lambda batch: loop.calls._one(batch)).get_concrete_function(BATCH)
    iterator = iter(dataset)
    places = tf.constant(1)
    return tf.function(lambda limit: loop.calls._many(iterator, limit, places)).get_concrete_function(tf.constant(5))


def stacked():
    """What a `Loop` over a source calls, which is no dataset: a loop over a stack of batches."""
    loop = loops.Loop(made(), iter([BATCH] * 5), steps_per_call=5, jit_compile=False)
    stack = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape], part.dtype), BATCH)
    number = tf.TensorSpec([], tf.int32)
    return tf.function(loop.calls._many).get_concrete_function(stack, number, number)


def _scaler():
    return scaler.LossScaler(scaler.Dynamic())


ALL_KINDS = {"kinds": observe.KINDS}
TRACED = {
    **{f"strategy {name}": functools.partial(traced, strategy) for name, strategy in STRATEGIES.items()},
    **{f"preset {name}": functools.partial(traced, getattr(presets, name)()) for name in PRESETS},
    **{f"weights {name}": functools.partial(applied, name) for name in ("masters", "kahan")},
    **{f"step with {name}": functools.partial(traced, policy="float16", masters=WEIGHTS[name]) for name in WEIGHTS},
    "16-bit updates": functools.partial(traced, policy="bfloat16", allow_16bit_updates=True),
    "an optimizer that is looked at": functools.partial(traced, optimizer=keras.optimizers.Adafactor),
    "retry": functools.partial(traced, retry=True),
    "emulated float8": lambda: emulated("float8_e4m3fn"),
    "emulated mxfp4": lambda: emulated("mxfp4", stochastic=["gradients"]),
    "emulated nvfp4": lambda: emulated("nvfp4"),
    "emulated, float16 sums": lambda: emulated("float16", accumulators="float16"),
    "convolution, bfloat16 sums": narrow_convolution,
    "unit-scaled": unit_scaled,
    "layerwise, histogram, spike_guard by tensor": layerwise,
    "per loss": per_loss,
    "per loss, embedding": functools.partial(per_loss, embeds=True),
    "composed, in turn": functools.partial(composed, True),
    "composed, together": functools.partial(composed, False),
    "composed, in turn, retry": functools.partial(composed, True, retry=True),
    "composed, together, retry": functools.partial(composed, False, retry=True),
    "composed, in turn, probes": functools.partial(composed, True, probes=ALL_KINDS),
    "composed, together, probes": functools.partial(composed, False, probes=ALL_KINDS),
    "embedding": functools.partial(embedded, clip_norm=1.0),
    "embedding, accumulate, clip by norm": functools.partial(embedded, accumulate=4, clip=scaler.ClipByNorm(1.0)),
    "clip_norm": functools.partial(traced, clip_norm=1.0),
    "clip by value": functools.partial(traced, clip=scaler.ClipByValue(1.0)),
    "accumulate": functools.partial(traced, accumulate=4),
    "accumulate, new values": new_values,
    "accumulate, clip_norm": functools.partial(traced, accumulate=4, clip_norm=1.0),
    "probes": functools.partial(traced, probes={}),
    "probes of all": functools.partial(traced, policy="float16", probes=ALL_KINDS),
    "probes of all, every 10th": functools.partial(traced, policy="float16", probes=ALL_KINDS | {"every": 10}),
    "measured by hand": measured,
    "fit": functools.partial(fitted, False),
    "fit, protect": functools.partial(fitted, True),
    "fit, protect, accumulate": functools.partial(fitted, True, gradient_accumulation_steps=4),
    "loop of 1": functools.partial(looped, 1),
    "loop of 5": functools.partial(looped, 5),
    "loop of 5, over a stack": stacked,
    "loop of 5, until the data ends": functools.partial(looped, 5, epochs=7),
    "loop of 5, Trace, stochastic weights": functools.partial(
        looped, 5, traces=True, policy="float16", masters=WEIGHTS["stochastic"]
    ),
}
