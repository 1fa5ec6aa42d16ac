"""What is said of 164 steps, right and wrong, while they are traced."""

import warnings

import pytest
import tensorflow as tf
from step_programs import PROGRAMS, World

import scaler

MISSED = {
    "logsumexp_of_two": "nothing is known of a product of two curves",
    "weights_moved_by_scaled": "nothing is applied, so that nobody looks",
}
"""Wrong ones of which nothing is said. A test fails where one is noticed: take it out then."""


def said_of(make):
    """The warnings and the refusal of a program."""
    step, arguments = make(World())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            tf.function(step).get_concrete_function(*arguments)
        except scaler.InvalidArgument as error:
            return [str(error)]
    return [str(one.message) for one in said if issubclass(one.category, scaler.ScaleWarning)]


@pytest.mark.parametrize(("right", "make"), [pytest.param(*one, id=name) for name, *one in PROGRAMS])
def test_what_is_wrong_is_said_and_nothing_else(right, make, request):
    said = said_of(make)
    if right == "ok" or request.node.callspec.id in MISSED:
        assert said == []
    else:
        assert said
