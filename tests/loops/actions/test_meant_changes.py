"""Guards that a run goes on with the changes that are named, from the step of its checkpoint, and with no others."""

import functools
import io
import shutil

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from loop_cases import afresh

import loops
import scaler
from halfstep.commands.read_runs import text_of_checkpoint
from loops.loop.state.compared import Changes
from loops.loop.state.folder import describe

# What is refused, and what a run goes on with, does not depend on who takes the steps.
pytestmark = pytest.mark.usefixtures("eagerly")


def data():
    """Two examples, whose gradients are not all the same."""
    return tf.data.Dataset.from_tensor_slices(([[1.0, 2.0], [3.0, 4.0]], [[1.0], [0.0]])).repeat().batch(1)


@functools.cache
def traced(policy, strategy, clip_norm, optimizer, momentum):
    """Loops of one step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**4, growth_interval=3) if strategy is None else strategy)
    optimizer = optimizer or keras.optimizers.SGD(momentum=momentum)
    step = loops.TrainStep(
        model, keras.losses.MeanSquaredError(), optimizer, loss_scaler=loss_scaler, clip_norm=clip_norm
    )
    return afresh(step, data(), steps_per_call=1, jit_compile=False)


def looping(place, strategy=None, changed=(), actions=(), rate=0.1, clip_norm=None, optimizer=None, momentum=0.9):
    """The program from its start: the same loop as for others of one step."""
    again = traced(keras.config.dtype_policy().name, strategy, clip_norm, optimizer, momentum)
    loop = again(data(), *actions, loops.Checkpoint(place, every=4, resume=True, changed=changed))
    if optimizer is None:
        loop.train_step.optimizer.learning_rate = rate
    return loop


def weights(loop):
    return [variable.numpy().tolist() for variable in loop.train_step.model.weights]


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    """Where a run of four steps was saved."""
    tf.config.run_functions_eagerly(True)  # As each test does that this comes before.
    place = tmp_path_factory.mktemp("four")
    looping(place).run(4)
    return place


@pytest.fixture
def place(four_steps, tmp_path):
    return shutil.copytree(four_steps, tmp_path / "run")


def test_another_learning_rate_is_that_of_the_program_from_there_on(place, tmp_path):
    whole = looping(tmp_path / "whole")
    whole.run(4)
    whole.train_step.optimizer.learning_rate = 0.01
    whole.run(6)
    expected = weights(whole)
    with pytest.raises(loops.CheckpointError, match=r"learning_rate was .*changed=\['learning_rate'\]"):
        looping(place, rate=0.01).run(6)
    console = rich.console.Console(file=io.StringIO(), width=200)
    changed = looping(place, rate=0.01, changed=["learning_rate"], actions=[loops.Progress(console=console)])
    changed.run(5)
    changed.run(6)
    assert console.file.getvalue().count("train  resumed from step 4; optimizer.learning_rate was") == 1
    (said,) = changed.resumed.changes
    assert said == f"optimizer.learning_rate was {float(np.float32(0.1))!r} and is {float(np.float32(0.01))!r}"
    assert changed.resumed.step == 4
    assert weights(changed) == expected
    # It goes on as changed without being named again. Where it is, a rate that a callback lowered stays as saved.
    changed.train_step.optimizer.learning_rate = 0.05
    changed.run(7)
    for named in ([], ["learning_rate"]):
        again = looping(place, rate=0.01, changed=named)
        again.run(7)
        assert again.resumed == (7, ())
        assert float(again.train_step.optimizer.learning_rate) == pytest.approx(0.05)
    (change,) = describe(place)["changes"]
    assert change["step"] == 4
    assert "changed      from step 4 on: optimizer.learning_rate was" in text_of_checkpoint(describe(place))
    with pytest.raises(loops.CheckpointError, match="learning_rate"):
        looping(place).run(12)


def test_other_settings_of_the_step_are_those_of_the_program(place):
    with pytest.raises(loops.CheckpointError, match=r"changed=\['(momentum|clip_norm)', '(momentum|clip_norm)'\]"):
        looping(place, clip_norm=0.5, momentum=0.5).run(8)
    goes_on = looping(place, clip_norm=0.5, momentum=0.5, changed=["clip_norm", "optimizer"])
    goes_on.run(5)
    assert len(goes_on.resumed.changes) == 2


def test_another_strategy_begins_at_the_scale_of_the_old_one(place):
    strategy = scaler.SpikeGuard(scaler.Dynamic())
    with pytest.raises(loops.CheckpointError, match=r"strategy was .*changed=\['loss_scaler'\]"):
        looping(place, strategy).run(5)
    goes_on = looping(place, strategy, ["loss_scaler"])
    counters = goes_on.run(5)
    assert (counters.data, counters.applied, counters.skipped) == (5, 5, 0)
    assert float(goes_on.train_step.loss_scaler.loss_scale) == 2.0**5


def test_another_interval_of_the_same_strategy_keeps_its_state(place):
    tf.config.run_functions_eagerly(False)  # As in a graph the next.
    goes_on = looping(place, scaler.Dynamic(2.0**4, growth_interval=2), changed=["loss_scaler"])
    goes_on.run(5)
    assert goes_on.train_step.loss_scaler.counters.attempted == 5
    # One good step of the old interval, and one more.
    assert float(goes_on.train_step.loss_scaler.loss_scale) == 2.0**6


def of_ones_own(place, strategy=None, changed=(), rate=0.25, known=False):
    """A loop of a step of one's own, which may show its optimizer, and its weight."""
    keras.utils.set_random_seed(0)
    weight, loss_scaler = tf.Variable([1.0]), scaler.LossScaler(strategy or scaler.Dynamic())
    optimizer = keras.optimizers.SGD(rate)

    def step(x):
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(weight * x))
        return {"applied": loss_scaler.apply(optimizer, [tape.gradient(scaled, weight)], [weight]).finite}

    if known:
        step.optimizer = optimizer
    saves = loops.Checkpoint(place, every=2, resume=True, changed=changed)
    data = tf.data.Dataset.from_tensors([1.0]).repeat()
    return loops.Loop(step, data, steps_per_call=1, actions=[saves]), weight


def test_a_step_of_ones_own_takes_its_rate_from_the_program(tmp_path):
    tf.config.run_functions_eagerly(False)
    of_ones_own(tmp_path, known=True)[0].run(2)
    goes_on, weight = of_ones_own(tmp_path, None, ["learning_rate"], 0.125, known=True)
    goes_on.run(4)
    assert weight.numpy() == [1.0 - 2 * 0.25 - 2 * 0.125]


def test_another_class_of_optimizer_is_refused_though_its_slots_have_the_same_shapes(place):
    other = type("Other", (keras.optimizers.SGD,), {})(0.1, momentum=0.9)
    with pytest.raises(loops.CheckpointError, match=r"the state of 'SGD' means nothing to 'Other' \(optimizer"):
        looping(place, changed=["optimizer"], optimizer=other).run(8)


def test_an_optimizer_that_cannot_go_on_has_no_way_out_but_its_weights(place):
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9), momentum=0.9)
    none = "a constant rate is a variable of the optimizer, and a schedule is none"
    for changed, optimizer, why in (
        (["optimizer"], keras.optimizers.Adam(), "the state of 'SGD' means nothing to 'Adam'"),
        (["class", "learning_rate"], scheduled, none),
    ):
        with pytest.raises(loops.CheckpointError, match=f"{why}.*call model.save_weights") as caught:
            looping(place, changed=changed, optimizer=optimizer).run(8)
        assert "If that is meant" not in str(caught.value)


@pytest.mark.slow
def test_the_weights_alone_go_on_as_that_message_says(place, tmp_path):
    whole = looping(place)
    whole.run(4)
    whole.train_step.model.save_weights(tmp_path / "all.weights.h5")
    anew = looping(tmp_path / "new", optimizer=keras.optimizers.Adam())
    anew.train_step.model.load_weights(tmp_path / "all.weights.h5")
    assert weights(anew) == weights(whole)


def test_another_strategy_of_a_scaler_that_the_step_only_uses_is_refused(tmp_path):
    of_ones_own(tmp_path)[0].run(2)
    with pytest.raises(loops.CheckpointError, match=r"means nothing to .Smooth|another model, optimizer, strategy"):
        of_ones_own(tmp_path, scaler.strategies.Smooth(), ["loss_scaler"])[0].run(3)
    of_ones_own(tmp_path, scaler.Dynamic(growth_interval=5), ["loss_scaler"])[0].run(2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("learning_rate", "expected a list of names"),
        ([1], "expected a list of names"),
        (["workers"], "does not go on with another workers, since each worker has checkpoints of its own"),
    ],
)
def test_names_that_cannot_work_are_refused(tmp_path, changed, said):
    with pytest.raises(scaler.InvalidArgument, match=said):
        loops.Checkpoint(tmp_path, every=1, changed=changed)


def test_a_name_that_nothing_has_is_refused_before_what_it_was_meant_for(place, tmp_path):
    """Also where nothing is saved yet."""
    said = r"no setting 'lr': expected some of .*clip_norm.*learning_rate.*loss_scaler"
    for where in (place, tmp_path / "new"):
        with pytest.raises(scaler.InvalidArgument, match=said):
            looping(where, rate=0.01, changed=["lr"]).run(5)


def of_policy(place, policy, strategy, changed=()):
    keras.config.set_dtype_policy(policy)
    return looping(place, strategy, changed=changed)


def test_another_dtype_policy_is_named_first(place):
    """Before the strategy, which often changes with it."""
    said = r"another run: layers\.dtype_policy was 'float32' and is 'mixed_float16'; strategy was 'Dynamic"
    with pytest.raises(loops.CheckpointError, match=said):
        of_policy(place, "mixed_float16", scaler.Static(8.0)).run(8)


@pytest.mark.slow
def test_another_dtype_policy_alone_warns_unless_it_is_named(tmp_path):
    of_policy(tmp_path, "mixed_float16", scaler.Dynamic()).run(1)
    with pytest.warns(loops.ResumeWarning, match=r"layers\.dtype_policy was 'mixed_float16' and is 'float32'"):
        of_policy(tmp_path, "float32", scaler.Dynamic()).run(1)
    goes_on = of_policy(tmp_path, "float32", scaler.NoScaling(), ["dtype_policy", "loss_scaler"])
    goes_on.run(1)
    assert len(goes_on.resumed.changes) == 2


def test_what_was_not_named_is_still_refused(place):
    with pytest.raises(loops.CheckpointError, match=r"clip_norm was None and is 0\.5"):
        looping(place, rate=0.01, clip_norm=0.5, changed=["learning_rate"]).run(8)


def test_a_setting_may_be_named_as_the_refusal_names_it():
    meant = Changes(["Layerwise.strategy"])
    meant.check(["Layerwise.strategy"])
    assert meant.are("Layerwise.strategy")
    assert not meant.are("strategy")
