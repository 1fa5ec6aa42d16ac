"""A run that skips most of its steps is told by default, though clean ones come between; calibration is not.

Guards line 6 of the promise: it never sticks silently.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from mirrored import mirrored

import loops
import scaler
from scaler import Dynamic, Event, LossScaler, StuckError, StuckPolicy, presets
from scaler.outcome.stuck import Reading, Watch

BOUNDS = (2.0**-126, 2.0**126)


def looked(word, every=1, start=(0, 0, 0), watch=None):
    """The step at which a scaler that is looked at every so many steps is found stuck, or None; "0" is a skip."""
    watch = watch or Watch(StuckPolicy())
    attempted, skipped, row = start
    for letter in word:
        attempted, skipped, row = attempted + 1, skipped + (letter == "0"), row + 1 if letter == "0" else 0
        if attempted % every == 0:
            try:
                watch.look(lambda: "The scaler", Reading(attempted, skipped, row, 1.0), *BOUNDS, lambda: "")
            except StuckError:
                return attempted
    return None


@pytest.mark.parametrize(
    ("every", "found"), [(1, 200), (7, 203), (50, 200), (100, 200), (150, 300), (400, 400), (800, 800)]
)
@pytest.mark.parametrize("word", ["1" + "0" * 15, "0" * 15 + "1", "1000", "0111" + "0" * 12])
def test_most_steps_skipped_is_found_however_rare_the_visits(word, every, found):
    assert looked((word * 800)[:800], every) == found


HARMLESS = {
    "54 skips at the start": "0" * 54 + "1" * 500,
    "99 skips at the start": "0" * 99 + "1" * 500,
    "54 skips, then half for ever": "0" * 54 + "10" * 500,
    "half for ever": "10" * 700,
    "two of three for ever": "100" * 400,
    "one skip an interval": ("1" * 50 + "0") * 30,
    "one bad batch in ten": ("1" * 9 + "0") * 100,
    "a short run": "0" * 90 + "1" + "0" * 90,
    "none": "1" * 1000,
}


@pytest.mark.parametrize("every", [1, 7, 50, 100, 400])
@pytest.mark.parametrize("word", HARMLESS.values(), ids=HARMLESS)
def test_calibration_is_not(word, every):
    assert looked(word, every) is None


def calibrating(strategy, steps=1200):
    """A function from a level to what `strategy` applies of a run whose backward pass overflows above it.

    Of levels that stand side by side it is what the strategy applies of each.
    """

    @tf.function(autograph=False)
    def run(level):
        def step(number, state, applied):
            finite = state.loss_scale <= level
            event = Event(finite, amax=tf.where(finite, 65504.0 / level, float("inf")))
            return number + 1, strategy.update(state, event), applied.write(number, finite)

        state = strategy.init()
        if level.shape.rank:
            state = type(state)(*(tf.broadcast_to(value, tf.shape(level)) for value in state))
        start = [0, state, tf.TensorArray(tf.bool, steps)]
        return tf.while_loop(lambda number, *_: number < steps, step, start)[2].stack()

    return lambda level: run(tf.constant(level)).numpy()


def as_word(applied):
    return "".join("1" if one else "0" for one in applied)


CALIBRATING = {
    "DelayedAmax": (scaler.DelayedAmax(), (1.0, 2.0**10)),
    "Smooth": (scaler.Smooth(), (1.0, 2.0**10)),
} | {
    # One of each rule. Scales that never move are left out: of a hundred skips in a row other tests tell.
    f"presets.{name}": (getattr(presets, name)(), (2.0**4, 2.0**10))
    for name in ("chainer", "fairseq", "metaseq", "nnabla")
}


def assert_not_stuck(word, level):
    assert "1" in word[-10:]
    for every in (1, 100):
        assert looked(word, every) is None, level


def test_dynamic_scaling_is_not_stuck_while_it_looks_for_its_level():
    runs = [
        # The first scale, the interval, the hysteresis and the level, of runs side by side.
        *((2.0**15, 2000, 1, level) for level in (1.0, 2.0**20)),
        *((2.0**40, 2000, 1, level) for level in (2.0**-14, 1.0)),
        *((2.0**15, 1, 1, level) for level in (2.0**-14, 1.0, 2.0**20)),
        *((2.0**40, 1, 1, level) for level in (2.0**-14, 1.0)),
        *((2.0**15, 1, 2, level) for level in (1.0, 2.0**10)),
    ]
    initial, interval, hysteresis, levels = map(list, zip(*runs, strict=True))
    assert (Dynamic().initial_scale, Dynamic().growth_interval) == (2.0**15, 2000)
    strategy = Dynamic(tf.constant(initial), growth_interval=tf.constant(interval), hysteresis=tf.constant(hysteresis))
    applied = calibrating(strategy)(levels)
    for word, one in zip(applied.T, runs, strict=True):
        assert_not_stuck(as_word(word), one)


@pytest.mark.slow_with("presets.fairseq")
@pytest.mark.parametrize(("strategy", "levels"), CALIBRATING.values(), ids=CALIBRATING)
def test_no_strategy_is_stuck_while_it_looks_for_its_level(strategy, levels):
    run = calibrating(strategy)
    for level in levels:
        assert_not_stuck(as_word(run(level)), level)


@pytest.mark.parametrize("every", [1, 20, 100])
def test_what_was_skipped_before_a_checkpoint_counts_no_more(every):
    watch = Watch(StuckPolicy())
    watch.history.forget()
    assert looked("1" * 100 + "10" * 300, every, start=(5000, 4800, 3), watch=watch) is None
    assert looked("1000" * 100, every, start=(5700, 5100, 0), watch=watch) is not None


def mostly_nan(bad=480, rows=512):
    """Batches of 32 rows of which the first `bad` are NaN."""
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    y = x[:, :1].copy()
    x[:bad] = np.nan
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(32)


def train_step(stuck=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    loss_scaler = LossScaler(Dynamic(), stuck=stuck)
    loss_fn = keras.losses.MeanSquaredError()
    return loops.TrainStep(model, loss_fn, keras.optimizers.SGD(0.01), loss_scaler=loss_scaler)


@pytest.mark.slow
def test_a_loop_with_half_of_the_rows_nan_goes_on_where_it_may():
    loop = loops.Loop(train_step(StuckPolicy(bad_loss_rate=None)), mostly_nan(256), steps_per_call=100)
    assert loop.run(400).skipped == 200


@pytest.mark.slow
def test_a_mended_run_goes_on_from_the_checkpoint_of_a_stuck_one(tmp_path):
    def run(data, resume, until):
        actions = [loops.Checkpoint(tmp_path, every=50, resume=resume)]
        loop = loops.Loop(train_step(), data, steps_per_call=50, actions=actions)
        return loop.run(until)

    with pytest.raises(StuckError, match=r"188 of the last 200 steps.*the loss itself was not finite"):
        run(mostly_nan(), False, 800)
    # Batches that were read ahead are bad still.
    done = run(mostly_nan(0), True, 600)
    assert (done.data, done.attempted) == (600, 600)
    assert 188 <= done.skipped < 188 + 32


def bad(loss_scaler, steps, clean_every=4):
    """Counts steps of which one in so many is clean."""
    update = tf.function(lambda finite: loss_scaler.update(Event(finite)), autograph=False)
    for number in range(steps):
        update(tf.constant(number % clean_every == 0))


def test_each_loss_is_watched_by_itself():
    losses = scaler.PerLoss({"good": Dynamic(), "bad": Dynamic(growth_interval=7)})
    bad(losses["bad"], 200, clean_every=5)
    with pytest.raises(StuckError, match=r"^Loss 'bad': .* 160 of the last 200"):
        losses.check()
    losses["good"].check()


def test_a_warning_about_a_loss_names_it():
    losses = scaler.PerLoss({"task": Dynamic()}, stuck=StuckPolicy("warn", consecutive_skips=1))
    losses["task"].update(Event(tf.constant(False)))
    with pytest.warns(scaler.StuckWarning, match="^Loss 'task': "):
        losses.check()


def test_a_restored_scaler_is_judged_from_there_on(tmp_path):
    stuck = LossScaler()
    bad(stuck, 220)
    path = tf.train.Checkpoint(loss_scaler=stuck).save(str(tmp_path / "ckpt"))
    with pytest.raises(StuckError, match="165 of the last 220 steps"):
        stuck.check()
    resumed = LossScaler()
    tf.train.Checkpoint(loss_scaler=resumed).restore(path).assert_consumed()
    resumed.check()
    bad(resumed, 199)
    resumed.check()
    bad(resumed, 1, clean_every=1000)
    with pytest.raises(StuckError, match=r"149 of the last 200 steps"):
        resumed.check()


@pytest.mark.parametrize("number", [1, 2])
def test_a_restored_scaler_on_replicas(tmp_path, number):
    strategy = mirrored(number)
    with strategy.scope():
        loss_scaler = LossScaler()
    attempted, applied = loss_scaler._counts["attempted"], loss_scaler._counts["applied"]
    attempted.assign(300)
    path = tf.train.Checkpoint(loss_scaler=loss_scaler).save(str(tmp_path / "ckpt"))
    attempted.assign(0)
    loss_scaler.check()
    tf.train.Checkpoint(loss_scaler=loss_scaler).restore(path)
    loss_scaler.check()
    applied.assign(300)
    with strategy.scope():
        fresh = LossScaler()
    tf.train.Checkpoint(loss_scaler=fresh).restore(path)
    fresh.check()


class Mine:
    init, update = Dynamic().init, Dynamic().update


STRATEGIES = {
    "default": Dynamic(),
    "arguments": Dynamic(2.0**10, growth_interval=5),
    "static": scaler.Static(8.0),
    "none": scaler.NoScaling(),
    "in another": scaler.strategies.Warmup(Dynamic(hysteresis=2), 50),
    "in a schedule": scaler.strategies.Scheduled({0: Dynamic(), 9: scaler.NoScaling()}),
    "variable": Dynamic(growth_interval=tf.Variable(7)),
    "of one's own": Mine(),
}
NAMED = {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()} | {"named": {"name": "critic"}}


@pytest.mark.parametrize("arguments", NAMED.values(), ids=NAMED)
def test_the_error_names_the_scaler_and_its_strategy(arguments, snapshot):
    loss_scaler = LossScaler(**arguments, stuck=StuckPolicy(consecutive_skips=1))
    loss_scaler.update(Event(tf.constant(False)))
    with pytest.raises(StuckError) as raised:
        loss_scaler.check()
    assert str(raised.value) == snapshot
