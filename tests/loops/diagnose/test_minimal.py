"""The smallest set of layers: delta debugging against brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops.diagnose.explain.minimal import minimal


@given(st.integers(1, 9), st.lists(st.frozensets(st.integers(0, 8), max_size=3), max_size=3))
def test_none_of_its_items_can_be_left_out(count, causes):
    """Passing needs one item of each cause; a cause without items can never be met."""
    items = [f"layer {place}" for place in range(count)]
    asked = []

    def passes(chosen):
        asked.append(tuple(chosen))
        return all({items.index(one) for one in chosen} & cause for cause in causes)

    found = minimal(items, passes)
    possible = [
        list(chosen)
        for size in range(count + 1)
        for chosen in itertools.combinations(items, size)
        if all({items.index(one) for one in chosen} & cause for cause in causes)
    ]
    assert len(asked) == len(set(asked))
    if not possible:
        assert found is None
        return
    assert found in possible
    assert not any([other for other in found if other != one] in possible for one in found)


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {2, 5, 6}, set(range(8))], ids=str)
def test_what_is_needed_together_is_found(needed):
    """Nothing passes but a set with all of them."""
    assert minimal(range(8), lambda chosen: needed <= set(chosen)) == sorted(needed)


def test_nothing_is_needed():
    """A step that passes as it is needs no layer."""
    assert minimal(["a", "b"], lambda chosen: True) == []
