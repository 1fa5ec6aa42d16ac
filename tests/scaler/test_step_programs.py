"""What is said of steps, right and wrong, while they are traced."""

import warnings

import pytest
import tensorflow as tf
from step_programs import LOOPS, PROGRAMS, World, trace_no_branches

import scaler

MISSED = {
    "logsumexp_of_two": "nothing is known of a product of two curves",
    "weights_moved_by_scaled": "nothing is applied, so that nobody looks",
}
"""Wrong ones of which nothing is said. A test fails where one is noticed: take it out then."""
WHOLE = {
    "squared_on_replicas",
    "each_applies_in_a_branch_of_another_condition",
    "squared_and_applied_in_a_branch",
}
"""Programs that are traced with all that a step does."""


def said_of(name, make):
    """The warnings and the refusal of a program."""
    step, arguments = make(World())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            tf.function(step, autograph=name in LOOPS).get_concrete_function(*arguments)
        except scaler.InvalidArgument as error:
            return [str(error)]
    return [str(one.message) for one in said if issubclass(one.category, scaler.ScaleWarning)]


def programs(some=PROGRAMS):
    return pytest.mark.parametrize(("name", "right", "make"), [pytest.param(*one, id=one[0]) for one in some])


def is_right(name, right):
    return right == "ok" or name in MISSED


@programs()
def test_what_is_wrong_is_said_and_nothing_else(name, right, make, monkeypatch, snapshot):
    if name not in WHOLE:
        trace_no_branches(monkeypatch)
    said = said_of(name, make)
    if is_right(name, right):
        assert said == []
    else:
        assert said == snapshot


@pytest.mark.slow
@programs(PROGRAMS[::12])
def test_it_is_said_of_whole_steps_too(name, right, make):
    assert bool(said_of(name, make)) is not is_right(name, right)
