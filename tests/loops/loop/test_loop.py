"""Guards `Loop`: the Python loop, the loop in the graph and XLA take the same steps, and none is lost or invented."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from loop_cases import Recorder, dataset, numbers, summing
from models import stateful_model
from rigs import Rig, raw

import loops
import scaler


def made(model):
    return Rig(
        model,
        keras.optimizers.SGD(0.01, momentum=0.9),
        loss_scaler=scaler.LossScaler(scaler.Dynamic(256.0, growth_interval=3)),
    )


def batches():
    """Some of which overflow."""
    return dataset(20, bad=[2, 9, 10])


def trained(rig, goals, **arguments):
    """What the loops of a rig's step report, from the start."""
    rig.reset()
    recorder = Recorder()
    loop = loops.Loop(rig.step, batches(), actions=[recorder], **arguments)
    for goal in goals:
        loop.run(goal)
    return recorder, loop.counters


@pytest.fixture(scope="module")
def by_calls():
    """A step, and what its calls give without a loop: the outputs, and the bits of all variables."""
    rig = made(stateful_model("float16"))
    return rig, rig.run(batches()), raw(rig.variables())


@pytest.mark.dear("a real step is traced for its calls, and again in the loop")
@pytest.mark.slow_with("1-goals1")
@pytest.mark.parametrize(("steps_per_call", "goals"), [(7, [5, 6, 20]), (1, [20])])
def test_a_loop_equals_calls_of_its_step_bit_for_bit(by_calls, steps_per_call, goals):
    rig, calls, bits = by_calls
    recorder, counters = trained(rig, goals, steps_per_call=steps_per_call, jit_compile=False)
    assert counters == loops.Counters(data=20, attempted=20, applied=17)
    assert sorted(recorder.visits[0].outputs) == sorted(calls[0])
    for name in calls[0]:
        assert recorder.column(name).tobytes() == np.array([call[name] for call in calls]).tobytes(), name
    assert raw(rig.variables()) == bits


@pytest.mark.slow
def test_xla_takes_the_same_steps():
    # XLA draws other random numbers than TensorFlow's kernels do from the same seed: no dropout here.
    rig = made(stateful_model(dropout=0.0))
    calls = rig.run(batches())
    expected = [variable.numpy() for variable in rig.moved()]
    recorder, counters = trained(rig, [20], steps_per_call=7, jit_compile=True)
    assert counters == loops.Counters(data=20, attempted=20, applied=17)
    for name in calls[0]:
        np.testing.assert_allclose(recorder.column(name), [call[name] for call in calls], rtol=1e-5, atol=1e-5)
    for variable, value in zip(rig.moved(), expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-5)


def test_xla_takes_one_step_a_call_too():
    step, total = summing()
    loops.Loop(step, numbers(), jit_compile=True).run(10)
    assert total.numpy() == 55


@pytest.mark.parametrize(("steps_per_call", "lengths"), [(1, [1] * 10), (np.int64(3), [3, 1, 3, 3]), (1000, [4, 6])])
def test_visits_report_every_step_once(steps_per_call, lengths):
    step, total = summing()
    recorder, traces = Recorder(), []
    loop = loops.Loop(
        lambda number: traces.append(number) or step(number),
        numbers(),
        steps_per_call=steps_per_call,
        actions=[recorder],
    )
    loop.run(4)
    assert loop.run(np.int32(10)) == loop.counters == loops.Counters(10, 10, 10)
    assert loop.run(10).data == 10  # Where it is already.
    assert [len(visit.outputs["loss"]) for visit in recorder.visits] == lengths
    np.testing.assert_array_equal(recorder.column("loss"), np.cumsum(np.arange(1, 11)))
    ends = np.cumsum(lengths).tolist()
    assert [visit.first for visit in recorder.visits] == [1, *(end + 1 for end in ends[:-1])]
    # Each visit keeps the counts of its own time.
    assert [visit.counters for visit in recorder.visits] == [loops.Counters(end, end, end) for end in ends]
    assert [visit.goal for visit in recorder.visits] == [4 if end <= 4 else 10 for end in ends]
    assert all(visit.seconds >= 0 for visit in recorder.visits)
    assert total.numpy() == 55
    assert len(traces) == 1
    # The loop around the step is a graph of its own, which calls of other lengths must share.
    assert loop.calls._many.experimental_get_tracing_count() == (steps_per_call > 1)


def test_steps_that_an_action_takes_count():
    step, total = summing()
    loop = loops.Loop(step, numbers(), steps_per_call=1, actions=[lambda visit: loop.take(1)])
    assert loop.run(10) == loops.Counters(10, 10, 10)
    assert total.numpy() == 55


@pytest.mark.parametrize(("steps_per_call", "expected"), [(1, 2), (4, 1)])
def test_a_smaller_last_batch_is_traced_once_more_by_the_python_loop_only(steps_per_call, expected):
    traces = []

    def step(batch):
        traces.append(batch.shape)
        return {"loss": tf.reduce_sum(batch)}

    loop = loops.Loop(step, numbers(20).batch(8), steps_per_call=steps_per_call)
    assert loop.run(3) == loops.Counters(3, 3, 3)
    assert len(traces) == expected
