"""Guards what the page on a second graph stands on: its decoder, and what it claims of given numbers."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest

from loops import tasks
from loops.study.effects import second_graph
from loops.study.effects.decoding import one_by_one, whole


@pytest.mark.slow
def test_one_position_at_a_time_is_the_whole_sequence():
    keras.utils.set_random_seed(0)
    task = dataclasses.replace(tasks.load("text"), context=12, width=16)
    model = task.model("float32")
    drawn = np.random.default_rng(0).integers(0, 90, (3, 13)).astype(np.int32)
    given, following = drawn[:, :-1], drawn[:, 1:]
    expected = whole(model, xla=False)(given, following)
    assert expected.shape == (3, 12)
    np.testing.assert_allclose(one_by_one(model)(given, following), expected, atol=1e-5)
    # What comes later changes nothing, and what came before does.
    other = given.copy()
    other[:, 6] = 1
    moved = one_by_one(model)(other, following)
    np.testing.assert_allclose(moved[:, :6], expected[:, :6], atol=1e-5)
    assert (np.abs(moved[:, 7:] - expected[:, 7:]) > 1e-5).any()


def made_up(factor=8.0, bits=8.0, wider=5.0, exact=1e-7, power=0.5, beyond_16=0.0, beyond=0.1):
    token, away, deviation, outside, same = {}, {}, {}, {}, {}
    lengths = second_graph._LENGTHS
    for graph, name in itertools.product((second_graph._FIRST, *second_graph._GRAPHS), second_graph._FORMATS):
        size = {"float32": exact, "float16": 1e-3, "bfloat16": factor * 1e-3}[name]
        token[graph, name] = np.full(2, size)
        away[graph, name] = np.full(2, {"float32": 0.0, "float16": 1e-3, "bfloat16": bits * 1e-3}[name])
        spread = {"float32": exact, "float16": 1e-3, "bfloat16": wider * 1e-3}[name]
        deviation[graph, name] = np.tile(spread * lengths**power, (2, 1))
        same[graph, name] = np.full(2, 0.5)
        share = {"float32": 0.0, "float16": beyond_16, "bfloat16": beyond}[name]
        outside[graph, name] = np.full((2, len(lengths)), share)
    return [claim.holds for claim in second_graph._claims(token, away, deviation, outside, same)]


@pytest.mark.parametrize(
    ("numbers", "failing"),
    [
        ({}, []),
        ({"bits": 3.0}, [0]),
        ({"bits": 20.0}, [0]),
        ({"factor": 3.0}, [1, 2]),
        ({"factor": 20.0}, [1, 2]),
        ({"factor": 0.9}, [1, 2, 4]),
        ({"wider": 2.0}, [3]),
        ({"wider": 10.0}, [3]),
        ({"exact": 1e-4}, [5]),
        ({"power": 1.0}, [6]),
        ({"power": 0.1}, [6]),
        ({"beyond_16": 0.01}, [7]),
        ({"beyond": 0.0}, [8]),
    ],
)
def test_a_verdict_follows_from_the_numbers(numbers, failing):
    assert [number for number, holds in enumerate(made_up(**numbers)) if not holds] == failing


def test_factors_have_a_geometric_mean():
    assert second_graph._times(np.array([0.25, 4.0, 1.0])) == "1.0 (0.2 to 4.0)"
    assert second_graph._times(np.array([2.0, 2.0])) == "2.0"
