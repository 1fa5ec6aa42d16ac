"""Guards `Loop`: the Python loop, the loop in the graph and XLA take the same steps, and none is lost or invented."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import batch, dataset
from models import plain_model, squared_error, stateful_model
from rigs import Rig, raw

import loops
import scaler


class Recorder:
    """Keeps every output of every visit."""

    def __init__(self):
        self.visits = []

    def __call__(self, visit):
        self.visits.append(visit)

    def column(self, name):
        return np.concatenate([visit.outputs[name] for visit in self.visits])

    def lengths(self):
        return [len(visit.outputs["loss"]) for visit in self.visits]


def running_sum():
    """The cheapest step: adds batches up, and knows how often it was traced."""
    total = tf.Variable(0.0)
    traces = []

    def step(number):
        traces.append(number)
        return {"loss": total.assign_add(number)}

    return step, total, traces


def numbers(count):
    return tf.data.Dataset.range(1, count + 1).map(lambda number: tf.cast(number, tf.float32))


def trained(steps, model=None, **arguments):
    rig = Rig(
        model or stateful_model("float16"),
        keras.optimizers.Adam(0.01),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(256.0, growth_interval=3)),
    )
    recorder = Recorder()
    loop = loops.Loop(rig.step, dataset(20, bad=[2, 9, 10]), actions=[recorder], **arguments)
    for goal in steps:
        loop.run(goal)
    return rig, recorder, loop.counters


@pytest.fixture(scope="module")
def by_python():
    return trained([20])


@pytest.mark.slow_with("1000-steps1")
@pytest.mark.exhaustive_with("7-steps0")
@pytest.mark.parametrize(("steps_per_call", "steps"), [(7, [5, 6, 20]), (1000, [20])])
def test_the_loop_in_the_graph_equals_the_python_loop_bit_for_bit(by_python, steps_per_call, steps):
    rig, recorder, counters = trained(steps, steps_per_call=steps_per_call)
    assert counters == by_python[2] == loops.Counters(data=20, attempted=20, applied=17)
    assert list(recorder.visits[0].outputs) == list(by_python[1].visits[0].outputs)
    for name in recorder.visits[0].outputs:
        assert recorder.column(name).tobytes() == by_python[1].column(name).tobytes(), name
    assert raw(rig.variables()) == raw(by_python[0].variables())


@pytest.mark.slow
def test_the_python_loop_goes_on_from_a_first_run(by_python):
    rig, recorder, counters = trained([5, 6, 20])
    assert counters == by_python[2]
    assert recorder.column("loss").tobytes() == by_python[1].column("loss").tobytes()
    assert raw(rig.variables()) == raw(by_python[0].variables())


def test_the_loop_equals_calls_of_the_step(by_python):
    rig, outputs = by_python[0], by_python[1]
    rig.reset()
    calls = rig.run(list(dataset(20, bad=[2, 9, 10])))
    for name in calls[0]:
        assert outputs.column(name).tobytes() == np.array([call[name] for call in calls]).tobytes(), name


@pytest.mark.slow
def test_xla_takes_the_same_steps():
    # XLA draws other random numbers than TensorFlow's kernels do from the same seed: no dropout here.
    model = stateful_model(dropout=0.0)
    ours, recorder, counters = trained([20], model, steps_per_call=7, jit_compile=True)
    theirs, reference, expected = trained([20], stateful_model(dropout=0.0))
    assert counters == expected
    for name in recorder.visits[0].outputs:
        np.testing.assert_allclose(recorder.column(name), reference.column(name), rtol=1e-5, atol=1e-5)
    for variable, other in zip(ours.moved(), theirs.moved(), strict=True):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def test_xla_takes_one_step_a_call_too():
    step, total, _ = running_sum()
    loops.Loop(step, numbers(100), jit_compile=True).run(10)
    assert total.numpy() == 55


@pytest.mark.parametrize(
    ("steps_per_call", "lengths"), [(1, [1] * 10), (3, [3, 1, 3, 3]), (4, [4, 4, 2]), (9, [4, 6]), (1000, [4, 6])]
)
def test_visits_report_every_step_once(steps_per_call, lengths):
    step, total, _ = running_sum()
    recorder = Recorder()
    loop = loops.Loop(step, numbers(100), steps_per_call=steps_per_call, actions=[recorder])
    loop.run(4)
    assert loop.run(10) == loop.counters
    assert recorder.lengths() == lengths
    np.testing.assert_array_equal(recorder.column("loss"), np.cumsum(np.arange(1, 11)))
    assert [visit.first for visit in recorder.visits] == list(1 + np.cumsum([0, *recorder.lengths()[:-1]]))
    assert total.numpy() == 55


@pytest.mark.parametrize("steps_per_call", [1, 7, 50])
def test_a_loop_traces_its_step_once(steps_per_call):
    step, _, traces = running_sum()
    loop = loops.Loop(step, numbers(100), steps_per_call=steps_per_call)
    loop.run(30)
    loop.run(31)
    loop.run(61)
    assert len(traces) == 1
    # The loop around the step is a graph of its own, which calls of other lengths must share.
    around = loop._call._many
    assert around.experimental_get_tracing_count() == (steps_per_call > 1)


@pytest.mark.slow
def test_a_smaller_last_batch_is_traced_once_more_by_the_python_loop_only():
    for steps_per_call, expected in ((1, 2), (4, 1)):
        traces = []

        def counting(y, prediction, traces=traces):
            traces.append(y.shape)
            return squared_error(y, prediction)

        x, y = batch(count=20)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        step = loops.TrainStep(plain_model(), counting, keras.optimizers.SGD(0.1))
        counters = loops.Loop(step, data, steps_per_call=steps_per_call).run(3)
        assert counters == loops.Counters(3, 3, 3)
        assert len(traces) == 2 * expected  # A trace holds the step, and what looks at a skip again.


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_numpy_integers_count_too(steps_per_call):
    step, total, _ = running_sum()
    loop = loops.Loop(step, numbers(100), steps_per_call=np.int64(steps_per_call))
    loop.run(np.int64(6))
    loop.run(np.int32(10))
    assert total.numpy() == 55
    assert loop.counters == loops.Counters(10, 10, 10)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_running_to_where_it_is_already_does_nothing(steps_per_call):
    step, total, _ = running_sum()
    recorder = Recorder()
    loop = loops.Loop(step, numbers(100), steps_per_call=steps_per_call, actions=[recorder])
    loop.run(5)
    visits = len(recorder.visits)
    loop.run(5)
    assert len(recorder.visits) == visits
    assert total.numpy() == 15
