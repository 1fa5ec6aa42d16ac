"""The callback's logs reach whoever reads logs, and a run that makes no progress is stopped."""

import csv
import warnings

import keras
import models
import pytest
from keras_cases import SCALE, compiled, data, fit, make_model, overflowing, started

import scaler


def messages_of(found):
    return [str(one.message) for one in found if "Call hs.protect(model)" in str(one.message)]


def test_history_files_and_the_progress_bar_see_it(tmp_path, capsys):
    model = compiled(stateful=False, run_eagerly=True)
    model.train_on_batch(*data(8))
    model.train_on_batch(*overflowing())
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", scaler.ScaleWarning)
        callbacks = [scaler.LossScaleLogger(), log]
        history = model.fit(*data(16), batch_size=8, verbose=2, callbacks=callbacks).history
    assert not messages_of(found)  # It is protected.
    wanted = {"loss_scale": SCALE, "skipped_steps": 1, "last_skip": scaler.Cause.LOSS}
    assert {name: history[name] for name in wanted} == {name: [value] for name, value in wanted.items()}
    (row,) = csv.DictReader((tmp_path / "log.csv").read_text().splitlines())
    assert {name: float(row[name]) for name in wanted} == wanted
    assert "loss_scale: 256.0000" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_progress_is_stopped():
    model = compiled(stateful=False)
    x, y = overflowing(80)
    x[:] = 1e30
    policy = scaler.StuckPolicy(consecutive_skips=4)
    with pytest.raises(scaler.StuckError, match=r"steps in a row were skipped.*the loss itself was not finite"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[scaler.LossScaleLogger(stuck=policy)])
    assert model.optimizer.loss_scaler.counters.skipped == 4


def told(model, x, y, epochs=1, **arguments):
    """The epochs after which a run that nobody checks is told to make no progress, and the sentences."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", scaler.StuckWarning)
        after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(len(caught)))
        callbacks = [after, *arguments.pop("callbacks", [])]
        model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **arguments)
    return found, [str(one.message) for one in caught if one.category is scaler.StuckWarning]


def test_a_run_without_progress_is_told_without_it():
    """Once, at the end of the first epoch, and without `protect` at the end of `fit`."""
    x, y = overflowing(48)
    x[:] = 1e30
    model = started(stateful=False)
    counts, said = told(model, x, y, epochs=2)
    assert counts == [1, 1]
    assert len(said) == 1
    assert "6 steps since the last applied one were skipped because of a loss that was not finite" in said[0]
    assert "the loss itself was not finite" in said[0]
    assert "hs.LossScaleLogger()" in said[0]
    assert told(model, x, y)[1] == []
    told(model, *data(8))
    assert len(told(model, x, y)[1]) == 1  # It trained in between.
    counts, said = told(compiled(stateful=False, protect=False, run_eagerly=True), x, y, epochs=2)
    assert (counts, len(said)) == ([0, 0], 1)


def test_a_run_is_told_nothing_that_its_policy_or_progress_speaks_against():
    x, y = overflowing(48)
    x[:] = 1e30
    model = started(stateful=False)
    loss_scaler = model.optimizer.loss_scaler
    loss_scaler.stuck = scaler.StuckPolicy("continue")
    assert told(model, x, y)[1] == []
    loss_scaler.stuck = scaler.StuckPolicy()
    assert told(model, x, y, callbacks=[scaler.LossScaleLogger()])[1] == []  # Its own policy allows more of them.
    loss_scaler.stuck = scaler.StuckPolicy()
    x[:8] = 1.0
    assert told(model, x[:40], y[:40], shuffle=False)[1] == []
    assert loss_scaler.counters.consecutive_skips == 4


def test_it_says_what_it_needs():
    with pytest.raises(scaler.InvalidArgument, match=r"stuck='warn'.*StuckPolicy"):
        scaler.LossScaleLogger(stuck="warn")
    model = make_model()
    model.compile("adam", loss="mse", auto_scale_loss=False)
    with pytest.raises(scaler.InvalidArgument, match="optimizer is a Adam: expected"):
        fit(model, callbacks=[scaler.LossScaleLogger()])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), loss="mse")
    with pytest.raises(scaler.InvalidArgument, match=r"optimizer is a keras\.optimizers\.LossScaleOptimizer: expected"):
        fit(model, callbacks=[scaler.LossScaleLogger()])


def two_layers(**arguments):
    """A model without `protect`, of which one layer may be frozen."""
    model = models.two_layers("mixed_float16")
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(1e-2)), loss="mse", jit_compile=False, **arguments)
    return model


@pytest.mark.dear("each `fit` is traced anew, since the model changed")
def test_a_fit_that_was_not_compiled_again_is_refused():
    model, logger = two_layers(), [scaler.LossScaleLogger()]
    fit(model, callbacks=logger)
    model.layers[0].trainable = False  # The model is traced already, but this one is compiled anew.
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD(1e-2)), loss="mse", jit_compile=False)
    fit(model, callbacks=logger)
    fit(model, callbacks=[scaler.LossScaleLogger()])
    before = [weight.tobytes() for weight in model.get_weights()]
    model.layers[0].trainable = True
    with pytest.raises(scaler.InvalidArgument, match=r"fit of model.*: made trainable since.*Compile the model again"):
        fit(model, callbacks=[scaler.LossScaleLogger()])
    assert [weight.tobytes() for weight in model.get_weights()] == before
    model.layers[0].trainable = False
    fit(model, callbacks=logger)


@pytest.mark.slow
def test_a_callback_that_unfreezes_in_the_middle_of_a_fit_is_noticed_at_the_next_epoch():
    model = two_layers()
    model.layers[0].trainable = False

    def unfreeze(epoch, logs):
        model.layers[0].trainable = epoch == 1

    unfreezes = keras.callbacks.LambdaCallback(on_epoch_end=unfreeze)
    with pytest.raises(scaler.InvalidArgument, match="made trainable since"):
        fit(model, epochs=4, callbacks=[scaler.LossScaleLogger(), unfreezes])
    assert model.optimizer.iterations == 12  # Two epochs of six batches.


def test_a_skip_in_a_model_that_is_not_protected_is_said_once():
    model = compiled(protect=False, stateful=False, run_eagerly=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", scaler.ScaleWarning)
        callback = scaler.LossScaleLogger()
        model.fit(*overflowing(), batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    assert len(messages_of(found)) == 1
