"""Guards each private name that scaler/backend touches: without it, the same numbers or a sentence, never others."""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import eager, ops
from tensorflow.python.checkpoint.restore import CheckpointPosition
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.trackable.base import Trackable
from versions import needs_keras

import scaler
from scaler.backend import apply_steps, graphs, layers, optimizers, packed
from scaler.backend.versions import say_once
from scaler.gate import joined
from scaler.gate.proofs import largest_learning_rate

START = [1.0, 2.0, 3.0]


@pytest.fixture(autouse=True)
def _each_warning_is_heard():
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def owner(kind, name):
    """The class that a method is written in."""
    return next(each for each in kind.__mro__ if name in vars(each))


def sgd(grads, variables):
    """Needs AutoGraph: a Python `if` on a tensor."""
    for grad, variable in zip(grads, variables, strict=True):
        if tf.reduce_any(tf.math.is_nan(grad)):
            variable.assign(tf.zeros_like(variable))
        else:
            variable.assign_sub(0.125 * grad)


def plain_sgd(grads, variables):
    for grad, variable in zip(grads, variables, strict=True):
        variable.assign_sub(0.125 * grad)


def trained(optimizer, by_hand=False, strategy=None):
    """The weights after three steps in a graph, the second of which overflows."""
    variable = tf.Variable(START)
    loss_scaler = scaler.LossScaler(strategy or scaler.Dynamic(1024.0, growth_interval=1))

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(tf.square(variable))
            scaled = loss * loss_scaler.loss_scale if by_hand else loss_scaler.scale(loss)
        loss_scaler.apply(optimizer, tape.gradient(scaled, [variable]), [variable])

    for factor in (1.0, float("inf"), 1.0):
        step(tf.constant(factor))
    return variable.numpy().tolist()


MOVED = (np.array(START) * 0.75**2).tolist()


@pytest.mark.slow_with("tf_convert", "control_status_ctx")
@pytest.mark.parametrize("name", ["tf_convert", "control_status_ctx"])
def test_without_tf_convert_users_functions_are_traced_as_they_are(monkeypatch, name):
    monkeypatch.delattr(tf.__internal__.autograph, name)
    with pytest.warns(UserWarning, match=r"Keras .* on TensorFlow .* does not tell how to rewrite a function") as seen:
        assert trained(plain_sgd) == MOVED
    assert len(seen) == 1
    with pytest.raises(TypeError, match=r"symbolic `tf\.Tensor` as a Python `bool`"):
        trained(sgd)


def test_without_could_possibly_record_a_scale_by_hand_is_still_the_one_divided_by(monkeypatch):
    monkeypatch.setattr(eager, "record", types.ModuleType("record"))
    with tf.GradientTape():
        assert not graphs.tape_records()
    assert trained(plain_sgd, by_hand=True) == MOVED


def test_without_the_xla_context_every_function_is_traced_as_if_compiled(monkeypatch):
    monkeypatch.setattr(ops, "control_flow_util", types.ModuleType("control_flow_util"))
    variable, loss_scaler = tf.Variable(START), scaler.LossScaler(scaler.Dynamic(1024.0))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.square(variable)))
        return loss_scaler.apply(plain_sgd, tape.gradient(scaled, [variable]), [variable]).finite

    with pytest.warns(UserWarning, match="does not tell whether XLA compiles a function"):
        assert step()
    assert variable.numpy().tolist() == (np.array(START) * 0.75).tolist()


def dense_layer():
    layer = keras.layers.Dense(2)
    layer.build([None, 3])
    return layer


def test_without_the_tracker_delayed_scaling_is_refused_and_current_scaling_works(monkeypatch):
    layer = dense_layer()
    object.__setattr__(layer, "_tracker", types.SimpleNamespace())
    with pytest.raises(scaler.UnsupportedVersion, match="variables of a layer that is built"):
        scaler.formats.emulated("float8_e4m3fn")(layer)
    assert "call" not in vars(layer)
    scaler.formats.emulated("float8_e4m3fn", scaling="current")(layer)


def test_without_the_running_call_delayed_scaling_is_refused(monkeypatch):
    layer = dense_layer()
    monkeypatch.setitem(sys.modules, "keras.src.backend.common.global_state", types.ModuleType("global_state"))
    with pytest.raises(scaler.UnsupportedVersion, match="whether a call of a layer is training"):
        scaler.formats.emulated("float8_e4m3fn")(layer)
    assert "call" not in vars(layer)
    assert len(layer.variables) == 2


@pytest.mark.parametrize("name", ["_compute_attention", "_compute_causal_mask", "_masked_softmax"])
def test_without_methods_of_attention_its_products_are_left_alone(monkeypatch, name):
    model = keras.Sequential([keras.layers.MultiHeadAttention(1, 2, name="attention")])
    monkeypatch.delattr(keras.layers.MultiHeadAttention, name)
    with pytest.warns(UserWarning, match="its products are not emulated"):
        assert scaler.formats.emulated("mxfp4").layers_of(model) == {}


def freezing_step():
    """A step, and the variable it trains, which somebody may freeze between two calls."""
    variable = keras.Variable(START)
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))

    @tf.function
    def step(freezes_itself):
        variable.trainable = True
        loss_scaler.apply(plain_sgd, [tf.constant(START)], [variable])
        if freezes_itself:
            variable.trainable = False

    return variable, step


def test_without_capture_call_time_value_freezing_is_noticed_while_tracing_alone(monkeypatch):
    variable, step = freezing_step()
    step(False)
    variable.trainable = False
    with pytest.raises(scaler.InvalidArgument, match=r"frozen \(trainable=False\) since"):
        step(False)
    monkeypatch.delattr(FuncGraph, "capture_call_time_value")
    variable, step = freezing_step()
    step(False)
    variable.trainable = False
    step(False)
    assert np.asarray(variable).tolist() == (np.array(START) * 0.0 + np.array(START) - 0.25 * np.array(START)).tolist()


def test_without_add_scope_exit_callback_what_a_function_does_to_itself_is_refused_too(monkeypatch):
    _, step = freezing_step()
    for _ in range(2):
        step(True)
    monkeypatch.delattr(FuncGraph, "_add_scope_exit_callback")
    _, step = freezing_step()
    with pytest.raises(scaler.InvalidArgument, match=r"frozen \(trainable=False\) since"):
        step(True)


def test_without_get_function_what_happens_in_a_function_counts_as_unknown(monkeypatch):
    variable, loss_scaler = tf.Variable(START), scaler.LossScaler(scaler.Dynamic(1024.0))
    by = tf.function(lambda loss, scale: loss * scale)

    @tf.function
    def step(scale):
        with tf.GradientTape() as tape:
            scaled = by(tf.reduce_sum(tf.square(variable)), scale)
        loss_scaler.apply(plain_sgd, tape.gradient(scaled, [variable]), [variable])

    scale = loss_scaler.loss_scale
    monkeypatch.setattr(FuncGraph, "_get_function", lambda graph, name: None)
    step(scale)
    assert variable.numpy().tolist() == (np.array(START) * 0.75).tolist()


@pytest.mark.slow
def test_without_watched_variables_a_missing_rollback_is_said(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
    loss_scaler = scaler.LossScaler(scaler.Dynamic(1024.0))

    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(model(tf.ones([2, 2]), training=True)))
        return loss_scaler.apply(plain_sgd, tape.gradient(scaled, model.trainable_variables), model.trainable_variables)

    assert tf.function(step)().finite
    unseen = property(lambda graph: (), lambda graph, variables: None)
    monkeypatch.setattr(FuncGraph, "_watched_variables", unseen, raising=False)
    monkeypatch.setattr(FuncGraph, "watch_variable", lambda graph, variable: None)
    with pytest.warns(scaler.ScaleWarning, match="without rollback, a skipped step leaves BatchNorm's statistics"):
        assert tf.function(step)().finite


def test_without_a_word_from_checkpoints_it_is_said_that_restored_steps_count(monkeypatch):
    kinds = {kind for kind in type(tf.Variable(1.0)).__mro__ if "_restore_from_tensors" in vars(kind)}
    for kind in {*kinds, Trackable}:
        monkeypatch.delattr(kind, "_restore_from_tensors", raising=False)
    with pytest.warns(UserWarning, match="does not tell when a checkpoint is restored: StuckPolicy"):
        loss_scaler = scaler.LossScaler()
    held = loss_scaler._trackable_children()
    assert {"_all_variables"} == {name for name in held if name.startswith("_")}


def test_without_deferred_values_it_is_said_that_windows_may_be_lost(monkeypatch, tmp_path):
    weight, optimizer = tf.Variable([1.0]), keras.optimizers.SGD()
    guard = scaler.SpikeGuard(scaler.Dynamic(2.0**4), by_tensor="skip")

    def give(loss_scaler):
        loss_scaler.apply(optimizer, [tf.constant([1.0])], [weight], unscaled=True)
        return loss_scaler.state.tensor_norms.numpy()[..., 0].tolist()

    before = scaler.LossScaler(guard)
    give(before)
    path = tf.train.Checkpoint(s=before).write(str(tmp_path / "state"))
    monkeypatch.setattr(CheckpointPosition, "restore_uid", property(lambda position: position.missing))
    again = scaler.LossScaler(guard)
    with pytest.warns(UserWarning, match="its windows are lost"):
        tf.train.Checkpoint(s=again).read(path)
    assert again.state.tensor_norms.shape[-1] == 0
    monkeypatch.undo()
    assert give(again) == give(before)


def test_without_lookup_dependency_it_is_said_what_a_checkpoint_may_lose(monkeypatch):
    without = types.SimpleNamespace(optimizers=types.SimpleNamespace(Optimizer=object))
    monkeypatch.setattr(packed, "keras", without)
    with pytest.warns(UserWarning, match=r"does not tell what a checkpoint looks for.*inner_optimizer"):
        scaler.LossScaleOptimizer(keras.optimizers.SGD())


def built(optimizer, *variables):
    optimizer.build(list(variables))
    return optimizer


def test_without_trainable_variables_a_model_with_another_optimizer_is_not_protected():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(scaler.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse", run_eagerly=True)
    model.other = built(keras.optimizers.SGD(), *model.trainable_variables)
    scaler.protect(model)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    vars(model.other).pop("_trainable_variables")
    before = [np.asarray(weight).tolist() for weight in model.weights]
    with pytest.raises(scaler.UnsupportedVersion, match=r"protect: .* does not tell which variables SGD updates"):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert [np.asarray(weight).tolist() for weight in model.weights] == before


def test_without_trainable_variables_averages_that_a_callback_swaps_are_said_to_stay_behind():
    optimizer = built(keras.optimizers.SGD(use_ema=True), keras.Variable(START))
    vars(optimizer).pop("_trainable_variables")
    with pytest.warns(UserWarning, match=r"SwapEMAWeights leaves 16-bit weights as they are.*finalize_variable_values"):
        optimizers.have_it_go_through(optimizer, [])


def test_without_var_key_variables_are_told_apart_by_themselves():
    one, other = keras.Variable(START), keras.Variable(START)
    assert optimizers.key_of(object(), one) == optimizers.key_of(object(), one.value)
    assert optimizers.key_of(object(), one) != optimizers.key_of(object(), other)


def masters_with_decay(optimizer):
    """A step over a float16 variable whose master must not decay."""
    variable = keras.Variable(np.array(START, np.float16), dtype="float16")
    masters, loss_scaler = scaler.MasterWeights([variable]), scaler.LossScaler(scaler.Static(1.0))
    optimizer.exclude_from_weight_decay(var_list=[variable])
    loss_scaler.apply(optimizer, [tf.zeros([3], tf.float16)], masters)
    return np.asarray(variable, np.float32).tolist()


class DecaysByIdentity(keras.optimizers.SGD):
    """As a release of Keras might: exclusions are looked up without `_var_key`."""

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        vars(self)["excluded"] = {id(variable) for variable in var_list}

    def _use_weight_decay(self, variable):
        return id(variable) not in vars(self)["excluded"]


def test_weight_decay_that_does_not_know_masters_is_refused(monkeypatch):
    assert masters_with_decay(keras.optimizers.SGD(0.5, weight_decay=0.5)) == START
    with pytest.raises(scaler.UnsupportedVersion, match="leaves out of weight decay"):
        masters_with_decay(DecaysByIdentity(0.5, weight_decay=0.5))
    monkeypatch.delattr(owner(keras.optimizers.SGD, "_use_weight_decay"), "_use_weight_decay")
    with pytest.raises(scaler.UnsupportedVersion, match="does not tell which variables SGD leaves out of weight decay"):
        masters_with_decay(keras.optimizers.SGD(0.5, weight_decay=0.5))


@needs_keras("MultiOptimizer")
def test_a_multi_optimizer_that_does_not_ask_is_refused_with_masters(monkeypatch):
    def step():
        variable = keras.Variable(np.array(START, np.float16), dtype="float16")
        optimizer = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.5))
        scaler.LossScaler(scaler.Static(1.0)).apply(
            optimizer, [tf.ones([3], tf.float16)], scaler.MasterWeights([variable])
        )

    step()
    monkeypatch.setattr(keras.optimizers.MultiOptimizer, "build", lambda optimizer, variables: None)
    with pytest.raises(scaler.UnsupportedVersion, match="does not show how a MultiOptimizer chooses"):
        step()


def test_without_learning_rate_nothing_is_proven_and_the_numbers_are_the_same():
    optimizer = keras.optimizers.SGD(0.125)
    assert largest_learning_rate(optimizer, []) is not None
    vars(optimizer)["_learning_rate_renamed"] = vars(optimizer).pop("_learning_rate")
    assert largest_learning_rate(optimizer, []) is None


def test_without_keras_logits_a_softmax_is_known_by_its_operation():
    tensor = keras.activations.softmax(tf.ones([1, 2]))
    assert layers.is_softmax_or_sigmoid(tensor)
    assert not layers.is_softmax_or_sigmoid(tf.identity(tensor))


def test_without_direction_a_metric_is_of_none():
    assert layers.direction_of(keras.metrics.Accuracy()) == "up"
    assert layers.direction_of(object()) is None


def window_of_two(run=lambda step: step):
    """Two micro-batches of an optimizer that accumulates."""
    variable = keras.Variable(START)
    inner = keras.optimizers.SGD(0.125, gradient_accumulation_steps=2)
    optimizer = scaler.LossScaleOptimizer(inner, scaler.Static(1.0))
    step = run(lambda: optimizer.apply([tf.constant(START)], [variable]).finite)
    for _ in range(2):
        step()
    return np.asarray(variable).tolist()


def test_a_window_that_nobody_calls_is_refused_before_anything_moves(monkeypatch):
    base = owner(keras.optimizers.SGD, apply_steps.WINDOW)
    assert window_of_two() == (np.array(START) * 0.875).tolist()
    renamed = keras.Variable(START)

    def apply(optimizer, grads, trainable_variables=None):
        del trainable_variables
        optimizer.assign(renamed, grads[0])

    monkeypatch.setattr(base, "apply", apply)
    with pytest.raises(scaler.UnsupportedVersion, match="calls _backend_apply_gradients 0 times a step"):
        window_of_two()
    assert np.asarray(renamed).tolist() == START


@pytest.mark.slow_with("_clip_gradients")
@pytest.mark.parametrize("name", ["_clip_gradients", "_backend_update_step", "_update_model_variables_moving_average"])
def test_a_part_of_a_window_that_is_missing_is_refused(monkeypatch, name):
    for kind in keras.optimizers.SGD.__mro__:
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
    with pytest.raises(scaler.UnsupportedVersion, match=name):
        window_of_two(tf.function)


@pytest.mark.slow
def test_a_count_that_a_window_needs_is_refused_where_it_is_missing():
    variable = keras.Variable(START)
    inner = keras.optimizers.SGD(0.125, gradient_accumulation_steps=2)
    optimizer = scaler.LossScaleOptimizer(inner, scaler.Static(1.0))
    step = tf.function(lambda: optimizer.apply([tf.constant(START)], [variable]).finite)
    optimizer.build([variable])
    vars(inner)["_iterations_renamed"] = vars(inner).pop("_iterations")
    with pytest.raises((scaler.UnsupportedVersion, AttributeError), match="_iterations"):
        step()
    assert np.asarray(variable).tolist() == START


class WithoutGraphs:
    """TensorFlow, whose graphs have none of the methods that ours have."""

    compat = types.SimpleNamespace(v1=types.SimpleNamespace(get_default_graph=object))

    def __getattr__(self, name):
        return getattr(tf, name)


def trained_with_a_slot():
    """The weights, and how often the step was traced, which makes a slot."""
    variable, traced = tf.Variable(START), []
    loss_scaler, optimizer = scaler.LossScaler(scaler.Static(8.0)), keras.optimizers.SGD(0.5, momentum=0.5)

    @tf.function
    def step(grad):
        traced.append(grad)
        loss_scaler.apply(optimizer, [grad], [variable], unscaled=True)

    for size in (8.0, np.nan, 4.0):
        step(np.float32([size, 1.0, 2.0]))
    return variable.numpy().tolist(), len(traced)


@pytest.fixture(scope="module")
def with_every_name():
    return trained_with_a_slot()


@pytest.mark.parametrize("name", ["default_variable_creator_v2", "_variable_creator_scope"])
def test_without_a_way_past_functions_one_that_makes_variables_is_traced_twice(monkeypatch, with_every_name, name):
    weights, traces = with_every_name
    if name == "default_variable_creator_v2":
        monkeypatch.setitem(sys.modules, "tensorflow.python.ops.resource_variable_ops", types.ModuleType("gone"))
    else:
        monkeypatch.setattr("scaler.backend.variables.tf", WithoutGraphs())
    assert (traces, trained_with_a_slot()) == (1, (weights, 2))


def moved_by_sgd():
    """Four small variables after a step."""
    model, loss_scaler = [tf.Variable([4.0]) for _ in range(4)], scaler.LossScaler(scaler.Static(1.0))
    optimizer = keras.optimizers.SGD(0.5)
    tf.function(lambda: loss_scaler.apply(optimizer, [tf.ones([1])] * 4, model, unscaled=True))()
    return [variable.numpy().tolist() for variable in model]


@pytest.fixture
def joins(monkeypatch):
    """Grows with each update of joined variables."""
    made, real = [], joined.move
    monkeypatch.setattr(joined, "_WORTH_JOINING", 4)
    monkeypatch.setattr(joined, "move", lambda *arguments: made.append(1) or real(*arguments))
    return made


def test_small_variables_are_updated_as_one(joins):
    assert (moved_by_sgd(), joins) == ([[3.5]] * 4, [1])


@pytest.mark.parametrize("name", ["_get_variable_index", "_use_weight_decay", "_distribution_strategy"])
def test_without_what_a_twin_needs_small_variables_are_updated_one_by_one(monkeypatch, joins, name):
    if name == "_distribution_strategy":  # Keras itself goes through it.
        monkeypatch.setattr(optimizers, "_NAMES", (f"{name}_as_it_was",))
    else:
        monkeypatch.delattr(owner(keras.optimizers.SGD, name), name)
    with pytest.warns(UserWarning, match="small variables are updated one by one"):
        assert (moved_by_sgd(), joins) == ([[3.5]] * 4, [])


@pytest.mark.parametrize("kind", ["tensor", "layer"])
def test_without_the_connections_of_layers_unit_scaling_is_refused(kind):
    from_layer = types.SimpleNamespace(_keras_history=types.SimpleNamespace(operation=object(), node_index=0))
    tensor = object() if kind == "tensor" else from_layer
    with pytest.raises(scaler.UnsupportedVersion, match=r"unit_scaled: Keras .* does not say"):
        layers.calls_of(types.SimpleNamespace(outputs=[tensor]))
