"""Guards that data, steps and places that cannot work are told in one sentence, and that it is what a user sees."""

import contextlib
import functools
import inspect
import io
import itertools
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored

import loops
import scaler
from loops.loop.user_step import replicate
from scaler.backend.graphs import has_gpu

X = np.ones([64, 4], np.float32)
Y = np.arange(64) % 10
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(10)])


def step(made=None, loss_fn=cross_entropy, **arguments):
    return loops.TrainStep(made or model(), loss_fn, keras.optimizers.SGD(), **arguments)


def labels(worst):
    changed = Y.copy()
    changed[20] = worst
    return changed


slices = tf.data.Dataset.from_tensor_slices
WORDS = np.array(["word"] * 64)
DATA = {
    "a label too large": (lambda: slices((X, labels(11))).batch(8), "a label is 11, but the model has 10 classes"),
    "a negative label": (lambda: slices((X, labels(-1))).batch(8), "a label is -1, but the model has 10 classes"),
    "not batched": (lambda: slices((X, Y)), r"a single example: x has shape \(4,\).*dataset.batch"),
    "no y": (lambda: slices(X).batch(8), "the batch has no y"),
    "four parts": (lambda: slices((X, Y, X, X)).batch(8), "a batch has 4 parts"),
    "text for x": (lambda: slices((WORDS, Y)).batch(8), "the batch holds text"),
    "another shape": (
        lambda: slices((X[:, :3], Y)).batch(8),
        r"x has shape \((8|None), 3\), but the model takes \(None, 4\)",
    ),
}
if has_gpu():  # Which makes a NaN of a label without a class: see tests/loops/diagnose/test_whose_fault.py.
    DATA = {case: data for case, data in DATA.items() if "label" not in case}


# In a loop a label is told by the last test of this file, too.
WAYS = [
    (case, way)
    for case, loop in zip(DATA, itertools.cycle((1, 4)))
    for way in (loop, "no loop")
    if way == "no loop" or "label" not in case
]


@pytest.mark.parametrize(("case", "way"), WAYS)
def test_data_that_cannot_work_is_told_in_one_sentence(case, way):
    make, says = DATA[case]

    def run():
        return list(map(step(), make())) if way == "no loop" else loops.Loop(step(), make(), steps_per_call=way).run(8)

    with pytest.raises((loops.BadBatch, scaler.InvalidArgument), match=says) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_so_it_is_for_a_model_that_is_not_built():
    make, says = DATA["not batched"]
    with pytest.raises(loops.BadBatch, match=says.replace("x has shape", ".*")):
        loops.Loop(step(keras.Sequential([keras.layers.Dense(10)])), make()).run(8)


def test_errors_of_a_users_own_stay_what_they_are():
    def loss_fn(y, prediction):
        raise RuntimeError("of my own")

    with pytest.raises(RuntimeError, match="of my own"):
        loops.Loop(step(loss_fn=loss_fn), slices((X, Y)).batch(8)).run(8)


@pytest.mark.slow
def test_batches_that_replicas_cannot_share():
    strategy = mirrored(2)
    with strategy.scope():
        run = step()
    loop = loops.Loop(run, slices((X, Y)).batch(9), strategy=strategy, steps_per_call=1)
    with pytest.raises(loops.BadBatch, match="not a multiple of 2 replicas: batch with drop_remainder=True"):
        loop.run(3)


@pytest.mark.slow
def test_replicas_meet_only_over_a_batch_that_they_can_share():
    """An error while they meet for the first time would cancel their group for the rest of the process."""
    strategy = mirrored(2)
    with strategy.scope():
        run = replicate(step(), strategy)
    spec = (tf.TensorSpec([None, *X.shape[1:]], X.dtype), tf.TensorSpec([None], Y.dtype))
    graph = tf.function(run).get_concrete_function(spec).graph
    meetings = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    assert meetings
    for op in meetings:
        before, waiting = set(), [op]
        while waiting:
            one = waiting.pop()
            waiting += [other for other in (*(t.op for t in one.inputs), *one.control_inputs) if other not in before]
            before.update(waiting)
        assert any(one.type == "Assert" or "assert" in one.name for one in before), op.name


@pytest.mark.exhaustive
def test_evaluations_tell_it_too():
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    for data, says in ((slices(X).batch(8), "has no y"), (slices((X, Y)), "a single example")):
        evaluate = loops.Evaluate(model(), data, [accuracy], every=1)
        with pytest.raises(loops.BadBatch, match=rf"Evaluate\('validation'\): the batch.*{says}"):
            loops.Loop(step(), slices((X, Y)).batch(8), actions=[evaluate]).run(1)


def pair(x, y):
    return {"loss": tf.reduce_sum(x) + tf.cast(tf.reduce_sum(y), tf.float32)}


class Pair:
    def __call__(self, x, y):
        return pair(x, y)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize(
    "train_step",
    [
        pair,
        Pair(),
        Pair().__call__,
        tf.function(pair),
        functools.partial(lambda a, x, y: pair(x, y), 0),
        lambda x, y, *z: pair(x, y),
    ],
    ids=["function", "object", "method", "tf.function", "partial", "any number"],
)
def test_a_step_of_two_arguments_takes_the_parts_of_a_batch(train_step):
    visits = []
    loop = loops.Loop(train_step, slices((X, Y)).batch(32), steps_per_call=1, actions=[visits.append])
    assert loop.run(2).data == 2
    assert visits[0].outputs["loss"][0] == 32 * 4 + Y[:32].sum()


@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("train_step", [lambda batch: batch, lambda batch, k=1: batch, lambda *parts: parts[0]])
def test_a_step_of_one_argument_takes_the_batch(train_step):
    def whole(*arguments):
        x, _ = train_step(*arguments)
        return {"loss": tf.reduce_sum(x)}

    whole.__signature__ = inspect.signature(train_step)
    assert loops.Loop(whole, slices((X, Y)).batch(32), steps_per_call=1).run(2).data == 2


@pytest.mark.parametrize(
    ("train_step", "named"),
    [
        (lambda x, y, z: None, r"needs the arguments \(x, y, z\), but a batch of the dataset has 2 parts"),
        (lambda: None, r"needs the arguments \(\)"),
        (lambda batch, *, rate: None, r"needs the arguments \(batch, rate\)"),
        (pair, r"needs the arguments \(x, y\).*has 1 part:"),
    ],
)
def test_a_step_of_other_arguments_is_told(train_step, named):
    with pytest.raises(scaler.InvalidArgument, match=named):
        loops.Loop(train_step, slices(X if train_step is pair else (X, Y)).batch(8))


PLACES = {
    "JsonLines": lambda place: loops.JsonLines(place / "steps.jsonl"),
    "Csv": lambda place: loops.Csv(place / "steps.csv"),
    "TensorBoard": lambda place: loops.TensorBoard(place),
    "Profile": lambda place: loops.Profile(place),
    "Checkpoint": lambda place: loops.Checkpoint(place, every=1),
    "Trace": lambda place: loops.Trace(place / "trace.arrow"),
    "KeepBatches": lambda place: loops.KeepBatches(place),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_cannot_be_written_is_told_before_the_first_step(name, tmp_path, tensorboard):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "in it", pathlib.Path("/proc/none")):
        taken = []
        loop = loops.Loop(pair, slices((X, Y)).batch(8), actions=[taken.append, PLACES[name](place)])
        with pytest.raises(loops.LoopError, match=rf"^{name}\('.*cannot be written \(.*\)\. Choose another") as caught:
            loop.run(3)
        assert name == "Checkpoint" or isinstance(caught.value, (loops.NotWritable, OSError))
        assert loop.counters.data == 0
        assert not taken


@pytest.mark.parametrize("place", [3, None, b"steps", 1.5, [], ""])
@pytest.mark.parametrize(
    "make", [loops.JsonLines, loops.Csv, loops.TensorBoard, loops.Profile, functools.partial(loops.Checkpoint, every=1)]
)
def test_what_is_no_path_is_told(make, place):
    with pytest.raises(scaler.InvalidArgument, match="expected a path"):
        make(place)


def half():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input([4], dtype="float16"), keras.layers.Dense(10, dtype="float16")])


@pytest.mark.parametrize(
    ("masters", "says"),
    [
        (lambda variables: scaler.weights.KahanWeights(half().trainable_variables), "masters of other variables"),
        (lambda variables: scaler.MasterWeights(variables[:1]), "masters of other variables"),
        (lambda variables: None, "returned None: expected an hs.MasterWeights"),
        (lambda variables: variables, "expected an hs.MasterWeights"),
    ],
)
def test_masters_of_another_model_are_refused(masters, says):
    with pytest.raises(scaler.InvalidArgument, match=says):
        step(half(), masters=masters)


SCRIPT = """
import keras, numpy as np, tensorflow as tf, loops, scaler
x, y = np.ones([64, 4], "float32"), np.zeros(64, "int64")
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(10)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
loss_scaler, optimizer = scaler.LossScaler(), keras.optimizers.SGD()
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

def train_step(x, y):
    scaled = loss_scaler.scale(x)
    return {{"loss": scaled}}

step = loops.TrainStep(model, loss_fn, optimizer)
{run}
"""
RUNS = {
    "ours in a step": (
        "loops.Loop(train_step, data).run(3)",
        "scaler.errors.InvalidArgument: scale(loss): the loss",
        10,
    ),
    "ours in a tf.function": (
        "tf.function(train_step)(x, y)",
        "scaler.errors.InvalidArgument: scale(loss): the loss",
        16,
    ),
    "a place": (
        "loops.Loop(step, data, actions=[loops.Csv('/proc/x/y')]).run(3)",
        "loops.support.errors.NotWritable: Csv(",
        9,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_a_script_shows_the_sentence_once_and_little_else(case, tmp_path):
    run, sentence, lines = RUNS[case]
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(run=run))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
        except Exception as error:  # As Python shows it at the end of a script.
            sys.__excepthook__(type(error), error.with_traceback(error.__traceback__.tb_next), None)
    errors = errors.getvalue()
    shown = errors[errors.index("Traceback") :].strip().splitlines()
    assert sum(sentence in line for line in shown) == 1
    if hasattr(Exception, "add_note"):  # Python 3.10 shows none.
        assert re.fullmatch(r'halfstep: help\("halfstep\.\w+"\) says what to do', shown.pop())
    assert len(shown) <= lines, errors
    assert "During handling" not in errors
    assert "in user code" not in errors


@pytest.mark.skipif(has_gpu(), reason="a GPU raises no error")
def test_the_cause_can_still_be_had():
    with pytest.raises(loops.BadBatch) as caught:
        loops.Loop(step(), slices((X, labels(11))).batch(8), steps_per_call=1).run(8)
    found, chain = caught.value, []
    while found is not None:
        chain.append(type(found))
        found = found.__cause__ or found.__context__
    assert tf.errors.InvalidArgumentError in chain
