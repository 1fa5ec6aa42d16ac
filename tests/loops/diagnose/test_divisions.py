"""One division of a graph, with a denominator that is further from 0."""

import pytest
import tensorflow as tf

from loops.diagnose.explain.case import Case
from loops.diagnose.explain.remedies import AT_THE_STEP, Kind, guarded
from loops.diagnose.graph.origin import Frame, Part


def traced(name, divide, *values):
    """What a graph gives in which the division of a name is guarded, and the gradient for the last value."""

    @tf.function(autograph=False)
    def taken(*values):
        with tf.GradientTape() as tape:
            tape.watch(values[-1])
            quotient = divide(*values)
        return quotient, tape.gradient(quotient, values[-1])

    with guarded(name):
        traced = taken.get_concrete_function(*map(tf.constant, values))
    quotient, grad = traced(*map(tf.constant, values))
    return quotient.numpy().tolist(), grad.numpy().tolist()


@pytest.mark.parametrize(
    "divide",
    [lambda x, y: x / y, tf.divide, lambda x, y: 1.0 / y],
    ids=["operator", "function", "reflected"],
)
def test_the_denominator_moves_away_from_zero(divide):
    """Its sign stays, and its gradient is that of the quotient which is computed."""
    quotient, grad = traced("truediv:0", divide, [1.0, 1.0, 1.0], [0.0, 0.999, -0.999])
    assert quotient == pytest.approx([1e3, 1.0, -1.0])
    assert grad == pytest.approx([-1e6, -1.0, -1.0])


def test_other_divisions_stay_as_they_are():
    """In the same graph, in eager mode, and afterwards."""
    own = tf.Tensor.__truediv__
    quotient, _ = traced("truediv_1:0", lambda x, y: (x / y, x / y)[0], [1.0], [0.0])
    assert quotient == [float("inf")]
    with guarded("truediv:0"):
        assert (tf.constant(1.0) / tf.constant(0.0)).numpy() == float("inf")
    assert tf.Tensor.__truediv__ is own


def test_only_a_division_is_guarded():
    kinds = {"RealDiv": 1, "Sqrt": 0}
    frames = [Frame("a:0", kind, "float16", Part.FORWARD, "norm", (), 1.0, False) for kind in kinds]
    (row,) = (one for one in AT_THE_STEP if one.kind is Kind.DENOMINATOR)
    assert [bool(row.change(Case(None, operation=frame))) for frame in frames] == list(kinds.values())
