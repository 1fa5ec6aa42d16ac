"""The cost of one gated step, counted in its traced graph: traces, operations, and passes over gradients."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from scaler_cases import by_hand
from weight_cases import all_operations

import scaler
from scaler.backend.graphs import has_gpu
from scaler.gate import joined, propose

pytestmark = pytest.mark.skipif(has_gpu(), reason="operations are counted of a step on a CPU")

LARGE, SMALL = (256, 256), (3, 5)
"""Updates of four large variables are compiled; those of small ones are joined."""
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf")
ON_THE_HOST = {
    *("PyFunc", "PyFuncStateless", "EagerPyFunc", "Print", "PrintV2", "Assert", "StringFormat", "HostConst", "_Send"),
    *("_Recv", "_HostSend", "_HostRecv", "XlaHostCompute", "OutfeedEnqueue", "WriteSummary", "WriteScalarSummary"),
}


def gated_step(shape, count, dtype="float32", clip_norm=None):
    """A step, and the optimizer in it."""
    variables = [tf.Variable(tf.zeros(shape, dtype)) for _ in range(count)]
    targets = scaler.MasterWeights(variables) if dtype == "float16" else variables
    optimizer, loss_scaler = keras.optimizers.SGD(0.1, momentum=0.9), by_hand(scaler.Static(8.0))
    optimizer.build(targets.weights if dtype == "float16" else targets)
    step = tf.function(lambda grads: loss_scaler.apply(optimizer, grads, targets, clip_norm=clip_norm).finite)
    return step, optimizer


@functools.cache
def traced_graph(shape, count, dtype="float32", clip_norm=None, /):
    """Kept by its arguments as they are given: who shares one gives all of them."""
    step, _ = gated_step(shape, count, dtype, clip_norm)
    return step.get_concrete_function([tf.TensorSpec(shape, dtype)] * count).graph


def function_graph(graph, name):
    return graph._get_function(name).graph


def compiled(graph, operation):
    """Whether it is a call of a function that XLA compiles."""
    if operation.type not in CALLS:
        return False
    definition = graph._get_function(operation.get_attr("f").name).cached_definition
    return "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b


def applied_path(graph):
    """The operations, outside of XLA, of a step that is applied: the true branch of every condition.

    A call of a compiled function counts as one operation. Operations that only pass a tensor on do not count.
    """
    for operation in graph.get_operations():
        if operation.type in BRANCHES:
            yield from applied_path(function_graph(graph, operation.get_attr("then_branch").name))
        elif operation.type in CALLS and not compiled(graph, operation):
            yield from applied_path(function_graph(graph, operation.get_attr("f").name))
        elif operation.type not in ("Placeholder", "Const", "NoOp", "Identity", "EnsureShape"):
            yield operation


def passes(graph, shape):
    """The types of the operations on the applied path that read arrays of a shape, once for each array read."""
    return sorted(
        operation.type
        for operation in applied_path(graph)
        for tensor in operation.inputs
        if tensor.dtype != tf.resource and tensor.shape == shape
    )


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_large_gradients_are_read_by_the_norm_and_by_the_update_and_nothing_else(clip_norm):
    read = passes(traced_graph(LARGE, 6, "float32", clip_norm), LARGE)
    assert read == ["L2Loss"] * 6 + ["StatefulPartitionedCall"] * 6


def test_16_bit_gradients_are_cast_before_the_norm_and_inside_of_the_update():
    read = passes(traced_graph(LARGE, 6, "float16", None), LARGE)
    assert read == ["Cast"] * 6 + ["L2Loss"] * 6 + ["StatefulPartitionedCall"] * 6


@pytest.mark.parametrize("gpu", [False, True])
def test_the_updates_of_large_variables_are_compiled_calls(gpu, monkeypatch):
    """One for each, which share a function; on a GPU, where to launch one takes long, a few for all."""
    monkeypatch.setattr(propose, "has_gpu", lambda: gpu)
    graph = traced_graph.__wrapped__(LARGE, 8) if gpu else traced_graph(LARGE, 6, "float32", None)
    calls = [operation for operation in applied_path(graph) if operation.type in CALLS]
    functions = {operation.get_attr("f").name for operation in calls}
    assert (len(calls), len(functions)) == ((2, 1) if gpu else (6, 1))


@pytest.mark.parametrize(
    ("shape", "dtype", "most"),
    [(LARGE, "float32", 2), (LARGE, "float16", 3), (SMALL, "float32", 4), (SMALL, "float16", 6)],
)
def test_a_variable_more_costs_a_few_operations(shape, dtype, most, monkeypatch):
    """Compares 4 variables with more, so that what does not depend on their number cancels.

    A large variable has a norm, a cast before it in 16 bits, and a call. A small one and each of its
    slots are read and assigned, and in 16 bits its master, too. A change that saves operations lowers `most`.
    """
    more, trace = 6, traced_graph
    if shape == SMALL:
        monkeypatch.setattr(joined, "_WORTH_JOINING", 4)
        more, trace = 8, traced_graph.__wrapped__
    few, many = (len(list(applied_path(trace(shape, count, dtype, None)))) for count in (4, more))
    assert (many - few) / (more - 4) <= most


def test_what_a_step_costs_whatever_it_updates():
    """A change that saves operations lowers this number. Two of them keep off a learning rate that is NaN, five tell
    and count bad data, and four part and join what the scaler keeps in four variables. Seven part why a step was
    skipped, and TensorFlow drops them where nobody asks. Seven select new values: a branch for them takes longer.
    """
    assert len(list(applied_path(traced_graph(SMALL, 1)))) <= 57


def is_inlined(graph, operation):
    """Whether TensorFlow puts the operations of a function in the place of its call."""
    definition = graph._get_function(operation.get_attr("f").name).cached_definition
    return not {"_noinline", "_XlaMustCompile"}.intersection(
        name for name in definition.attr if definition.attr[name].b
    )


def test_an_applied_step_of_small_variables_calls_no_function_that_stays_one():
    graph = traced_graph(SMALL, 8)
    (decision,) = (operation for operation in graph.get_operations() if operation.type == "If")
    branch = function_graph(graph, decision.get_attr("then_branch").name)
    calls = [each for each in [*graph.get_operations(), *branch.get_operations()] if each.type in CALLS]
    assert all(is_inlined(graph, each) for each in calls)


@pytest.mark.parametrize("graph", [(LARGE, 6, "float32", 1.0), (SMALL, 8, "float16")], ids=["large", "small"])
def test_nothing_talks_to_the_host(graph):
    assert not ON_THE_HOST.intersection(all_operations(traced_graph(*graph)))


def test_skips_growths_and_steps_share_one_trace():
    step, optimizer = gated_step(LARGE, 2)
    traced, update_step = [], optimizer.update_step

    def counted(*arguments):
        traced.append(arguments)
        return update_step(*arguments)

    optimizer.update_step = counted
    grads = [np.full(LARGE, 8.0, np.float32)] * 2
    for number in range(6):
        bad = np.full(LARGE, np.inf, np.float32)
        assert bool(step([bad, *grads[1:]] if number in (1, 4) else grads)) == (number not in (1, 4))
    assert step.experimental_get_tracing_count() == 1
    assert len(traced) == 2
