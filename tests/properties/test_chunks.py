"""How small variables are cut into chunks."""

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from scaler.gate import joined


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 12), max_size=30), chunk=st.integers(1, 20))
def test_chunks_hold_each_place_once_in_order_and_no_more_than_fits(sizes, chunk):
    variables = [tf.TensorSpec([size]) for size in sizes]
    groups = joined.cut(range(len(sizes)), variables, chunk)
    assert [place for group in groups for place in group] == list(range(len(sizes)))
    for group in groups:
        assert len(group) == 1 or sum(sizes[place] for place in group) <= chunk
