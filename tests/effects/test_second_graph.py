"""Guards what the page on a second graph stands on: its decoder, and what it claims of given numbers."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest

from benchmarks.effects import second_graph
from benchmarks.effects.effect import claims_of
from benchmarks.effects.second_graph import one_by_one, whole
from loops import tasks


@pytest.mark.slow
def test_one_position_at_a_time_is_the_whole_sequence():
    keras.utils.set_random_seed(0)
    task = dataclasses.replace(tasks.load("text"), context=5, width=16)
    model = task.model("float32")
    drawn = np.random.default_rng(0).integers(0, 90, (3, 6)).astype(np.int32)
    given, following = drawn[:, :-1], drawn[:, 1:]
    expected = whole(model, xla=False)(given, following)
    assert expected.shape == (3, 5)
    np.testing.assert_allclose(one_by_one(model)(given, following), expected, atol=1e-5)
    # What comes later changes nothing, and what came before does.
    other = given.copy()
    other[:, 2] = 1
    moved = one_by_one(model)(other, following)
    np.testing.assert_allclose(moved[:, :2], expected[:, :2], atol=1e-5)
    assert (np.abs(moved[:, 3:] - expected[:, 3:]) > 1e-5).any()


def made_up(factor=8.0, bits=8.0, wider=5.0, exact=1e-7, power=0.5, beyond_16=0.0, beyond=0.1, size=1e-3):
    token, away, deviation, outside, same = {}, {}, {}, {}, {}
    lengths = second_graph.LENGTHS
    for graph, name in itertools.product((second_graph.FIRST, *second_graph.GRAPHS), second_graph.FORMATS):
        token[graph, name] = np.full(2, {"float32": exact, "float16": 1e-3, "bfloat16": factor * 1e-3}[name])
        away[graph, name] = np.full(2, {"float32": 0.0, "float16": 1e-3, "bfloat16": bits * 1e-3}[name])
        spread = {"float32": exact, "float16": size, "bfloat16": wider * size}[name]
        deviation[graph, name] = np.tile(spread * lengths**power, (2, 1))
        same[graph, name] = np.full(2, 0.5)
        share = {"float32": 0.0, "float16": beyond_16, "bfloat16": beyond}[name]
        outside[graph, name] = np.full((2, len(lengths)), share)
    return claims_of("second-graph", *second_graph.judged(token, away, deviation, outside, same))


@pytest.mark.parametrize(
    ("numbers", "failing"),
    [
        ({}, []),
        ({"bits": 3.0}, [0]),
        ({"bits": 20.0}, [0]),
        ({"factor": 3.0}, [1, 2]),
        ({"factor": 20.0}, [1, 2]),
        ({"factor": 0.9}, [1, 2, 4, 5]),
        ({"wider": 0.9}, [6, 7]),
        ({"exact": 1e-4}, [8, 9]),
        ({"power": 1.0}, [10]),
        ({"power": 0.1}, [10]),
        ({"beyond_16": 0.01}, [11]),
        ({"beyond": 0.0}, [12]),
    ],
)
def test_a_verdict_follows_from_the_numbers(numbers, failing):
    assert [number for number, claim in enumerate(made_up(**numbers)) if claim.holds is False] == failing


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [({}, None), ({"size": 0.07}, True), ({"size": 0.02, "wider": 20.0}, False), ({"size": 1.0}, None)],
)
def test_a_divergence_is_compared_with_one_of_its_size_only(numbers, expected):
    """Small log ratios say nothing of a published divergence of 7.64."""
    claims = made_up(**numbers)
    assert [number for number, claim in enumerate(claims) if claim.holds is None] == ([3] if expected is None else [])
    assert claims[3].holds is expected


CASES = list(itertools.product(second_graph.GRAPHS, second_graph.FORMATS))


def alike(size):
    """The same numbers for each graph and format: of tokens, deviations, what stays, and distances."""
    away = {case: np.ones(2) for case in itertools.product(("whole", *second_graph.GRAPHS), second_graph.FORMATS)}
    deviation = {case: np.ones((2, len(second_graph.LENGTHS))) for case in CASES}
    return {case: np.full(2, size) for case in CASES}, deviation, {case: np.full(2, 0.5) for case in CASES}, away


def test_one_graph_can_fail_alone():
    token, deviation, same, away = alike(1e-3)
    token["XLA", "bfloat16"] = np.full(2, 2e-3)
    token["one at a time", "bfloat16"] = np.array([2e-3, 5e-4])
    claims = claims_of("second-graph", *second_graph.judged(token, away, deviation, deviation, same))
    assert [claim.holds for claim in claims[4:6]] == [True, False]
    assert "(1 of 2)" in claims[5].text
    # A graph that changes few characters is nearly the first one. In one of the formats that is enough.
    same["one at a time", "float16"] = np.full(2, 0.8)
    claims = claims_of("second-graph", *second_graph.judged(token, away, deviation, deviation, same))
    assert [claim.holds for claim in claims[4:8]] == [True, None, False, None]
    assert "too few characters change" in claims[5].text
    # Nor can it tell of those that do.
    assert [claims[number].holds for number in (1, 2, 8, 9)] == [False, None, False, None]
    assert ["too few" in claims[number].text for number in (1, 2, 8, 9)] == [False, True, False, True]


@pytest.mark.parametrize(("nearer", "told"), [(0.8, False), (0.92, True), (1.08, True), (1.2, False)])
def test_a_graph_that_treats_the_formats_differently_cannot_tell_which_differs_more(nearer, told):
    token, deviation, same, away = alike(1e-3)
    for graph in second_graph.GRAPHS:
        token[graph, "bfloat16"] = np.full(2, 8e-3)
    deviation["XLA", "bfloat16"] = deviation["one at a time", "bfloat16"] = 8 * np.ones((2, len(second_graph.LENGTHS)))
    away["XLA", "bfloat16"] = np.array([1.0, nearer])
    claims = claims_of("second-graph", *second_graph.judged(token, away, deviation, deviation, same))
    assert [claim.holds for claim in claims[4:8]] == [True if told else None, True] * 2
    assert ("treats the formats differently" in claims[4].text) is not told
    assert claims[1].holds is True


def test_a_size_is_that_of_characters_that_change():
    """However many there are: unchanged ones say nothing of the size of roundings."""
    token, deviation, same, away = alike(0.0)
    for graph, name in CASES:
        share = {"float32": 0.5, "float16": 0.1, "bfloat16": 0.01}[name]
        token[graph, name] = np.full(2, share * {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3}[name])
        same[graph, name] = np.full(2, 1 - share)
    assert second_graph.changed_factor(token, same)["XLA"] == pytest.approx([8, 8])
    claims = claims_of("second-graph", *second_graph.judged(token, away, deviation, deviation, same))
    assert [claims[number].holds for number in (1, 2, 8, 9)] == [None] * 4


def test_only_a_direction_and_a_divergence_are_published():
    assert [number for number, claim in enumerate(made_up()) if claim.published] == [3, 4, 5, 6, 7]


def test_factors_have_a_geometric_mean():
    assert second_graph.times(np.array([0.25, 4.0, 1.0])) == "1.0 (0.2–4.0)"
    assert second_graph.times(np.array([2.0, 2.0])) == "2.0"
