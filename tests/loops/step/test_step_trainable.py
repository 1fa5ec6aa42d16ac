"""Guards that a `TrainStep`, alone or in a `Loop`, notices layers that were frozen or unfrozen after it was made."""

import keras
import pytest
import tensorflow as tf
from loop_cases import static
from mirrored import mirrored
from models import kernels, squared_error, two_layers

import loops
import scaler

PAIR = tf.ones([2, 4]), tf.ones([2, 4])
SINCE = "since this step was made or traced: "
FROZEN, UNFROZEN = rf"frozen \(trainable=False\) {SINCE}", f"made trainable {SINCE}"
CHANGES = {
    "frozen": ((), {0: False}, rf"{FROZEN}.*dense_0/kernel"),
    "unfrozen": ((1,), {1: True}, rf"{UNFROZEN}.*dense_1/kernel"),
    "another": (
        (1,),
        {0: False, 1: True},
        rf"{FROZEN}.*dense_0/kernel.*; {UNFROZEN}.*dense_1/kernel",
    ),
}
RUNS = {"eager": lambda step: step, "compiled": tf.function}


def switch(model, flags):
    for place, flag in flags.items():
        model.layers[place].trainable = flag


# Every change, dtype and number of micro-batches, eagerly and compiled: a loop in float16 follows.
@pytest.mark.parametrize(
    ("run", "change", "kind", "accumulate"),
    [
        ("eager", "frozen", "float16", 2),
        ("eager", "another", "bfloat16", 1),
        ("compiled", "unfrozen", "float32", 1),
    ],
)
def test_a_change_is_refused_in_one_sentence(kind, change, run, accumulate):
    frozen, after, says = CHANGES[change]
    made = two_layers(kind, frozen)
    step = loops.TrainStep(made, squared_error, keras.optimizers.SGD(0.1), accumulate=accumulate)
    call = RUNS[run](step)
    call(PAIR)
    call(PAIR)
    switch(made, after)
    before = kernels(made)
    with pytest.raises(scaler.InvalidArgument, match=says) as caught:
        call(PAIR)
    assert "in user code" not in str(caught.value)
    assert kernels(made) == before


def test_a_loop_whose_first_call_traced_the_step_notices_in_later_ones():
    """Where the loop tries XLA, on a CPU, it first takes one step by itself. The loop in the graph has its trace."""
    frozen, after, says = CHANGES["another"]
    made = two_layers("float16", frozen)
    loop = loop_of(loops.TrainStep(made, squared_error, keras.optimizers.SGD(0.1)), 2)
    counters = loop.run(3)
    switch(made, after)
    before = kernels(made)
    with pytest.raises(scaler.InvalidArgument, match=says):
        loop.run(5)
    assert kernels(made) == before
    assert loop.counters == counters
    switch(made, {place: not flag for place, flag in after.items()})
    assert loop.run(5).data == 5


def test_made_anew_it_trains_what_is_trainable():
    made = two_layers("float16", [1])
    loops.TrainStep(made, squared_error, keras.optimizers.SGD(0.1))(PAIR)
    made.layers[0].trainable, made.layers[1].trainable = False, True
    before = kernels(made)
    assert loops.TrainStep(made, squared_error, keras.optimizers.SGD(0.1))(PAIR)["applied"]
    assert kernels(made)[0] == before[0]
    assert kernels(made)[1] != before[1]


class Own:
    """A step of one's own, of a model whose second layer is frozen; with the snapshot or without."""

    def __init__(self, takes_snapshot):
        self.made, self.takes_snapshot = two_layers("float32", [1]), takes_snapshot
        self.optimizer, self.loss_scaler = keras.optimizers.SGD(0.1), static(16.0)

    def __call__(self, x, y):
        before = scaler.snapshot(self.made.non_trainable_variables) if self.takes_snapshot else None
        with tf.GradientTape() as tape:
            loss = squared_error(y, self.made(x, training=True))
            scaled = self.loss_scaler.scale(loss)
        weights = self.made.trainable_variables
        outcome = self.loss_scaler.apply(self.optimizer, tape.gradient(scaled, weights), weights, rollback=before)
        return {"loss": loss, "applied": outcome.finite}


def loop_of(step, steps_per_call, **arguments):
    return loops.Loop(step, tf.data.Dataset.from_tensors(PAIR).repeat(), steps_per_call=steps_per_call, **arguments)


WARNED = "made trainable since the step was traced: .*dense_1/kernel"


@pytest.mark.parametrize(("steps_per_call", "takes_snapshot"), [(1, True), (3, False)])
def test_a_loop_with_a_step_of_ones_own_warns(steps_per_call, takes_snapshot):
    """By the snapshot, or else by the model that the step names; never by both."""
    step = Own(takes_snapshot)
    loop = loop_of(step, steps_per_call)
    loop.run(6)
    switch(step.made, {1: True})
    before = kernels(step.made)
    with pytest.warns(scaler.ScaleWarning, match=WARNED) as caught:
        loop.run(9)
    assert len(caught) == 1
    assert kernels(step.made)[1] == before[1]
    assert loop.run(12) == loops.Counters(12, 12, 12)


@pytest.mark.slow
def test_on_replicas_a_step_without_a_snapshot_is_watched_too():
    strategy = mirrored(2)
    with strategy.scope():
        step = Own(takes_snapshot=False)
    loop = loop_of(step, 2, strategy=strategy)
    loop.run(2)
    switch(step.made, {1: True})
    with pytest.warns(scaler.ScaleWarning, match=WARNED):
        loop.run(4)
