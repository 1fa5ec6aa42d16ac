"""Guards the windows of each gradient: whose they are, in checkpoints, copies, for some variables, in the long form."""

import contextlib
import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored
from rigs import raw
from tensor_cases import SPIKE, USUAL, Lines, guarded, shared

import scaler
from scaler import Cause


def eager(step):
    """What is read from a checkpoint is used by both, and one of the tests below does so in a graph."""
    return step


@pytest.mark.slow_with("later-clip")
@pytest.mark.parametrize(("when", "by_tensor"), [("before the first step", "skip"), ("later", "clip")])
def test_a_checkpoint_holds_the_windows(tmp_path, by_tensor, when):
    execute = tf.function if when == "before the first step" else eager
    lines = shared(by_tensor, execute=execute)
    path = _parts(lines).write(str(tmp_path / "state"))
    word = [SPIKE, USUAL, (2.0, 300.0), (0.7, 70.0)]
    expected = [raw(lines.step(slopes)) for slopes in word], lines.moved(), raw(lines.loss_scaler.state)
    again = Lines(by_tensor, execute)
    if when == "later":
        again.step((7.0, 7.0))
    status = _parts(again).read(path)
    found = [raw(again.step(slopes)) for slopes in word], again.moved(), raw(again.loss_scaler.state)
    status.assert_consumed()
    assert found == expected


def _parts(lines):
    model = [*lines.weights, lines.moving]
    return tf.train.Checkpoint(s=lines.loss_scaler, o=lines.optimizer, m=lines.masters, v=model)


@pytest.mark.parametrize("replicas", [None, 2])
def test_windows_survive_a_save_before_the_first_step(tmp_path, replicas):
    lines = shared("skip", execute=eager)
    path = tf.train.Checkpoint(s=lines.loss_scaler).write(str(tmp_path / "first"))
    expected = raw(lines.loss_scaler.state)
    with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
        between = scaler.LossScaler(guarded("skip"))
    tf.train.Checkpoint(s=between).read(path).assert_consumed()
    assert raw(between.state) == expected
    again = tf.train.Checkpoint(s=between).write(str(tmp_path / "second"))
    # A third one goes on as the first.
    later = Lines("skip", eager)
    _parts(later).read(_parts(lines).write(str(tmp_path / "whole")))
    tf.train.Checkpoint(s=later.loss_scaler).read(again).assert_consumed()
    word = [SPIKE, (0.7, 70.0)]
    assert [raw(later.step(slopes)) for slopes in word] == [raw(lines.step(slopes)) for slopes in word]
    assert raw(later.loss_scaler.state) == raw(lines.loss_scaler.state)


def test_a_checkpoint_from_before_the_first_step_has_no_windows(tmp_path):
    path = tf.train.Checkpoint(s=scaler.LossScaler(guarded("skip"))).write(str(tmp_path / "state"))
    again = Lines("skip", eager)
    tf.train.Checkpoint(s=again.loss_scaler).read(path).assert_consumed()
    again.step()
    assert again.loss_scaler.state.tensor_norms.shape == (5, 2)


def test_a_checkpoint_of_another_window_or_number_of_variables_is_named(tmp_path):
    path = tf.train.Checkpoint(s=shared("skip").loss_scaler).write(str(tmp_path / "state"))
    with pytest.raises(scaler.InvalidArgument, match=r"with shape \(5.*saved window"):
        tf.train.Checkpoint(s=scaler.LossScaler(guarded("skip", window=10))).read(path)
    loss_scaler = scaler.LossScaler(guarded("skip"))
    tf.train.Checkpoint(s=loss_scaler).read(path)
    with pytest.raises(scaler.InvalidArgument, match="remembers the norms of 2 gradients, and this step has 1"):
        loss_scaler.apply(keras.optimizers.SGD(), [tf.constant([1.0])], [tf.Variable([1.0])], unscaled=True)


@pytest.mark.slow_with("pickle")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))], ids=["copy", "pickle"])
def test_a_copy_has_windows_of_its_own(copied):
    lines = shared("skip")
    own = copied(lines.loss_scaler)
    assert raw(own.state) == raw(lines.loss_scaler.state)
    lines.step((0.6, 90.0))
    assert raw(own.state) != raw(lines.loss_scaler.state)
    assert all(scaler.authoring.owner_of(one) is own for one in own.variables if "tensor" in one.name)
    again = copied(scaler.LossScaler(guarded("skip")))
    again.apply(keras.optimizers.SGD(), [tf.constant([1.0])], [tf.Variable([1.0])], unscaled=True)
    assert again.state.tensor_norms.shape == (5, 1)
    assert (
        len([one for one in again.variables if scaler.authoring.owner_of(one) is again and "tensor" in one.name]) == 3
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))], ids=["copy", "pickle"])
def test_a_checkpoint_of_a_copy_holds_its_windows(tmp_path, copied):
    path = tf.train.Checkpoint(s=copied(shared("skip").loss_scaler)).write(str(tmp_path / "state"))
    assert len([name for name, _ in tf.train.list_variables(path) if "tensor_state/tensor" in name]) == 3


def a_list(by_tensor, **arguments):
    """A scaler, and a function that gives it gradients of some variables."""
    loss_scaler = scaler.LossScaler(guarded(by_tensor, norm=False, window=3), **arguments)
    variables = [tf.Variable(tf.ones([4, 2]), name=name) for name in "abc"]
    optimizer = keras.optimizers.SGD(2.0**-4)
    optimizer.build(variables)

    def give(*grads, of=variables, **options):
        return loss_scaler.apply(optimizer, list(grads), list(of), unscaled=True, **options)

    return loss_scaler, variables, give


def dense(value):
    return tf.fill([4, 2], tf.constant(value))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_a_variable_without_a_gradient_keeps_its_window_and_its_place(by_tensor):
    loss_scaler, variables, give = a_list(by_tensor)
    for _ in range(3):
        assert bool(give(dense(1.0), None, dense(2.0)).finite)
    state = loss_scaler.state
    assert np.isinf(state.tensor_norms[:, 1]).all()
    np.testing.assert_allclose(state.tensor_usual.numpy()[[0, 2]], np.sqrt(8.0) * np.array([1.0, 2.0]), rtol=1e-6)
    before = raw(variables)
    outcome = give(dense(1.0), None, dense(200.0))
    if by_tensor == "skip":
        assert (Cause(int(outcome.cause)), int(outcome.variable)) == (Cause.SPIKE, 2)
        assert raw(variables) == before
        assert "'c" in loss_scaler.explain(outcome)
    else:
        assert (bool(outcome.finite), int(outcome.clipped_tensors)) == (True, 1)
        np.testing.assert_allclose(outcome.clipped_norm, np.sqrt(8.0 * (1.0 + 36.0)), rtol=1e-6)


@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_duplicate_indices_of_slices_count_as_their_sum(by_tensor):
    _, variables, give = a_list(by_tensor)

    def slices(value):
        return tf.IndexedSlices(tf.fill([3, 2], tf.constant(value)), tf.constant([1, 1, 3]), tf.constant([4, 2]))

    for _ in range(3):
        give(dense(1.0), slices(1.0), dense(1.0))
    norm, before = np.sqrt(2 * (2.0**2 + 1.0)), variables[1].numpy()
    outcome = give(dense(1.0), slices(100.0), dense(1.0))
    if by_tensor == "skip":
        np.testing.assert_allclose([outcome.value, outcome.limit], [100 * norm, 3 * norm], rtol=1e-6)
    else:
        moved = before - variables[1].numpy()
        np.testing.assert_allclose(moved, 2.0**-4 * 3.0 * np.array([[0, 0], [2, 2], [0, 0], [1, 1]]), rtol=1e-5)


def test_some_of_the_variables_are_a_step_too_and_others_are_refused():
    loss_scaler, variables, give = a_list("skip")
    for _ in range(3):
        give(dense(1.0), dense(2.0), dense(3.0))
    assert Cause(int(give(dense(300.0), of=variables[2:]).cause)) is Cause.SPIKE
    assert "'c" in loss_scaler.explain()
    other = tf.Variable(tf.ones([4, 2]), name="d")
    with pytest.raises(scaler.InvalidArgument, match=r"remembers the last norms of 3 variables.*'d.*is none of them"):
        loss_scaler.apply(keras.optimizers.SGD(), [dense(1.0)], [other], unscaled=True)


def test_variables_that_nothing_tells_apart_are_a_step_together():
    loss_scaler, optimizer = scaler.LossScaler(guarded("skip")), keras.optimizers.SGD()
    variables = [tf.Variable([1.0]), tf.Variable([1.0])]
    one = tf.constant([1.0])
    for _ in range(2):
        loss_scaler.apply(optimizer, [one, 2.0 * one], variables, unscaled=True)
    assert loss_scaler.state.tensor_norms[-1].numpy().tolist() == [1.0, 2.0]
    with pytest.raises(scaler.InvalidArgument, match=r"only some of those named 'Variable:0' of shape \(1,\)"):
        loss_scaler.apply(optimizer, [one], variables[1:], unscaled=True)


@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_the_long_form_asks_the_guard(by_tensor):
    loss_scaler = scaler.LossScaler(guarded(by_tensor, norm=False))
    guard, seen = loss_scaler.strategy, []
    for norms in ([1.0, 9.0], [1.0, 9.0], [1.0, 9.0], [99.0, 9.0], [1.0, 9.0]):
        norms = tf.constant(norms)
        event = scaler.Event(tf.constant(True), norms=norms)
        factors = guard.factors(loss_scaler.state, norms)
        seen.append((bool(guard.is_spike(loss_scaler.state, event)), round(float(factors[0]) * 33, 3)))
        loss_scaler.update(event)
    spike = (True, 1.0) if by_tensor == "skip" else (False, 1.0)
    assert [one[0] for one in seen] == [False, False, False, spike[0], False]
    assert seen[3][1] == 1.0
    with pytest.raises(scaler.InvalidArgument, match="remembers the norms of 2 gradients, and this step has 3"):
        loss_scaler.update(scaler.Event(tf.constant(True), norms=tf.ones([3])))
