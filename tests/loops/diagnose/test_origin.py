"""Where a value that is not finite came from."""

import math

import numpy as np
import pytest
import tensorflow as tf

from loops.diagnose.explain.case import Case
from loops.diagnose.explain.remedies import AT_THE_STEP, Kind, Remedy, guarded
from loops.diagnose.explain.trials import absurd_loss, weighed
from loops.diagnose.graph.origin import Frame, Part, nearest_layer, origins, pass_of

INF = math.inf


def frame(name, *inputs, kind="Mul", amax=INF, nan=False, part=Part.FORWARD, layer=None, source=None):
    return Frame(name, kind, "float16", part, layer, inputs, amax, nan, source)


def of(*frames):
    return {one.name: one for one in frames}


def test_what_inherits_is_not_the_origin():
    """The walk ends where all inputs are finite."""
    frames = of(
        frame("x:0", amax=1.0, source="batch"),
        frame("square:0", "x:0"),
        frame("sum:0", "square:0", nan=True),
        frame("loss:0", "sum:0", nan=True),
    )
    assert [one.name for one in origins(frames, ["loss:0"])] == ["square:0"]


def test_an_infinity_that_came_to_nothing_is_not_met():
    """A mask is infinite, and the softmax after it finite: the trouble began later."""
    frames = of(
        frame("mask:0", kind="Const"),
        frame("masked:0", "mask:0"),
        frame("softmax:0", "masked:0", amax=1.0),
        frame("log:0", "softmax:0"),
    )
    assert [one.name for one in origins(frames, ["log:0"])] == ["log:0"]


def test_a_constant_is_the_last_to_be_suspected():
    """Where a computed infinity meets a mask's, the computed one is the trouble."""
    frames = of(
        frame("mask:0", kind="Const"),
        frame("scores:0", amax=INF, kind="MatMul"),
        frame("masked:0", "mask:0", "scores:0", nan=True),
    )
    assert [one.name for one in origins(frames, ["masked:0"])] == ["scores:0", "mask:0"]


def test_what_was_given_comes_first():
    """A batch that holds a NaN explains whatever else is not finite."""
    frames = of(
        frame("square:0", kind="Square"),
        frame("x:0", source="batch", nan=True),
        frame("both:0", "square:0", "x:0", nan=True),
    )
    assert origins(frames, ["both:0"])[0].name == "x:0"


def test_a_circle_and_an_unknown_tensor_end_the_walk():
    """A variable may be read into what is assigned to it, and a tensor of another dtype has no frame."""
    frames = of(frame("a:0", "b:0"), frame("b:0", "a:0"))
    assert origins(frames, ["a:0", "nobody:0"]) == []


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (frame("x:0", source="batch"), "data"),
        (frame("w:0", source="variable"), "weights"),
        (frame("sum:0", source="variable", part=Part.OTHER), "backward"),
        (frame("y:0"), "forward"),
        (frame("g:0", part=Part.BACKWARD), "backward"),
        (frame("cast:0", "kernel:0", kind="Cast"), "weights"),
        (frame("cast:0", "input:0", kind="Cast"), "data"),
        (frame("cast:0", "computed:0", kind="Cast"), "forward"),
    ],
    ids=str,
)
def test_the_pass(one, expected):
    """What a cast makes infinite counts to where it was read."""
    others = of(
        frame("kernel:0", amax=1e6, source="variable"),
        frame("input:0", amax=1e6, source="batch"),
        frame("computed:0", amax=1e6),
    )
    assert pass_of(one, others) == expected


def test_a_gradient_belongs_to_the_layer_that_gave_its_tensor():
    """TensorFlow names the scope of a gradient after the operation that it is of."""
    frames = of(
        frame("dense/Add:0", amax=1.0, layer="dense"),
        frame("Cast_3:0", "dense/Add:0", amax=1.0),
        frame("pow:0", "Cast_3:0", amax=1.0),
        frame("gradient_tape/pow/mul:0", "pow:0", amax=1e6, part=Part.BACKWARD),
        frame("gradient_tape/Cast_3/Cast:0", "gradient_tape/pow/mul:0", kind="Cast", part=Part.BACKWARD),
    )
    assert nearest_layer(frames["gradient_tape/Cast_3/Cast:0"], frames) == "dense"
    assert nearest_layer(frames["pow:0"], frames) == "dense"
    assert nearest_layer(frame("alone:0"), {}) is None


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


ANOTHER_BATCH, IN_FLOAT32 = "another batch", "every layer in float32"
KINDS = {ANOTHER_BATCH: Kind.ANOTHER_BATCH, IN_FLOAT32: Kind.ALL_IN_FLOAT32}


def passing(name, loss=1.0):
    return Remedy(KINDS.get(name, Kind.EPSILON), name, True, True, loss, "")


def weigh(remedies, counts, failing=None, losses=(1.0, 2.0, 3.0)):
    counts = {name: np.array(one, np.float32) for name, one in counts.items()}
    found = weighed(remedies, counts, lambda: None if failing is None else np.array(failing, np.float32), losses)
    return {one.name: one for one in found}


def test_the_share_is_of_as_many_values_as_any_remedy_leaves():
    """Another batch has gradients of its own."""
    counts = {"one": [8, 2], "other": [4, 4], ANOTHER_BATCH: [99, 99]}
    found = weigh([passing(name) for name in counts], counts)
    assert (found["one"].gradients_left, found["other"].gradients_left) == (10 / 12, 8 / 12)
    assert found[ANOTHER_BATCH].gradients_left is None
    assert all(one.helps for one in found.values())


@pytest.mark.parametrize(("name", "left"), [("a lower scale", 2 / 12), (IN_FLOAT32, 1.0)])
def test_what_every_remedy_makes_zero_was_due_unless_float32_has_none(name, left):
    """The failing step has a value there, if only a NaN."""
    found = weigh([passing(name)], {name: [2, 0]}, failing=[9, 10])
    assert found[name].gradients_left == pytest.approx(left)


@pytest.mark.parametrize(("counts", "helps"), [([0, 0], False), ([1, 0], False), ([5, 0], True)])
def test_less_than_a_tenth_of_the_gradients_trains_nothing(counts, helps):
    found = weigh([passing("one"), passing("all")], {"one": counts, "all": [10, 10]})
    assert found["one"].helps is helps
    assert found["all"].helps
    assert (found["one"].why_not is None) is helps


@pytest.mark.parametrize(
    ("losses", "loss", "ratio", "helps"),
    [
        ((1.0, 2.0, 3.0), 4.0, 2.0, True),
        ((1.0, 2.0, 3.0), 1e5, 5e4, False),
        ((-1.0, -2.0, -3.0), -4.0, 2.0, True),
        # A loss near 0 has no factor that tells.
        ((1e-9,), 1.0, 1e9, True),
        ((), 1e9, 1e9, False),
    ],
)
def test_a_loss_is_compared_with_those_before_or_else_with_the_least(losses, loss, ratio, helps):
    found = weigh([passing("one", loss), passing("other", 1.0)], {}, losses=losses)
    assert found["one"].loss_ratio == pytest.approx(ratio)
    assert found["one"].helps is helps


def test_what_is_not_known_is_null_and_what_fails_does_not_help():
    found = weigh([passing("one", float("nan")), Remedy(Kind.EPSILON, "failing", True, False, 1.0, "")], {})
    assert (found["one"].loss_ratio, found["one"].gradients_left, found["one"].helps) == (None, None, True)
    assert not found["failing"].helps


def test_a_loss_is_not_usual_since_the_run_diverged():
    """The median of losses that diverge would call any loss a usual one."""
    diverging = [0.6, 4e3, 2e7, 1e11, 7e14, 1e18]
    assert absurd_loss(3.2e6, diverging) == "its loss of 3.2e+06 is 5.3e+06 times the loss of the steps before"
    assert absurd_loss(0.04, diverging) is None
