"""No step copies a tensor between a GPU and its host, by TensorFlow's list of kernels: every strategy, all weights."""

import gpu_kernels as kernels
import pytest
import tensorflow as tf
import traced_steps as steps
from audit import audit
from copies import copies, variables_of_the_host

import scaler
from scaler import strategies
from scaler.errors import UnsupportedVersion
from scaler.observe import KINDS

PREDICATES = {
    "an optimizer that is looked at": 3,
    "probes of all, every 10th": 3,
    "fit, protect, accumulate": 4,
    "retry": 1,
    "composed, in turn": 1,
    "composed, in turn, retry": 3,
    "composed, in turn, probes": 3,
    "composed, together, retry": 1,
}
"""Branches that an applied step executes, each of which waits for the device. An update that has to be looked at takes
some, as does that of an optimizer with `gradient_accumulation_steps`. What is due now and then is one by itself."""
AT_THE_END_OF_DATA = 2
"""Branches of a call whose loop asks the data whether it ends, which the host knows."""
USUAL = ("strategy dynamic", "probes of all", "measured by hand", "fit, protect", "loop of 5, until the data ends")
"""What stands for all in a quick run."""
SLOW = (
    *("layerwise, histogram, spike_guard by tensor", "an optimizer that is looked at"),
    *("composed, in turn, retry", "fit", "loop of 5, Trace, stochastic weights"),
)
"""One of each that does something else than the usual steps."""
OTHERS = [kind for kind in steps.TRACED if kind not in USUAL]
COPIED = {
    "an optimizer that is looked at": 5,
    "step with stochastic": 2,
    "emulated mxfp4": 28,
    "emulated nvfp4": 24,
    "probes of all, every 10th": 1,
    "composed, in turn, probes": 1,
    "fit": 3,
    "fit, protect": 3,
    "fit, protect, accumulate": 7,
    "loop of 5": 1,
    "loop of 5, Trace, stochastic weights": 2,
    "loop of 5, until the data ends": 1,
}
"""Small tensors that are copied to the host, where it is not one for each branch: int32 of an optimizer itself, seeds,
of which TensorFlow makes a key on the host, shapes of `tf.einsum`, int32 labels, Keras's dropout and accuracy. Three
branches have one predicate."""
STACK = "loop of 5, over a stack"
"""The int32 labels of its batches are sliced in host memory, from where those of a dataset's batches come, too."""

pytestmark = pytest.mark.usefixtures("gpu")


def check(kind):
    step = steps.TRACED[kind]()
    found, predicates = audit(step)
    assert [one.type for one in found] == (["StridedSlice(int32)"] if kind == STACK else []), found
    ends = AT_THE_END_OF_DATA if kind.endswith("until the data ends") else 0
    assert predicates == PREDICATES.get(kind, 0) + ends
    copied = copies(step.graph).to_host
    assert len(copied) == COPIED.get(kind, PREDICATES.get(kind, 0)), copied
    # Of an optimizer that nobody knows they are its own.
    assert variables_of_the_host(step) == [] or kind == "an optimizer that is looked at"


@pytest.mark.exhaustive_with("loop of 5, until the data ends", "fit, protect", "probes of all", "measured by hand")
@pytest.mark.parametrize("kind", USUAL)
def test_the_usual_steps(kind):
    check(kind)


@pytest.mark.slow
@pytest.mark.exhaustive_with(*(kind for kind in OTHERS if kind not in SLOW))
@pytest.mark.parametrize("kind", OTHERS)
def test_steps_of_every_kind(kind):
    check(kind)


def test_no_strategy_and_no_kind_of_weights_is_left_out():
    offered = {value for value in vars(strategies).values() if isinstance(value, type)}
    wanted = {one for one in offered if hasattr(one, "init") and one is not strategies.Strategy}
    assert {type(strategy) for strategy in (*steps.STRATEGIES.values(), steps.BY_TENSOR.strategy)} == wanted
    weights = {value for value in vars(scaler.weights).values() if isinstance(value, type)}
    assert set(steps.WEIGHTS.values()) == {one for one in weights if issubclass(one, scaler.MasterWeights)}
    assert set(steps.ALL_KINDS["kinds"]) == set(KINDS)
    assert set(PREDICATES) | set(USUAL) <= set(steps.TRACED)


def test_what_leaves_the_device_is_found():
    """The audit itself: int32 arithmetic, an operation without a kernel, Python, and a branch."""

    def step(batch):
        x, _ = batch
        largest = tf.reduce_max(tf.bitcast(x, tf.int32))
        places = tf.argmax(tf.cast(x, tf.int32), axis=1)
        told = tf.py_function(lambda value: value, [x], tf.float32)
        tf.debugging.Assert(tf.reduce_all(x < 9.0), ["too large"])
        return tf.cond(largest > 0, lambda: places, lambda: tf.zeros([32], tf.int64)), told

    found, predicates = audit(tf.function(step).get_concrete_function(steps.BATCH))
    assert {one.type.partition("(")[0]: one.why for one in found} == {
        "Max": "in host memory int32(32, 64)",
        "ArgMax": "no GPU kernel int32(32, 64)",
        "EagerPyFunc": "runs on the host",
        "Assert": "runs on the host",
    }
    assert predicates == 1


def test_a_release_that_does_not_list_kernels_is_said_to_be_one(monkeypatch):
    from tensorflow.python.framework import kernels as listed

    monkeypatch.delattr(listed, "get_registered_kernels_for_op")
    with pytest.raises(UnsupportedVersion, match="does not list the kernels"):
        kernels.gpu_kernels("Add")
