"""Guards that a TensorFlow or Keras with other private names is noticed: the same numbers, or a sentence."""

import ast
import functools
import importlib
import pathlib
import re
import sys
import types

import keras
import pytest
import tensorflow as tf
from loop_cases import batch, static
from models import plain_model, squared_error
from private_names import attributes, modules, sources, texts

import loops
import scaler
from loops.backend import datasets, generators, steps
from loops.backend.generators import generators as saved_generators
from loops.backend.generators import set_generators
from loops.backend.variables import layers_now, variables_in_float32
from loops.loop.state.pipeline import look
from loops.loop.state.position import Position

PACKAGE = pathlib.Path(loops.__file__).parent
BACKEND = PACKAGE / "backend"


# ---------------------------------------------------------------------------------------------- the register


def test_no_other_file_of_loops_touches_a_private_name():
    found = {
        str(path.relative_to(PACKAGE)): sorted({*attributes(tree), *modules(tree)})
        for path, tree in sources(PACKAGE).items()
        if BACKEND not in path.parents
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("path", sorted(BACKEND.glob("*.py")), ids=lambda path: path.stem)
def test_every_private_name_stands_in_the_register_of_its_file(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    register = ast.get_docstring(tree)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for name in {*attributes(tree), *texts(tree), *(last.rpartition(".")[2] for last in modules(tree))} - own - {"_"}:
        assert name in register, name


@pytest.mark.parametrize(
    "source",
    ["from tensorflow.python.eager import context", "keras.src.backend.x", "model._layers", "getattr(x, '_seed')"],
)
def test_the_search_finds_what_it_searches_for(source):
    assert {*attributes(ast.parse(source)), *modules(ast.parse(source))}


# ---------------------------------------------------------------------------------------------- generators


@pytest.fixture
def seeded():
    tf.random.set_seed(3)
    yield
    tf.random.set_seed(None)


def own_context():
    from tensorflow.python.eager import context

    return context


class _Renamed:
    """TensorFlow's context under which one attribute has another name."""

    def __init__(self, hidden):
        self._hidden, self._own = hidden, own_context().context()

    def __getattr__(self, name):
        if name == self._hidden:
            raise AttributeError(name)
        return getattr(self._own, name)


def hide(monkeypatch, module, fake=None):
    """Has loops see another module in the place of one, or an empty one."""
    real, fake = generators._module, fake or types.SimpleNamespace()
    monkeypatch.setattr(generators, "_module", lambda path: fake if path == module else real(path))


def hide_in_context(monkeypatch, name):
    """Has loops see TensorFlow's context without an attribute."""
    fake = types.SimpleNamespace() if name == "context" else types.SimpleNamespace(context=lambda: _Renamed(name))
    hide(monkeypatch, "tensorflow.python.eager.context", fake)


def counting(**arguments):
    return loops.Loop(lambda number: {"loss": tf.cast(number, tf.float32)}, tf.data.Dataset.range(9), **arguments)


def test_without_the_generator_of_seeds_a_run_is_told(monkeypatch, seeded, tmp_path):
    loop = counting(actions=[loops.Checkpoint(tmp_path, every=2)])
    assert loop.caveats() == []
    saved = saved_generators()
    for name in ("_seed", "_rng", "context"):
        with monkeypatch.context() as renamed:
            hide_in_context(renamed, name)
            (caveat,) = loop.caveats()
            assert "seeds of eager random operations" in caveat
            assert f"TensorFlow {tf.__version__}" in caveat
            assert saved_generators()["op_seeds"] is None
            set_generators(saved)
    hide_in_context(monkeypatch, "context")
    with pytest.warns(loops.ResumeWarning, match="seeds of eager random operations"):
        loop.run(2)


def test_without_a_global_seed_nothing_is_lost_that_was_kept(monkeypatch):
    tf.random.set_seed(None)
    loop = counting()
    for name in ("_seed", "_rng"):
        with monkeypatch.context() as renamed:
            hide_in_context(renamed, name)
            assert loop.caveats() == []


def test_a_generator_that_is_not_drawn_from_is_noticed(monkeypatch, seeded):
    state = own_context().context()
    monkeypatch.setattr(state, "_internal_operation_seed", lambda: 5)
    (caveat,) = counting().caveats()
    assert "seeds of eager random operations" in caveat


def test_asking_draws_no_seed(seeded):
    first = tf.random.uniform([4]).numpy().tolist()
    tf.random.set_seed(3)
    counting().caveats()
    assert tf.random.uniform([4]).numpy().tolist() == first


def rename_in_keras(monkeypatch, how):
    module = sys.modules[keras.src.random.seed_generator.__name__]
    if how == "the function":
        monkeypatch.delattr(module, "global_seed_generator")
    elif how == "the name":
        monkeypatch.setattr(module, "global_seed_generator", lambda: keras.random.SeedGenerator(1))
    else:
        hide(monkeypatch, "keras.src.backend.common.global_state")


@pytest.mark.parametrize("how", ["the function", "the name", "the lookup"])
def test_without_the_generator_of_keras_a_run_is_told(monkeypatch, how):
    tf.random.set_seed(None)
    keras.random.normal([1])
    saved = saved_generators()
    assert saved["keras_generator"] is not None
    rename_in_keras(monkeypatch, how)
    (caveat,) = counting().caveats()
    assert "keras.random" in caveat
    assert f"Keras {keras.__version__}" in caveat
    assert saved_generators()["keras_generator"] is None
    set_generators(saved)


def test_without_the_module_of_a_generator_a_run_is_told(monkeypatch, seeded):
    """As if TensorFlow or Keras had moved its modules."""
    monkeypatch.setattr(generators, "_module", lambda name: None)
    assert len(counting().caveats()) == 2
    assert generators._module("anything") is None
    monkeypatch.undo()
    assert generators._module("keras.src.there_is_none") is None


def test_without_the_flag_of_determinism_the_order_counts_as_open(monkeypatch):
    dataset = tf.data.Dataset.range(9).map(abs, num_parallel_calls=2, deterministic=False)
    config = importlib.import_module("tensorflow.python.framework.config")
    monkeypatch.setattr(config, "is_op_determinism_enabled", lambda: True)
    assert Position(dataset).caveats == []
    monkeypatch.delattr(config, "is_op_determinism_enabled")
    (caveat,) = Position(dataset).caveats
    assert "order in which they are ready" in caveat


# ---------------------------------------------------------------------------------------------- datasets


def numbers():
    return tf.data.Dataset.range(20)


KEPT = {
    "Shuffle": lambda: numbers().shuffle(4, seed=1),
    "ShuffleAndRepeat": lambda: numbers().apply(tf.data.experimental.shuffle_and_repeat(4, 2, seed=2)),
    "Random": lambda: tf.data.Dataset.random(seed=1).take(3),
    "Repeat": lambda: numbers().repeat(2),
    "Cache": lambda: numbers().cache(),
    "ParallelMap": lambda: numbers().map(abs, 2),
    "ParallelBatch": lambda: numbers().batch(2, num_parallel_calls=2),
    "ParseExample": lambda: (
        numbers()
        .batch(2)
        .map(lambda n: tf.fill(tf.shape(n), tf.constant(b"")))
        .apply(tf.data.experimental.parse_example_dataset({"n": tf.io.FixedLenFeature([], tf.int64, 0)}))
    ),
}


def parts_of(dataset):
    return [dataset, *(deeper for below in datasets.inputs(dataset) for deeper in parts_of(below))]


def test_the_table_of_arguments_is_that_of_the_register():
    assert set(KEPT) == set(datasets._KEPT)


@pytest.mark.exhaustive_with("ParseExample-_deterministic")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in datasets._KEPT.items() for name in names])
def test_without_an_argument_of_a_dataset_a_run_is_told(kind, name):
    tf.random.set_seed(None)
    dataset = KEPT[kind]()
    assert Position(dataset).caveats == []
    part = next(one for one in parts_of(dataset) if kind in type(one).__name__ and name in vars(one))
    vars(part)[f"{name}_renamed"] = vars(part).pop(name)
    assert any(f"{name.strip('_')} of " in caveat and "hides parts" in caveat for caveat in Position(dataset).caveats)
    if name == "_deterministic":
        assert datasets.order(part, kind) == "default"


def test_without_its_inputs_a_dataset_is_named():
    dataset = numbers().shuffle(4, seed=1).batch(2)
    assert sorted(look(dataset).unsaid) == []
    for name in [name for name, value in vars(dataset).items() if isinstance(value, tf.data.Dataset)]:
        del vars(dataset)[name]
    assert sorted(look(dataset).unsaid) == ["inputs of batch"]
    assert any("inputs of batch" in caveat for caveat in Position(dataset).caveats)


def test_without_its_functions_a_dataset_is_named():
    dataset = numbers().map(lambda n: n + 1)
    assert sorted(look(dataset).unsaid) == []
    for name in [name for name, value in vars(dataset).items() if hasattr(value, "function")]:
        del vars(dataset)[name]
    assert sorted(look(dataset).unsaid) == ["functions of map"]


@pytest.mark.parametrize("order", ["lists", "a dict"])
def test_inputs_in_containers_are_found(order):
    dataset, inner = numbers().batch(2), numbers()
    vars(dataset)["_more"] = [[inner]] if order == "lists" else {"one": (inner,)}
    assert any(part is inner for part in datasets.inputs(dataset))


# ---------------------------------------------------------------------------------------------- steps


def averaged(steps_taken=1):
    optimizer = keras.optimizers.Adam(0.05, use_ema=True)
    step = loops.TrainStep(plain_model(), squared_error, optimizer, loss_scaler=static(1.0))
    for _ in range(steps_taken):
        step(batch())
    return loops.Averaged(step.model, optimizer), optimizer


def test_without_the_averages_a_built_optimizer_is_refused():
    average, optimizer = averaged()
    for name in ("_model_variables_moving_average", "_trainable_variables"):
        average.weights()
        value = vars(optimizer).pop(name)
        for found in ({}, {name: value[:1]}):
            vars(optimizer).update(found)
            with pytest.raises(scaler.UnsupportedVersion, match=re.escape(f"Keras {keras.__version__}")):
                average.weights()
        vars(optimizer)[name] = value


def test_an_optimizer_that_is_not_built_has_no_average_yet():
    average, _ = averaged(0)
    with pytest.raises(loops.LoopError, match="no average before the first step"):
        average.weights()


def test_without_the_learning_rate_the_step_says_that_it_is_not_checked():
    loss_scaler = static(1.0)
    optimizer = keras.optimizers.SGD(loops.ByAttempts(lambda step: 0.1, scaler.LossScaler(scaler.Static(2.0))))
    with pytest.raises(scaler.InvalidArgument, match="another loss scaler"):
        loops.TrainStep(plain_model(), squared_error, optimizer, loss_scaler=loss_scaler)
    del vars(optimizer)["_learning_rate"]
    with pytest.warns(UserWarning, match=r"does not show its learning rate.*ByAttempts"):
        loops.TrainStep(plain_model(), squared_error, optimizer, loss_scaler=loss_scaler)


def test_a_function_has_no_learning_rate_to_be_checked():
    assert steps.schedule(lambda grads, variables: None) is None


class _Unmarked:
    """An operation of a graph that does not say what it only reads."""

    def __init__(self, operation):
        self._operation, self.type, self.inputs = operation, operation.type, operation.inputs
        self.node_def = types.SimpleNamespace(attr={})


class _Placeholder:
    def __init__(self, tensor):
        self._tensor = tensor

    def consumers(self):
        return [_Unmarked(operation) for operation in self._tensor.consumers()]


def called(function):
    """The handle of a variable inside of a graph that passes it to another function."""
    variable = tf.Variable(1.0)
    inner = tf.function(lambda: function(variable))
    return tf.function(lambda: inner()).get_concrete_function().inputs[-1]


def test_what_a_call_only_reads_is_told_by_its_mark():
    reading, writing = called(tf.identity), called(lambda variable: variable.assign(2.0))
    assert (steps.assigns(reading), steps.assigns(writing)) == (False, True)


def test_without_the_marks_in_graphs_it_counts_as_moved_and_is_said():
    handle = called(tf.identity)
    with pytest.warns(UserWarning, match="does not mark what a call in a graph only reads"):
        assert steps.assigns(_Placeholder(handle))


def test_a_scaler_of_keras_with_other_names_is_not_taken_for_none(monkeypatch):
    def attempt():
        variable = keras.Variable([1.0])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=4.0)
        optimizer.build([variable])

        def step(number):
            optimizer.apply([tf.cast(number, tf.float32) * tf.ones(1)], [variable])
            return {"loss": tf.cast(number, tf.float32)}

        return loops.Loop(step, tf.data.Dataset.range(3), steps_per_call=1).run(3)

    assert attempt() == loops.Counters(3, 3, 3)
    for name in ("COUNTER", "SCALE"):
        with monkeypatch.context() as renamed:
            renamed.setattr(f"loops.step.user_steps.{name}", "renamed")
            assert attempt().known is False


def test_without_a_call_that_looks_at_no_argument_the_result_is_the_same():
    total = tf.Variable(0, dtype=tf.int64)
    function = tf.function(lambda iterator, count: {"sum": total.assign_add(next(iterator) + count), "none": []})
    arguments = iter(numbers().skip(5)), tf.constant(1, tf.int64)
    concrete = function.get_concrete_function(*arguments)
    hidden = functools.partial(concrete)  # Which has none of its attributes.
    found = [steps.call_as_traced(one, arguments) for one in (concrete, hidden, concrete)]
    assert [(one["sum"].numpy(), one["none"]) for one in found] == [(6, []), (13, []), (21, [])]


# ----------------------------------------------------------------------------------------------- variables


def test_a_variable_is_float32_for_a_while():
    variable = keras.Variable([1.0, 2.0], dtype="float16")
    own = variable.value
    with variables_in_float32([variable]):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(variable.value * 3e5)
        assert (variable.dtype, tape.gradient(total, variable).numpy().tolist()) == ("float32", [3e5, 3e5])
        variable.assign([7.0, 7.0])
    assert variable.value is own
    assert (variable.dtype, variable.numpy().tolist()) == ("float16", [1.0, 2.0])


@pytest.mark.parametrize("name", ["_value", "_dtype"])
def test_a_variable_that_keeps_its_value_elsewhere_is_left_alone(name):
    variable = keras.Variable([1.0, 2.0], dtype="float16")
    kept = vars(variable).pop(name)
    refused = pytest.raises(scaler.UnsupportedVersion, match="keeps its value in another place")
    with refused, variables_in_float32([variable]):
        pass
    vars(variable)[name] = kept


# ----------------------------------------------------------------------------------------------- layers


def test_without_keras_list_of_layers_they_are_looked_for(monkeypatch):
    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Bidirectional(keras.layers.LSTM(2))])
    model = keras.Sequential([keras.Input([3, 4]), inner])
    found = {id(layer) for layer in layers_now(model)}
    assert {id(inner), *map(id, inner.layers), id(inner.layers[1].forward_layer)} <= found
    monkeypatch.delattr(keras.layers.Layer, "_flatten_layers")
    assert {id(layer) for layer in layers_now(model)} == found
