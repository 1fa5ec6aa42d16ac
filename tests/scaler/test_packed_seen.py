"""Slots and masters in buffers are seen as they are, however they are read, assigned, saved or restored."""

import copy

import pytest
import tensorflow as tf
from packed_cases import SHAPES, Run, assert_close, enumerated, make_five_enough, numpy_of, own_variables, same_bits

from scaler import packed


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_five_enough(monkeypatch)


def checkpointed(run, path):
    file = tf.train.Checkpoint(optimizer=run.optimizer, masters=run.masters).write(str(path / "seen"))
    fresh = Run(pack=False, dtype=run.dtype).train(0)
    fresh.optimizer.build(fresh.masters.weights)
    tf.train.Checkpoint(optimizer=fresh.optimizer, masters=fresh.masters).read(file).assert_consumed()
    return numpy_of(fresh)


@tf.function
def values_of(variables):
    return [variable + 0.0 if variable.dtype.is_floating else variable.read_value() for variable in variables]


def saved_model(run, path):
    module = tf.Module()
    module.kept = run.kept
    tf.saved_model.save(module, str(path / "model"))
    return [variable.numpy() for variable in tf.saved_model.load(str(path / "model")).kept]


LOOKS = {
    "numpy": lambda run, raw, path: numpy_of(run),
    "value": lambda run, raw, path: [v.value().numpy() for v in run.kept],
    "deep copy": lambda run, raw, path: [v.numpy() for v in copy.deepcopy(run.kept)],
    "held since before": lambda run, raw, path: [v.numpy() for v in raw],
    "held, operator": lambda run, raw, path: [(v + tf.zeros([], v.dtype)).numpy() for v in raw],
    "in a function": lambda run, raw, path: [v.numpy() for v in tf.function(lambda: values_of(raw))()],
    "as arguments": lambda run, raw, path: [v.numpy() for v in values_of(raw)],
    "checkpoint": lambda run, raw, path: checkpointed(run, path),
    "SavedModel": lambda run, raw, path: saved_model(run, path),
    "save_own_variables": lambda run, raw, path: own_variables(run) + numpy_of(run)[len(run.optimizer.variables) :],
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LOOKS)
def test_what_is_kept_is_seen_as_it_is(name, dtype, tmp_path):
    ours, theirs = Run(dtype=dtype), Run(pack=False, dtype=dtype)
    raw = ours.train().kept
    assert vars(ours.optimizer)[packed._ATTRIBUTE].with_weights == (dtype == "float16")
    theirs.train()
    for number in range(3):
        ours.train(2)
        theirs.train(2)
        (tmp_path / str(number)).mkdir()
        assert ours.in_buffers
        assert_close(LOOKS[name](ours, raw, tmp_path / str(number)), numpy_of(theirs))
    assert same_bits(ours.train().state(), Run(dtype=dtype).train(8).state())


def restored(run, values, path):
    other = Run(pack=False, dtype=run.dtype).train(0)
    other.optimizer.build(other.masters.weights)
    assign_all(other.kept, values)
    tf.train.Checkpoint(optimizer=run.optimizer, masters=run.masters).read(
        tf.train.Checkpoint(optimizer=other.optimizer, masters=other.masters).write(str(path / "put"))
    ).assert_consumed()


def assign_all(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


PUTS = {
    "assign": lambda run, raw, values, path: assign_all(run.kept, values),
    "held since before": lambda run, raw, values, path: assign_all(raw, values),
    "in a function": lambda run, raw, values, path: tf.function(lambda: assign_all(raw, values))(),
    "checkpoint": lambda run, raw, values, path: restored(run, values, path),
    "load_own_variables": lambda run, raw, values, path: (
        run.optimizer.load_own_variables(dict(enumerated(values[: len(run.optimizer.variables)]))),
        assign_all(run.kept, values),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", PUTS)
def test_what_was_assigned_is_taken_over(name, dtype, tmp_path):
    ours, theirs = Run(dtype=dtype), Run(pack=False, dtype=dtype)
    raw = ours.train().kept
    values = numpy_of(theirs.train())
    ours.train(2)
    assert ours.in_buffers
    PUTS[name](ours, raw, values, tmp_path)
    assign_all(theirs.kept, values)
    assign_all(theirs.model, [variable.numpy() for variable in ours.model])
    theirs.count = ours.count
    assert_close(ours.train(2).state(), theirs.train(2).state())


def test_one_slot_assigned_leaves_the_others(tmp_path):
    ours, theirs = Run().train(4), Run(pack=False).train(4)
    for run in (ours, theirs):
        run.optimizer._momentums[1].assign(tf.fill(SHAPES[1], 3.0))
        run.model[2].assign(tf.fill(SHAPES[2], -1.0))
        run.train(2)
    assert ours.in_buffers
    assert_close(ours.state(), theirs.state())
