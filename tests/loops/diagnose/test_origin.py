"""Where a value that is not finite came from."""

import math

import pytest

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
