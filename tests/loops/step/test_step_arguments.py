"""Guards what steps and their parts refuse when they are made or first called: what else would go wrong in silence.

Each sentence stands whole in the snapshots of this file.
"""

import re

import keras
import pytest
import tensorflow as tf
from loop_cases import static
from models import batch, one_layer, plain_model, squared_error

import loops
import scaler
from scaler import observe

SGD = keras.optimizers.SGD
X, Y = PAIR = batch()
MSE, MAE = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()


def train(**given):
    given = {"model": one_layer(), "loss_fn": squared_error, "optimizer": SGD()} | given
    return loops.TrainStep(given.pop("model"), given.pop("loss_fn"), given.pop("optimizer"), **given)


def part(name="one", **given):
    model = given.pop("model", None) or one_layer()
    given = {"loss_fn": lambda pair: squared_error(pair[1], model(pair[0])), "optimizer": SGD()} | given
    return loops.Part(name, model, given.pop("loss_fn"), given.pop("optimizer"), **given)


def composed(forward=None, parts=None, given=None, **of_part):
    """A step of one part, or of those given; `given` are the step's own arguments."""
    return loops.ComposedStep([part(**of_part)] if parts is None else parts, forward, **(given or {}))


def twice(**shared):
    return composed(parts=[part("one", **shared), part("two", **shared)])


def together(given=None, **arguments):
    """Of one forward pass."""
    return composed(lambda pair: pair, given=given, **arguments)


def frozen():
    model = plain_model()
    model.trainable = False
    return model


def frozen_later(make):
    step = make(model=(model := plain_model()))
    model.layers[0].trainable = False
    step(PAIR)


def changed(step, compiled):
    """What is called with a setting that it was not made with."""
    call = compiled(step)
    call(PAIR)
    step.retry = True
    call(PAIR)


def called(layer):
    layer(tf.zeros([1, 2]))
    return layer


def rescaled(kind="float32"):
    return scaler.layerwise.insert_rescales(plain_model(kind), after=["dense"])


def of_python(y, prediction):
    return tf.py_function(lambda a, b: tf.reduce_mean(tf.square(a - b)), [y, prediction], tf.float32)


def drawn(draw):
    """A compiled step in turns, which is retried, of a loss that draws."""
    weight = tf.Variable(1.0)
    own = part(model=weight, loss_fn=lambda x: weight * draw(x), every=2, loss_scaler=scaler.LossScaler())
    return tf.function(composed(parts=[own], given={"retry": True}))(tf.constant(1.0))


def outputs(losses, weights=None, named=True):
    """A step of a model with the outputs "a" and "b", which has the losses."""
    x = keras.Input([4])
    a, b = keras.layers.Dense(1, name="a")(x), keras.layers.Dense(2, name="b")(x)
    model = keras.Model(x, {"a": a, "b": b} if named else [a, b])
    return train(model=model, loss_fn=losses, loss_weights=weights)


def returns(result):
    return train(loss_fn=lambda y, prediction: result(tf.constant(1.0)))(PAIR)


def watched(probes, given=None, **arguments):
    return composed(given={"probes": probes} | (given or {}), **arguments)


def one_watch_for_two():
    whole = plain_model()
    watch, loss = observe.watch(whole), {"loss_fn": lambda pair: squared_error(pair[1], whole(pair[0]))}
    parts = [part(name, model=layer, **loss) for name, layer in zip(("first", "second"), whole.layers, strict=True)]
    composed(parts=parts, given={"probes": {"first": watch, "second": watch}})


def probed(kinds=observe.KINDS, **arguments):
    """A `TrainStep` with probes of its model."""
    model = arguments.pop("model", None) or one_layer()
    return train(model=model, probes=observe.watch(model, kinds=kinds), **arguments)


def of_examples(*given):
    model = plain_model()
    probes = {"one": observe.watch(model, kinds=["noise_scale"])}
    watched(probes, model=model, loss_fn=lambda pair: pair[0] * 0.0)(given)


def named_as_probes():
    model = plain_model()
    loss = lambda pair: (squared_error(pair[1], model(pair[0])), {"amax": tf.constant(0.0)})  # noqa: E731
    watched({"one": observe.watch(model)}, model=model, loss_fn=loss)(PAIR)


def traced(name, value):
    step = probed(["weights"])
    step(PAIR)
    setattr(step, name, value)


def teaches(teacher=None, **arguments):
    return part(teacher=one_layer() if teacher is None else teacher, **arguments)


def its_own_teacher():
    model = plain_model()
    teaches(model, model=model)


def moved_teacher():
    teacher = one_layer()
    composed(parts=[teaches(teacher), part("other", model=teacher)])


def a_scaler(strategy=None):
    return scaler.LossScaler(strategy or scaler.Static(2.0))


GUARD = scaler.SpikeGuard(scaler.Dynamic(), by_tensor="skip")
HALVING = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
REFUSED = {
    "model": lambda: train(model="resnet"),
    "model: none of it is trainable": lambda: train(model=frozen()),
    "model: rescales without their Layerwise": lambda: train(model=rescaled()[0]),
    "loss_fn": lambda: train(loss_fn=3),
    "loss_fn: a class": lambda: train(loss_fn=keras.losses.MeanSquaredError),
    "jit_compile": lambda: train(jit_compile="yes"),
    "optimizer": lambda: train(optimizer=5),
    "optimizer: an unknown name": lambda: train(optimizer="adamm"),
    "optimizer: a name that needs more": lambda: train(optimizer="lossscaleoptimizer"),
    "optimizer: a class": lambda: train(optimizer=SGD),
    "optimizer: it scales": lambda: train(optimizer=keras.optimizers.LossScaleOptimizer(SGD())),
    "optimizer: it accumulates": lambda: train(optimizer=SGD(gradient_accumulation_steps=3)),
    "optimizer: attempts of another scaler": lambda: train(optimizer=SGD(loops.ByAttempts(HALVING, a_scaler()))),
    "loss_scaler": lambda: train(loss_scaler=1024.0),
    "loss_scaler: a class": lambda: train(loss_scaler=scaler.Dynamic),
    "accumulate: 0": lambda: train(accumulate=0),
    "accumulate: a float": lambda: train(accumulate=2.0),
    "accumulate: a bool": lambda: train(accumulate=True),
    "clip_norm: 0": lambda: train(clip_norm=0.0),
    "clip_norm: negative, in windows": lambda: train(clip_norm=-1, accumulate=2),
    "clip": lambda: train(clip=1.0),
    "clip: two": lambda: train(clip=scaler.ClipByNorm(1.0), clip_norm=1.0),
    "masters": lambda: train(masters="kahan"),
    "masters: none needed": lambda: train(
        model=plain_model("bfloat16"), masters=scaler.weights.KahanWeights, allow_16bit_updates=True
    ),
    "layerwise": lambda: train(layerwise=scaler.Dynamic()),
    "changed: frozen": lambda: frozen_later(train),
    "changed: compiled": lambda: changed(train(model=one_layer()), tf.function),
    "changed: composed": lambda: changed(composed(), lambda step: step),
    "retry": lambda: train(retry="yes"),
    "retry: with probes": lambda: probed(retry=True),
    "retry: compiled passes": lambda: train(retry=True, jit_compile=True),
    "retry: passes compiled later": lambda: setattr(train(retry=True), "jit_compile", True),
    "retry: a loss that calls Python": lambda: tf.function(
        train(loss_fn=of_python, retry=True, loss_scaler=scaler.LossScaler())
    )(PAIR),
    "probes: no watch": lambda: setattr(train(), "probes", 5),
    "probes: of another model": lambda: setattr(train(), "probes", observe.watch(plain_model())),
    "probes: of layer-wise scales": lambda: probed(
        model=(made := rescaled("float16"))[0], layerwise=made[1], kinds=["weights"]
    ),
    "probes: after the trace": lambda: traced("probes", None),
    "probes: a noise scale of one batch": lambda: probed(["noise_scale"])(PAIR),
    "probes: a loss named as they are": lambda: probed(
        loss_fn=lambda y, p: (squared_error(y, p), {"amax": tf.constant(0.0)})
    )(PAIR),
    "probes: a loss named as a gauge": lambda: probed(
        ["update_rms"], loss_fn=lambda y, p: (squared_error(y, p), {"update_rms": tf.constant(0.0)})
    )(PAIR),
    "jit_compile: after the trace": lambda: traced("jit_compile", True),
    "returned: two losses": lambda: returns(lambda loss: (loss, loss)),
    "returned: three": lambda: returns(lambda loss: (loss, {}, loss)),
    "returned: a dict": lambda: returns(lambda loss: {"loss": loss}),
    "returned: nothing": lambda: returns(lambda loss: None),
    "returned: a name of the step": lambda: returns(lambda loss: (loss, {"applied": loss})),
    "returned: a name of a guard": lambda: train(
        loss_fn=lambda y, p: (squared_error(y, p), {"norm_limit": 1.0}), loss_scaler=a_scaler(GUARD)
    )(PAIR),
    "losses: a weight of none": lambda: outputs({"a": MSE}, {"c": 1.0}),
    "losses: too few weights": lambda: outputs([MSE, MSE], [1.0]),
    "losses: weights of one": lambda: outputs(MSE, [1.0]),
    "losses: none": lambda: outputs({}),
    "losses: None": lambda: outputs({"a": MSE, "b": None}),
    "losses: an unknown output": lambda: outputs({"c": MSE})((X, {"a": Y, "b": Y})),
    "losses: too few": lambda: outputs([MSE], named=False)((X, (Y, Y))),
    "ByAttempts: no schedule": lambda: loops.ByAttempts(0.1, a_scaler()),
    "ByAttempts: no scaler": lambda: loops.ByAttempts(HALVING, scaler.Dynamic()),
    "ByAttempts: from a configuration": lambda: loops.ByAttempts.from_config(
        loops.ByAttempts(HALVING, a_scaler()).get_config()
    ),
    "Part: name": lambda: part("a b"),
    "Part: model": lambda: part(model=5),
    "Part: a model that is not built": lambda: part(model=keras.Sequential([keras.layers.Dense(1)], name="late")),
    "Part: nothing to move": lambda: part(model=called(keras.layers.ReLU())),
    "Part: loss_fn": lambda: part(loss_fn=5),
    "Part: optimizer": lambda: part(optimizer=None),
    "Part: an optimizer that scales": lambda: part(optimizer=scaler.LossScaleOptimizer(SGD())),
    "Part: loss_scaler": lambda: part(loss_scaler=5),
    "Part: every": lambda: part(every=0),
    "Part: clip_norm": lambda: part(clip_norm=0.0),
    "Part: a teacher of another shape": lambda: teaches(plain_model(ends=[keras.layers.Dense(1, name="end")])),
    "Part: a teacher that is the student": its_own_teacher,
    "Part: a teacher that is no model": lambda: teaches(5),
    "Part: momentum": lambda: teaches(momentum=1.0),
    "ComposedStep: no list": lambda: loops.ComposedStep(5),
    "ComposedStep: an empty list": lambda: loops.ComposedStep([]),
    "ComposedStep: forward": lambda: composed(5),
    "ComposedStep: a name twice": lambda: composed(parts=[part(), part()]),
    "ComposedStep: a variable twice": lambda: twice(model=plain_model()),
    "ComposedStep: an optimizer twice": lambda: twice(optimizer=SGD(name="both")),
    "ComposedStep: a scaler twice": lambda: twice(loss_scaler=a_scaler()),
    "ComposedStep: a teacher that is trained": moved_teacher,
    "ComposedStep: windows in turns": lambda: composed(given={"accumulate": 2}),
    "ComposedStep: an optimizer that accumulates": lambda: composed(optimizer=SGD(gradient_accumulation_steps=2)),
    "ComposedStep: retry": lambda: composed(given={"retry": "yes"}),
    "ComposedStep: one scaler in turns": lambda: composed(given={"loss_scaler": a_scaler()}),
    "ComposedStep: one scaler that is none": lambda: together({"loss_scaler": 5}),
    "ComposedStep: one scaler and one more": lambda: together({"loss_scaler": a_scaler()}, loss_scaler=a_scaler()),
    "ComposedStep: one scaler and turns": lambda: together({"loss_scaler": a_scaler()}, every=2),
    "ComposedStep: a guard for all": lambda: together({"loss_scaler": a_scaler(GUARD)}),
    "ComposedStep: no gradient": lambda: composed(loss_fn=lambda pair: tf.reduce_sum(pair[0]))(PAIR),
    "ComposedStep: a name of the step": lambda: composed(loss_fn=lambda pair: (0.0, {"applied": 1.0}))(PAIR),
    "ComposedStep: frozen later": lambda: frozen_later(composed),
    "ComposedStep: retried random numbers": lambda: drawn(lambda x: tf.random.normal([])),
    "ComposedStep: retried Python": lambda: drawn(lambda x: tf.py_function(lambda y: 2.0 * y, [x], tf.float32)),
    "ComposedStep: probes of no part": lambda: watched({"c": 1}),
    "ComposedStep: no probes": lambda: watched({}),
    "ComposedStep: probes that are no watch": lambda: watched({"one": 3}),
    "ComposedStep: probes of another part": lambda: watched({"one": observe.watch(plain_model())}),
    "ComposedStep: probes and retry": lambda: watched(
        {"one": observe.watch(model := plain_model())}, {"retry": True}, model=model
    ),
    "ComposedStep: one watch for two parts": one_watch_for_two,
    "ComposedStep: a name of the probes": named_as_probes,
    "ComposedStep: a noise scale without examples": lambda: of_examples(tf.constant(1.0), tf.zeros([2, 4])),
    "ComposedStep: a noise scale of one batch": lambda: of_examples(tf.zeros([2, 4]), tf.constant(1.0)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sentences(case, snapshot):
    with pytest.raises((scaler.InvalidArgument, loops.BadOutputs)) as caught:
        REFUSED[case]()
    assert "in user code" not in str(caught.value)
    said = re.sub(r" at 0x\w+", "", str(caught.value))
    assert f"{type(caught.value).__name__}: {said}" == snapshot


@pytest.mark.parametrize("name", ["adam", "SGD"])
def test_the_name_of_an_optimizer_is_taken_as_by_compile(name):
    step, compiled = loops.TrainStep(plain_model(), squared_error, name), plain_model()
    compiled.compile(name)
    assert type(step.optimizer) is type(compiled.optimizer)
    ours, theirs = step.optimizer.get_config(), compiled.optimizer.get_config()
    assert ours | {"name": ""} == theirs | {"name": ""}
    parts = [loops.Part(one, plain_model(), squared_error, name) for one in ("first", "second")]
    assert isinstance(parts[0].optimizer, keras.optimizers.Optimizer)
    # Each gets one of its own.
    assert loops.ComposedStep(parts).optimizers["second"] is not parts[0].optimizer


def test_attempts_of_its_own_scaler_are_taken():
    loss_scaler = static(2.0)
    optimizer = SGD(loops.ByAttempts(lambda step: 0.1, loss_scaler))
    assert loops.TrainStep(plain_model(), squared_error, optimizer, loss_scaler=loss_scaler).loss_scaler is loss_scaler


def of_labels(y, prediction):
    return tf.reduce_mean(y)


def stopped(y, prediction):
    return tf.reduce_mean(tf.stop_gradient(prediction) - y)


def counted(y, prediction):
    return tf.reduce_mean(tf.cast(tf.argmax(prediction, -1), tf.float32))


# Each loss in another step, eagerly and compiled.
@pytest.mark.parametrize(
    ("loss_fn", "options", "compiled"),
    [
        (of_labels, {}, False),
        (stopped, {"retry": True}, True),
        (counted, {"accumulate": 2}, True),
    ],
)
def test_a_loss_that_depends_on_no_weight_is_told_in_words_of_a_train_step(loss_fn, options, compiled):
    """Its user has no tape and calls no `scale`."""
    step = loops.TrainStep(one_layer(), loss_fn, SGD(), loss_scaler=scaler.LossScaler(scaler.Dynamic()), **options)
    with pytest.raises(scaler.InvalidArgument) as caught:
        (tf.function(step) if compiled else step)(PAIR)
    said = str(caught.value)
    assert said.startswith("TrainStep: the loss gives no gradient: it depends on none of the trainable variables of")
    assert "tf.stop_gradient, NumPy, tf.argmax" in said
    assert "do not freeze the layers" in said
    assert "tape" not in said


def test_a_frozen_way_of_the_loss_and_groups_with_scales_of_their_own_are_told_too():
    told = "TrainStep: the loss gives no gradient"
    frozen, other = keras.layers.Dense(1, trainable=False), keras.layers.Dense(1)
    inputs = keras.Input([4])
    two = keras.Model(inputs, [frozen(inputs), other(inputs)])
    step = loops.TrainStep(two, lambda y, prediction: squared_error(y, prediction[0]), SGD())
    with pytest.raises(scaler.InvalidArgument, match=told):
        step(PAIR)
    grouped, groups = scaler.layerwise.insert_rescales(plain_model(), after=["dense"])
    step = loops.TrainStep(grouped, of_labels, SGD(), layerwise=groups)
    with pytest.raises(scaler.InvalidArgument, match=told):
        step(PAIR)
