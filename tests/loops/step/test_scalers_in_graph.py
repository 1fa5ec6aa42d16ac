"""Guards what a loop counts of a step that says nothing itself: what the scalers in its graph did, or "?"."""

import copy
import functools
import io
import pickle

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from loop_cases import static
from mirrored import mirrored

import loops
import scaler


def data(count=12, bad=()):
    """Scalars of 1, those whose number (from 0) is in `bad` infinite."""
    values = np.ones(count, np.float32)
    values[list(bad)] = np.inf
    return tf.data.Dataset.from_tensor_slices(values)


def weight():
    return tf.Variable([1.0, 2.0])


def differentiated(loss_scaler, variable, number):
    with tf.GradientTape() as tape:
        scaled = loss_scaler.scale(tf.reduce_sum(variable) * number)
    return tape.gradient(scaled, [variable])


def with_scaler(loss_scaler=None, **outputs):
    loss_scaler, variable = loss_scaler or scaler.LossScaler(), weight()
    optimizer = keras.optimizers.SGD(0.01)

    def step(number):
        loss_scaler.apply(optimizer, differentiated(loss_scaler, variable, number), [variable])
        return {"loss": number, **{name: tf.constant(value) for name, value in outputs.items()}}

    return step


def compiled():
    return tf.function(with_scaler())


def under_a_condition():
    inner = with_scaler()
    return lambda number: tf.cond(number > -1.0, lambda: inner(number), lambda: {"loss": number})


def long_form():
    loss_scaler, variable, optimizer = scaler.LossScaler(), weight(), keras.optimizers.SGD(0.01)
    optimizer.build([variable])

    def step(number):
        grads = loss_scaler.unscale(differentiated(loss_scaler, variable, number))
        finite = scaler.all_finite(grads)
        tf.cond(finite, lambda: optimizer.apply(grads, [variable]), lambda: None)
        loss_scaler.update(scaler.Event(finite))
        return {"loss": number}

    return step


def two_scalers():
    """As in a GAN: the bad numbers reach one of the two."""
    one, other = with_scaler(), with_scaler()

    def step(number):
        one(number)
        other(tf.ones([]))
        return {"loss": number}

    return step


def in_keras(make):
    optimizer, variable = make(keras.optimizers.SGD(0.01)), keras.Variable([1.0, 2.0])
    optimizer.build([variable])

    def step(number):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(variable.value) * number)
        optimizer.apply(tape.gradient(scaled, [variable.value]), [variable])
        return {"loss": number}

    return step


kerass_own = functools.partial(keras.optimizers.LossScaleOptimizer, dynamic_growth_steps=2)
KINDS = {
    "apply": with_scaler,
    "a tf.function": compiled,
    "in a branch": under_a_condition,
    "unscale and update": long_form,
    "two scalers": two_scalers,
    "LossScaleOptimizer": functools.partial(in_keras, scaler.LossScaleOptimizer),
    "Keras's LossScaleOptimizer": functools.partial(in_keras, kerass_own),
}


# The Python loop asks the scalers as the loop in the graph does, whatever they are: one kind will do.
@pytest.mark.parametrize(
    ("kind", "steps_per_call"),
    [("a tf.function", 4), ("unscale and update", 4), ("Keras's LossScaleOptimizer", 4), ("in a branch", 1)],
)
def test_a_step_that_returns_its_loss_alone_is_counted_right(kind, steps_per_call):
    step, traces = KINDS[kind](), []

    def counted(number):
        traces.append(number)
        return step(number)

    loop = loops.Loop(counted, data(bad=[0, 1, 5, 11]), steps_per_call=steps_per_call)
    assert loop.run(12) == loops.Counters(data=12, attempted=12, applied=8)
    assert len(traces) <= 1 + (steps_per_call == 1)  # Slots made in the first trace.


@pytest.mark.slow_with("two scalers")
@pytest.mark.parametrize("kind", ["apply", "two scalers"])
def test_so_it_is_under_xla(kind):
    loop = loops.Loop(KINDS[kind](), data(bad=[2, 3]), steps_per_call=4, jit_compile=True)
    assert loop.run(12) == loops.Counters(data=12, attempted=12, applied=10)


@pytest.mark.slow
def test_so_it_is_on_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        step = with_scaler()
    batches = data(24, bad=[3, 8]).batch(2, drop_remainder=True)
    loop = loops.Loop(lambda numbers: step(tf.reduce_sum(numbers)), batches, steps_per_call=1, strategy=strategy)
    assert loop.run(12) == loops.Counters(data=12, attempted=12, applied=10)


def test_a_step_without_any_scaler_is_applied():
    optimizer, variable = keras.optimizers.SGD(0.01), weight()

    def step(number):
        optimizer.apply([variable * number], [variable])
        return {"loss": number}

    assert loops.Loop(step, data(), steps_per_call=4).run(12) == loops.Counters(12, 12, 12)


def test_windows_of_a_step_of_ones_own_count_once():
    loss_scaler, variable, optimizer = scaler.LossScaler(), weight(), keras.optimizers.SGD(0.01)
    total, count = tf.Variable([0.0, 0.0]), tf.Variable(0)

    def step(number):
        (grad,) = differentiated(loss_scaler, variable, number)
        count.assign_add(1)
        last = tf.equal(count % 3, 0)
        total.assign_add(grad)
        loss_scaler.apply(optimizer, [tf.identity(total)], [variable], when=last)
        tf.cond(last, lambda: total.assign([0.0, 0.0]), lambda: total.value())
        return {"loss": number}

    loop = loops.Loop(step, data(12, bad=[4]), steps_per_call=4)
    with pytest.warns(scaler.ScaleWarning, match="sums scaled gradients over several calls"):
        counters = loop.run(12)
    assert counters == loops.Counters(data=12, attempted=4, applied=3)


def unscale_alone():
    loss_scaler, variable = static(8.0), weight()

    def step(number):
        (grad,) = loss_scaler.unscale(differentiated(loss_scaler, variable, number))
        variable.assign_sub(0.01 * grad)
        return {"loss": number}

    return step


def scaled_by_hand():
    loss_scaler = scaler.LossScaler()
    return lambda number: {"loss": number * loss_scaler.loss_scale}


@pytest.mark.filterwarnings("ignore:unscale.grads. was used, and no step was ever counted:scaler.ScaleWarning")
@pytest.mark.parametrize("make", [unscale_alone, scaled_by_hand])
def test_what_cannot_be_known_is_not_claimed(make):
    text = io.StringIO()
    progress = loops.Progress(every=1, console=rich.console.Console(file=text, width=120))
    loop = loops.Loop(make(), data(4, bad=[1, 2, 3]), steps_per_call=4, actions=[progress])
    assert loop.run(4) == loops.Counters(data=4, attempted=0, applied=0, known=False)
    assert "applied ?  skipped ?" in text.getvalue()


@pytest.mark.parametrize(
    ("says", "applied", "steps_per_call"),
    [({"applied": True, "attempted": True}, 12, 4), ({"applied": False}, 0, 1)],
)
def test_a_step_that_contradicts_its_scaler_keeps_its_word_and_is_told_once(says, applied, steps_per_call):
    loop = loops.Loop(with_scaler(**says), data(bad=[1, 2]), steps_per_call=steps_per_call)
    word = "was applied" if applied else "was not applied"
    with pytest.warns(UserWarning, match=f"says that it {word}.*the loss scaler") as caught:
        assert loop.run(12) == loops.Counters(12, 12, applied)
    assert len(caught) == 1


@pytest.mark.slow_with("LossScaleOptimizer")
@pytest.mark.parametrize("kind", ["unscale and update", "LossScaleOptimizer"])
def test_a_hand_written_step_cannot_stick_in_silence(kind):
    loop = loops.Loop(KINDS[kind](), data(400, bad=range(400)), steps_per_call=4)
    # Bad data is told at the first visit after fifty of them.
    with pytest.raises(scaler.StuckError, match="52 steps since the last applied one were skipped because"):
        loop.run(400)
    assert loop.counters == loops.Counters(52, 52, 0)


def test_batches_of_another_size_find_the_same_scalers_and_a_scaler_that_is_read_is_none_of_them():
    """Also where the step is a partial."""
    others = scaler.LossScaler()

    def step(own, numbers):
        return {**own(tf.reduce_sum(numbers)), "theirs": others.loss_scale, "attempts": others.counters.attempted}

    loop = loops.Loop(functools.partial(step, with_scaler()), data(7, bad=[0, 6]).batch(2))
    assert loop.run(4) == loops.Counters(4, 4, 2)


@pytest.mark.slow_with("deep")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["deep", "pickle"]
)
def test_a_copy_of_a_scaler_owns_its_variables(copied):
    original = scaler.LossScaler()
    made = copied(original)
    for owner in (original, made):
        owned = [scaler.authoring.owner_of(variable) for variable in owner.variables]
        assert owned.count(owner) == len([each for each in owned if each is not None]) == 2
    assert scaler.authoring.owner_of(tf.Variable(0.0)) is None


def test_a_shallow_copy_leaves_the_variables_to_their_owner():
    original = scaler.LossScaler()
    made = copy.copy(original)
    assert scaler.authoring.owner_of(made._stored.counts.variable) is original


@pytest.mark.parametrize("kind", ["optimizer", "replicas"])
def test_a_copy_of_what_holds_a_scaler_owns_its_variables(kind):
    holder = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.1)) if kind == "optimizer" else tf.Module()
    if kind == "replicas":
        with mirrored(2).scope():
            holder.loss_scaler = scaler.LossScaler()
    made = copy.deepcopy(holder).loss_scaler
    assert made is not holder.loss_scaler
    attempted = made._stored.counts.variable
    parts = [attempted, *getattr(attempted, "values", ())]
    assert [scaler.authoring.owner_of(part) for part in parts] == [made] * len(parts)


def test_a_copy_notices_that_an_earlier_step_was_restored(tmp_path):
    made = copy.deepcopy(scaler.LossScaler())
    saved = tf.train.Checkpoint(made=made).save(str(tmp_path / "c"))
    made.check()
    assert made._watch.history.readings
    tf.train.Checkpoint(made=made).restore(saved)
    assert not made._watch.history.readings


def test_a_copy_explains_a_checkpoint_of_another_shape(tmp_path):
    short, long = (copy.deepcopy(scaler.LossScaler(scaler.DelayedAmax(history_length=size))) for size in (4, 8))
    saved = tf.train.Checkpoint(made=short).save(str(tmp_path / "c"))
    with pytest.raises(scaler.InvalidArgument, match="the checkpoint holds DelayedAmax's"):
        tf.train.Checkpoint(made=long).restore(saved)
