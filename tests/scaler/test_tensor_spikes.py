"""Guards what one gradient far beyond its own last norms does to a step: skipped and told by name, or clipped alone."""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from rigs import raw

import scaler
from scaler import Cause, Dynamic, SpikeGuard

USUAL, SPIKE = (0.5, 80.0), (40.0, 80.0)
"""Slopes of the two lines: the gradient of the first is far smaller, so that the global norm hides its spike."""


def guarded(by_tensor, **arguments):
    inner = Dynamic(2.0**4, growth_interval=4)
    return SpikeGuard(inner, by_tensor=by_tensor, **{"window": 5, "share": 0.4, "loss": False, **arguments})


class Lines:
    """Two lines with masters, Adam's or SGD's slots and a moving state."""

    def __init__(self, by_tensor, execute=tf.function, optimizer=None, clip_norm=None, clip=None, **arguments):
        self.weights = [tf.Variable([1.0, 1.0], dtype=tf.float16, name="small"), tf.Variable([1.0], name="large")]
        self.moving = tf.Variable(0.0, trainable=False)
        self.masters = scaler.MasterWeights(self.weights)
        self.loss_scaler = scaler.LossScaler(guarded(by_tensor) if by_tensor else Dynamic(2.0**4), **arguments)
        self.optimizer = optimizer or keras.optimizers.SGD(2.0**-4, momentum=0.5)
        self.optimizer.build(self.masters.weights)
        self.clipping = {"clip_norm": clip_norm, "clip": clip}
        self.take = execute(self._take)

    def _take(self, slopes):
        before = scaler.snapshot([self.moving])
        with tf.GradientTape() as tape:
            self.moving.assign_add(slopes[0])
            lines = (tf.reduce_sum(tf.cast(own, tf.float32)) * slopes[at] for at, own in enumerate(self.weights))
            scaled = self.loss_scaler.scale(tf.add_n(list(lines)))
        grads = tape.gradient(scaled, self.weights)
        return self.loss_scaler.apply(self.optimizer, grads, self.masters, rollback=before, **self.clipping)

    def step(self, slopes=USUAL):
        return self.take(tf.constant(slopes))

    def variables(self):
        own = [*self.weights, self.moving, *self.masters.weights, *self.optimizer.variables]
        return [*own, *self.masters.variables, *self.loss_scaler.variables]

    def moved(self):
        return raw(self.weights, [self.moving], self.masters.weights, self.optimizer.variables)


def warmed(*arguments, **options):
    """Lines after five steps."""
    lines = Lines(*arguments, **options)
    assert all(bool(lines.step().finite) for _ in range(5))
    return lines


@functools.cache
def _kept(by_tensor, select):
    lines = warmed(by_tensor, select=select)
    return lines, [np.asarray(variable) for variable in lines.variables()]


def shared(by_tensor, select=None):
    """Lines after five steps, which are traced once for all tests."""
    lines, values = _kept(by_tensor, select)
    for variable, value in zip(lines.variables(), values, strict=True):
        variable.assign(value)
    lines.loss_scaler.stuck = scaler.StuckPolicy()
    return lines


WAYS = {"eager": (lambda step: step, None), "graph": (tf.function, None), "select": (tf.function, True)}
WAYS["xla"] = (tf.function(jit_compile=True), True)


def in_way(by_tensor, way):
    execute, select = WAYS[way]
    return warmed(by_tensor, execute, select=select) if way in ("eager", "xla") else shared(by_tensor, select)


@pytest.mark.slow_with("xla", "eager")
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_beyond_its_own_limit_skips_the_step_and_is_named(way):
    lines = in_way("skip", way)
    before, scale = lines.moved(), float(lines.loss_scaler.loss_scale)
    outcome = lines.step(SPIKE)
    assert (bool(outcome.finite), Cause(int(outcome.cause))) == (False, Cause.SPIKE)
    seen = [float(outcome.value), float(outcome.usual), float(outcome.limit)]
    np.testing.assert_allclose(seen, np.sqrt(2.0) * np.array([40.0, 0.5, 1.5]), rtol=1e-5)
    assert (int(outcome.variable), int(outcome.count), int(outcome.clipped_tensors)) == (0, 1, 0)
    assert lines.moved() == before
    assert float(lines.loss_scaler.loss_scale) == scale
    said = lines.loss_scaler.explain(outcome)
    assert "because the norm of the gradient of 'small" in said
    assert "is 56.5685, above the limit of 2.12132 that SpikeGuard draws from a median of 0.707107" in said
    assert lines.loss_scaler.explain() == said
    assert bool(lines.step().finite)
    assert lines.moved() != before


@pytest.mark.slow_with("xla", "eager")
@pytest.mark.parametrize("way", WAYS)
def test_or_it_alone_is_clipped_and_the_step_counts(way):
    lines, plain = in_way("clip", way), shared(None)
    assert lines.moved() == plain.moved()
    outcome = lines.step(SPIKE)
    assert (bool(outcome.finite), int(outcome.cause), int(outcome.clipped_tensors)) == (True, 0, 1)
    # The median of 0.5, a tenth of it twenty times above it: as if the slope were 1.5.
    plain.step((1.5, 80.0))
    for ours, theirs in zip(lines.masters.weights, plain.masters.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(outcome.grad_norm, np.hypot(np.sqrt(2.0) * 40.0, 80.0), rtol=1e-6)
    np.testing.assert_allclose(outcome.clipped_norm, np.hypot(np.sqrt(2.0) * 1.5, 80.0), rtol=1e-6)
    assert int(lines.step().clipped_tensors) == 0
    assert int(lines.loss_scaler.state.spikes) == 0


def test_where_every_gradient_jumps_the_guard_clips_each_and_the_global_norm_is_that_afterwards():
    lines = shared("clip")
    outcome = lines.step((50.0, 8000.0))
    # Each comes down to three times its median, and so does the global norm, which is at its own limit then.
    assert (bool(outcome.finite), int(outcome.clipped_tensors)) == (True, 2)
    np.testing.assert_allclose(outcome.clipped_norm, 3 * np.hypot(np.sqrt(2.0) * 0.5, 80.0), rtol=1e-6)


def test_several_beyond_their_limits_are_counted():
    lines = shared("skip")
    lines.step((40.0, 8000.0))
    assert int(lines.loss_scaler.last_skip.count) == 2
    assert "the norm of the gradient of 'large" in lines.loss_scaler.explain()
    assert "in the last steps, and 1 other is beyond its" in lines.loss_scaler.explain()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clipping", "expected"),
    [
        ({"clip_norm": 8.0}, 8.0),
        ({"clip": scaler.ClipByNorm(1.0)}, np.sqrt(2.0)),
        ({"clip": scaler.ClipByValue(0.25)}, np.sqrt(3 * 0.25**2)),
    ],
    ids=["clip_norm", "ClipByNorm", "ClipByValue"],
)
def test_what_you_clip_by_comes_after_it(clipping, expected):
    lines, plain = warmed("clip", **clipping), warmed(None, **clipping)
    outcome = lines.step(SPIKE)
    plain.step((1.5, 80.0))
    np.testing.assert_allclose(outcome.clipped_norm, expected, rtol=1e-6)
    for ours, theirs in zip(lines.masters.weights, plain.masters.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_more_in_a_row_than_the_share_is_stuck():
    lines = shared("skip")
    for _ in range(3):
        lines.step(SPIKE)
    with pytest.raises(scaler.StuckError, match=r"3 steps in a row were skipped as spikes, and 2 are allowed.*'small"):
        lines.loss_scaler.check()


@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_an_overflow_is_none_and_no_window_takes_it(by_tensor):
    lines = shared(by_tensor)
    before = raw([lines.loss_scaler.state.tensor_norms])
    outcome = lines.step((float("inf"), 80.0))
    assert Cause(int(outcome.cause)) in (Cause.OVERFLOW, Cause.LOSS)
    assert int(outcome.clipped_tensors) == 0
    assert raw([lines.loss_scaler.state.tensor_norms]) == before
    assert float(lines.loss_scaler.loss_scale) < float(outcome.loss_scale)


@pytest.mark.slow_with("later-skip", "later-clip", "before the first step-clip")
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_a_checkpoint_holds_the_windows(tmp_path, by_tensor, when):
    lines = shared(by_tensor)
    path = _parts(lines).write(str(tmp_path / "state"))
    word = [SPIKE, USUAL, (2.0, 300.0), (0.7, 70.0)]
    expected = [raw(lines.step(slopes)) for slopes in word], lines.moved(), raw(lines.loss_scaler.state)
    again = Lines(by_tensor)
    if when == "later":
        again.step((7.0, 7.0))
    status = _parts(again).read(path)
    found = [raw(again.step(slopes)) for slopes in word], again.moved(), raw(again.loss_scaler.state)
    status.assert_consumed()
    assert found == expected


def _parts(lines):
    model = [*lines.weights, lines.moving]
    return tf.train.Checkpoint(s=lines.loss_scaler, o=lines.optimizer, m=lines.masters, v=model)


def test_a_checkpoint_of_another_number_of_variables_is_named(tmp_path):
    path = tf.train.Checkpoint(s=shared("skip").loss_scaler).write(str(tmp_path / "state"))
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(guarded("skip"))
    tf.train.Checkpoint(s=loss_scaler).read(path)
    with pytest.raises(scaler.InvalidArgument, match=r"SpikeGuard's tensor_.* with shape .*as many variables"):
        loss_scaler.apply(keras.optimizers.SGD(), [tf.constant([1.0])], [weight], unscaled=True)


@pytest.mark.slow_with("pickle")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))], ids=["copy", "pickle"])
def test_a_copy_has_windows_of_its_own(copied):
    lines = shared("skip")
    own = copied(lines.loss_scaler)
    assert raw(own.state) == raw(lines.loss_scaler.state)
    lines.step((0.6, 90.0))
    assert raw(own.state) != raw(lines.loss_scaler.state)
    assert all(scaler.LossScaler.owner_of(one) is own for one in own.variables if "tensor" in one.name)
    again = copied(scaler.LossScaler(guarded("skip")))
    again.apply(keras.optimizers.SGD(), [tf.constant([1.0])], [tf.Variable([1.0])], unscaled=True)
    assert again.state.tensor_norms.shape == (5, 1)
    assert (
        len([one for one in again.variables if scaler.LossScaler.owner_of(one) is again and "tensor" in one.name]) == 3
    )


def test_a_checkpoint_of_a_copy_holds_its_windows(tmp_path):
    path = tf.train.Checkpoint(s=copy.deepcopy(shared("skip").loss_scaler)).write(str(tmp_path / "state"))
    assert len([name for name, _ in tf.train.list_variables(path) if "tensor_state/tensor" in name]) == 3


def a_list(by_tensor, **arguments):
    """A scaler, and a function that gives it gradients of some variables."""
    loss_scaler = scaler.LossScaler(guarded(by_tensor, norm=False), **arguments)
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
    for _ in range(5):
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

    for _ in range(5):
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
    for _ in range(5):
        give(dense(1.0), dense(2.0), dense(3.0))
    assert Cause(int(give(dense(300.0), of=variables[2:]).cause)) is Cause.SPIKE
    assert "'c" in loss_scaler.explain()
    other = tf.Variable(tf.ones([4, 2]), name="d")
    with pytest.raises(scaler.InvalidArgument, match=r"remembers the last norms of 3 variables.*'d.*is none of them"):
        loss_scaler.apply(keras.optimizers.SGD(), [dense(1.0)], [other], unscaled=True)


@pytest.mark.slow
@pytest.mark.exhaustive_with("True")
@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_windows_of_micro_batches_are_judged_whole(by_tensor, select):
    """`when` is False for the first of two, which neither enters a window nor is clipped."""
    weight, optimizer = tf.Variable([0.0]), keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    loss_scaler = scaler.LossScaler(guarded(by_tensor), select=select)

    @tf.function
    def take(grad, when):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight) * grad)
        return loss_scaler.apply(optimizer, tape.gradient(scaled, [weight]), [weight], when=when)

    def window(grad):
        one = take(tf.constant(1e4), tf.constant(False))
        assert (bool(one.finite), int(one.cause), int(one.clipped_tensors), float(one.value)) == (False, 0, 0, 0.0)
        return take(tf.constant(grad), tf.constant(True))

    assert all(bool(window(1.0).finite) for _ in range(5))
    assert loss_scaler.state.tensor_norms[:, 0].numpy().tolist() == [1.0] * 5
    outcome = window(50.0)
    assert bool(outcome.finite) is (by_tensor == "clip")
    assert int(outcome.clipped_tensors) == (by_tensor == "clip")
    assert float(outcome.clipped_norm) == 3.0 or by_tensor == "skip"


@pytest.mark.parametrize("by_tensor", ["skip", "clip"])
def test_many_small_gradients_have_norms_of_their_own(by_tensor):
    """Without the guard they are measured together, and moved together."""
    weights, optimizer = [tf.Variable(tf.ones([3]), name=f"w{at}") for at in range(8)], keras.optimizers.Adam(0.5)
    optimizer.build(weights)
    loss_scaler = scaler.LossScaler(guarded(by_tensor))

    @tf.function
    def take(slopes):
        with tf.GradientTape() as tape:
            lines = [tf.reduce_sum(weight) * slopes[at] for at, weight in enumerate(weights)]
            scaled = loss_scaler.scale(tf.add_n(lines))
        return loss_scaler.apply(optimizer, tape.gradient(scaled, weights), weights)

    usual = np.float32([1, 2, 3, 4, 5, 6, 7, 1000])
    for _ in range(5):
        assert bool(take(usual).finite)
    np.testing.assert_allclose(loss_scaler.state.tensor_usual, np.sqrt(3.0) * usual, rtol=1e-6)
    outcome = take(np.where(usual == 5, np.float32(50), usual))
    if by_tensor == "skip":
        assert (Cause(int(outcome.cause)), int(outcome.variable), int(outcome.count)) == (Cause.SPIKE, 4, 1)
    else:
        clipped = np.where(usual == 5, 15, usual)
        np.testing.assert_allclose(outcome.clipped_norm, np.sqrt(3.0) * np.linalg.norm(clipped), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.exhaustive_with("graph-True")
@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("execute", [lambda step: step, tf.function], ids=["eager", "graph"])
def test_an_overflow_is_retried_and_the_gradient_of_the_rest_is_clipped(execute, select):
    weight, optimizer = tf.Variable([0.0, 0.0]), keras.optimizers.SGD(2.0**-20)
    optimizer.build([weight])
    guard = SpikeGuard(Dynamic(2.0**15), window=5, loss=False, by_tensor="clip")
    loss_scaler = scaler.LossScaler(guard, select=select)

    @execute
    def take(slope):
        with tf.GradientTape(persistent=True) as tape:
            line = tf.cast(tf.cast(weight, tf.float16) * tf.cast(slope, tf.float16), tf.float32)
            scaled = loss_scaler.scale(tf.reduce_sum(line))
        again = lambda small: tape.gradient(scaled, [weight], output_gradients=small)  # noqa: E731
        return loss_scaler.apply(optimizer, None, [weight], again=again)

    outcomes = [take(tf.constant(slope)) for slope in (3.0, 3.0, 3.0, 3.0, 3.0, 3000.0)]
    assert all(bool(one.finite) for one in outcomes)
    assert [int(one.retries) for one in outcomes] == [1, 0, 0, 0, 0, 10]
    assert [int(one.clipped_tensors) for one in outcomes] == [0] * 5 + [1]
    np.testing.assert_allclose(outcomes[5].clipped_norm, 9 * np.sqrt(2.0), rtol=1e-5)


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


@pytest.mark.slow
def test_adagrad_which_is_looked_at_keeps_its_promise():
    lines = warmed("skip", optimizer=keras.optimizers.Adagrad(0.1))
    before = lines.moved()
    assert Cause(int(lines.step(SPIKE).cause)) is Cause.SPIKE
    assert lines.moved() == before
