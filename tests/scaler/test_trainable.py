"""Guards that no layer is trained which was frozen since the step was traced, nor another one's master in its place."""

import keras
import pytest
import tensorflow as tf
from models import kernels, two_layers
from scaler_cases import gradients_of

import scaler

SGD = keras.optimizers.SGD


def written(made, optimizer, masters=None, given=None, loss_scaler=None):
    """A step as a user writes it; `given` are the variables, those that are trainable now if None."""
    # What a step selects is traced in half the time of what it branches to.
    loss_scaler = loss_scaler or scaler.LossScaler(scaler.Static(16.0), select=True)

    def step(x):
        variables = given or made.trainable_variables
        return loss_scaler.apply(
            optimizer,
            gradients_of(loss_scaler, lambda: tf.reduce_sum(tf.cast(made(x), tf.float32)), variables),
            masters or variables,
        ).finite

    return step


X = tf.ones([2, 4])
SINCE = "since this step was made or traced: "
FROZEN = rf"frozen \(trainable=False\) {SINCE}"
WAYS = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step),
    "xla": lambda step: tf.function(step, jit_compile=True),
    "nested": lambda step: tf.function(lambda x: tf.function(step)(x)),
    "in a loop": lambda step: tf.function(
        lambda x: tf.while_loop(lambda n, f: n < 2, lambda n, f: (n + 1, step(x)), (0, True))[1]
    ),
    "in a branch": lambda step: tf.function(lambda x: tf.cond(x[0, 0] > 0.0, lambda: step(x), lambda: False)),
}


@pytest.mark.slow_with("xla-float16")
@pytest.mark.parametrize(("way", "kind"), [("graph", "float16"), ("xla", "float16"), ("in a loop", "float32")])
def test_a_traced_function_does_not_train_a_layer_that_was_frozen(kind, way):
    made = two_layers(kind)
    masters = scaler.MasterWeights(made.trainable_variables) if kind == "float16" else None
    run = WAYS[way](written(made, SGD(0.1), masters))
    assert run(X)
    assert run(X)
    made.layers[0].trainable = False
    before = kernels(made)
    with pytest.raises(scaler.InvalidArgument, match=rf"{FROZEN}'.*dense_0/kernel', '.*dense_0/bias'\.") as caught:
        run(X)
    assert "the optimizer, the step and" in str(caught.value)
    assert kernels(made) == before
    made.layers[0].trainable = True
    assert run(X)
    assert kernels(made) != before


def test_a_function_that_was_traced_before_is_looked_at_in_a_branch_of_another():
    made = two_layers("float32")
    step = tf.function(written(made, SGD(0.1)))
    assert step(X)
    branches = [
        lambda x: tf.cond(x[0, 0] > 0.0, lambda: step(x), lambda: False),
        lambda x: tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: False, lambda: step(x)]),
        tf.function(lambda x: tf.cond(x[0, 0] > 0.0, lambda: step(x), lambda: False)),
    ]
    runs = [tf.function(branch) for branch in branches]
    assert all(run(X) for run in runs)
    made.layers[0].trainable = False
    before = kernels(made)
    for run in runs:
        with pytest.raises(scaler.InvalidArgument, match=FROZEN):
            run(X)
        assert kernels(made) == before


def test_masters_of_a_layer_do_not_take_the_gradients_of_another():
    """The two lists have the same lengths and shapes."""
    made = two_layers("float16", frozen=[1])
    masters = scaler.MasterWeights(made.trainable_variables)
    made.layers[0].trainable, made.layers[1].trainable = False, True
    before = kernels(made)
    for step in (written(made, SGD(0.1), masters), tf.function(written(made, SGD(0.1), masters))):
        with pytest.raises(scaler.InvalidArgument, match=rf"{FROZEN}.*dense_0/kernel"):
            step(X)
    assert kernels(made) == before


def test_what_has_no_gradient_may_be_frozen():
    made = two_layers("float16")
    masters = scaler.MasterWeights(made.trainable_variables)
    made.layers[0].trainable = False
    loss_scaler = scaler.LossScaler(scaler.Static(1.0))
    grads = [None, None, tf.ones([4, 4]), tf.ones([4])]
    before = kernels(made)
    assert loss_scaler.apply(SGD(0.1), grads, masters).finite
    assert kernels(made)[0] == before[0]
    assert kernels(made)[1] != before[1]


def test_variables_that_were_never_trainable_may_be_trained_by_name():
    made = two_layers(frozen=[0, 1])
    run = tf.function(written(made, SGD(0.1), given=made.layers[1].weights))
    for _ in range(3):
        assert run(X)


def test_a_layer_frozen_between_a_trace_and_its_first_call_is_noticed_and_a_new_trace_follows():
    made, optimizer = two_layers(), SGD(0.1)
    optimizer.build(made.trainable_variables)
    run = tf.function(written(made, optimizer)).get_concrete_function(X)
    made.layers[0].trainable = False
    with pytest.raises(scaler.InvalidArgument, match=rf"{FROZEN}.*dense_0/kernel"):
        run(X)
    before = kernels(made)
    assert tf.function(written(made, optimizer))(X)
    assert kernels(made)[0] == before[0]
    assert kernels(made)[1] != before[1]


@pytest.mark.slow
def test_compiled_fit_does_not_train_a_layer_that_was_frozen():
    made = two_layers("float16")
    made.compile(scaler.LossScaleOptimizer(SGD(0.1)), loss="mse", steps_per_execution=2)
    x, y = tf.ones([8, 4]), tf.ones([8, 4])
    made.fit(x, y, batch_size=2, verbose=0)
    made.layers[0].trainable = False
    before = kernels(made)
    with pytest.raises(scaler.InvalidArgument, match=rf"{FROZEN}.*dense_0/kernel.*compile the model again"):
        made.fit(x, y, batch_size=2, verbose=0)
    assert kernels(made) == before
    made.compile(made.optimizer, loss="mse", steps_per_execution=2)
    made.fit(x, y, batch_size=2, verbose=0)
    assert kernels(made)[0] == before[0]
    assert kernels(made)[1] != before[1]


@pytest.mark.slow
def test_protected_fit_does_not_leave_a_layer_untrained():
    made = scaler.protect(two_layers(frozen=[0]))
    made.compile(scaler.LossScaleOptimizer(SGD(0.1)), loss="mse")
    x, y = tf.ones([8, 4]), tf.ones([8, 4])
    made.fit(x, y, batch_size=2, verbose=0)
    made.layers[0].trainable = True
    with pytest.raises(scaler.InvalidArgument, match=rf"made trainable {SINCE}.*dense_0/kernel.*Compile"):
        made.fit(x, y, batch_size=2, verbose=0)
    made.compile(scaler.LossScaleOptimizer(SGD(0.1)), loss="mse")
    before = kernels(made)
    made.fit(x, y, batch_size=2, verbose=0)
    assert kernels(made)[0] != before[0]


def test_the_names_of_many_are_not_all_listed():
    variables = [keras.Variable(0.0, name=f"v{place}") for place in range(9)]
    trainable = scaler.weights.TrainableSet.of(variables)
    trainable.keep("a step", "Do it.")
    for variable in variables:
        variable.trainable = False
    with pytest.raises(scaler.InvalidArgument) as caught:
        trainable.keep("a step", "Do it.")
    assert str(caught.value) == (
        "a step: frozen (trainable=False) since this step was made or traced: 'v0', 'v1', 'v2' and 6 more. The step "
        "would go on with the old list of variables. Do it."
    )


def adversary(kind="float32"):
    """A step that makes a model trainable for its update, as a GAN's does, and freezes it again."""
    made = two_layers(kind)
    masters = scaler.MasterWeights(made.trainable_variables) if kind == "float16" else None
    inner = written(made, SGD(0.1), masters)

    def step(x):
        made.trainable = True
        finite = inner(x)
        made.trainable = False
        return finite

    return made, step


@pytest.mark.slow_with("nested-float16")
@pytest.mark.parametrize(
    ("way", "kind"),
    [("eager", "float16"), ("nested", "float16"), ("in a loop", "float32"), ("in a branch", "float32")],
)
def test_a_step_may_make_trainable_what_it_freezes_again(kind, way):
    made, step = adversary(kind)
    run = WAYS[way](step)
    for _ in range(3):
        before = kernels(made)
        assert run(X)
        assert kernels(made) != before
        assert not made.trainable


@pytest.mark.slow_with("inside of run")
@pytest.mark.parametrize("place", ["inside of run", "outside of run"])
def test_a_step_on_replicas_may_make_trainable_what_it_freezes_again(place):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        made, optimizer = two_layers(), SGD(0.1)
        optimizer.build(made.trainable_variables)
        inner = written(made, optimizer, given=made.trainable_variables)

    def toggled(function):
        made.trainable = True
        finite = function()
        made.trainable = False
        return finite

    if place == "inside of run":
        run = tf.function(lambda x: strategy.run(lambda x: toggled(lambda: inner(x)), args=(x,)))
    else:
        run = tf.function(lambda x: toggled(lambda: strategy.run(inner, args=(x,))))
    for _ in range(3):
        before = kernels(made)
        run(X)
        assert kernels(made) != before
    made.layers[1].trainable = True
    with pytest.raises(scaler.InvalidArgument, match=rf"{FROZEN}.*dense_0/kernel"):
        run(X)


def test_a_change_beside_those_of_the_step_itself_is_noticed():
    made, step = adversary()
    run = tf.function(step)
    assert run(X)
    made.layers[1].trainable = True
    with pytest.raises(scaler.InvalidArgument, match=rf"{FROZEN}.*dense_0/kernel"):
        run(X)
    made.layers[0].trainable = True
    assert run(X)


def with_a_snapshot(made):
    """A step whose model is traced with a frozen layer, and whose snapshot holds that layer's weights."""
    optimizer, loss_scaler = SGD(0.1), scaler.LossScaler(scaler.Static(16.0), select=True)

    def step(x):
        before = scaler.snapshot(made.non_trainable_variables)
        grads = gradients_of(loss_scaler, lambda: tf.reduce_sum(tf.cast(made(x), tf.float32)), made.trainable_variables)
        return loss_scaler.apply(optimizer, grads, made.trainable_variables, rollback=before).finite

    return step


def test_a_layer_that_was_unfrozen_is_noticed_by_the_snapshot():
    made = two_layers(frozen=[0])
    run = tf.function(with_a_snapshot(made))
    for _ in range(2):
        assert run(X)
    made.layers[0].trainable = True
    before = kernels(made)
    with pytest.warns(
        scaler.ScaleWarning, match=r"apply: made trainable since.*dense_0/kernel', '.*dense_0/bias'\..*Create"
    ):
        assert run(X)
    assert kernels(made)[0] == before[0]
    assert run(X)  # It is said once.
    made.layers[0].trainable = False
    assert run(X)


def test_a_layer_that_was_unfrozen_before_the_first_step_is_trained_in_silence():
    made = two_layers(frozen=[0])
    run = tf.function(with_a_snapshot(made))
    made.layers[0].trainable = True
    before = kernels(made)
    assert run(X)
    assert run(X)
    assert kernels(made)[0] != before[0]


def test_in_an_eager_step_the_optimizer_says_so():
    made = two_layers(frozen=[0])
    step = with_a_snapshot(made)
    assert step(X)
    made.layers[0].trainable = True
    with pytest.raises(scaler.InvalidArgument, match="built for other variables"):
        step(X)


def test_a_call_asks_the_host_for_little():
    """TensorFlow takes longer over each question before a call than the answer."""
    made, optimizer = two_layers("float32"), SGD(0.1)
    once, twice = (scaler.weights.TrainableSet.of(layer.weights) for layer in made.layers[:2])
    own = written(made, optimizer)

    def step(x):
        once.keep("first", "Make it again.")
        twice.warn_of_unfrozen("second", "Make it again.")
        return own(x)

    graph = tf.function(step, autograph=False).get_concrete_function(X).graph
    # All checks of layers, and the scaler's record of functions that scale and apply, together.
    assert len(graph.deferred_external_captures) == 1


def test_a_function_that_calls_a_step_is_given_no_more_than_the_step_is():
    step = tf.function(written(two_layers("float32"), SGD(0.1)))
    step(X)
    outer = tf.function(lambda x: step(x)).get_concrete_function(X)
    assert [given.dtype for given in outer.captured_inputs].count(tf.bool) == 1
