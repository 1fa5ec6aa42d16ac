"""Guards micro-batches in a `ComposedStep`, and turns of whole windows."""

import numpy as np
import pytest
import tensorflow as tf
from models import batch, plain_model, squared_error
from rigs import raw
from step_cases import part

import loops
import scaler


class Pair:
    """Two plain models with a loss each, of one forward pass."""

    def __init__(self, one_scaler=False, **arguments):
        self.models = plain_model(), plain_model()
        every = arguments.pop("every", 1)
        parts = [
            part("first", self.models[0], lambda both: both[0]),
            part("second", self.models[1], lambda both: both[1], every=every),
        ]
        arguments |= {"loss_scaler": scaler.LossScaler(scaler.Dynamic(2.0**6))} if one_scaler else {}
        self.step = loops.ComposedStep(parts, self.losses, **arguments)

    def losses(self, given):
        x, y = given
        first = self.models[0](x)
        return squared_error(y, first), squared_error(2.0 * first, self.models[1](x))

    def variables(self):
        return [*self.models[0].variables, *self.models[1].variables]


def halves(given):
    return [tuple(one[half] for one in given) for half in (slice(0, 4), slice(4, 8))]


@pytest.mark.slow_with("False-2")
@pytest.mark.exhaustive_with("True-1")
@pytest.mark.parametrize(("one_scaler", "every"), [(False, 2), (True, 1)])
def test_a_window_is_the_large_batch(one_scaler, every):
    """Of two equal halves: their losses are means."""
    large, windows = Pair(one_scaler, every=every), Pair(one_scaler, every=every, accumulate=2)
    for number in range(1, 5):
        half = tuple(one[:4] for one in batch(number))
        expected = large.step(tuple(tf.concat([one, one], axis=0) for one in half))
        first, second = (windows.step(half) for _ in range(2))
        assert not first["attempted"]
        for name in ("attempted", "applied", "first/applied", "second/attempted", "second/applied"):
            assert bool(second[name]) == bool(expected[name]), (number, name)
        assert bool(second["second/applied"]) == (number % every == 0)
    for one, other in zip(large.variables(), windows.variables(), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("one_scaler", [False, True])
def test_a_bad_micro_batch_skips_the_windows_of_the_parts_that_it_is_in(one_scaler):
    pair = Pair(one_scaler, accumulate=2)
    x, y = map(np.copy, batch(0))
    y[0] = np.inf  # In the first loss of the first half.
    before = [raw(model.variables) for model in pair.models]
    outputs = [pair.step(half) for half in halves((x, y))]
    assert [bool(one["attempted"]) for one in outputs] == [False, True]
    assert not outputs[1]["first/applied"]
    assert bool(outputs[1]["second/applied"]) != one_scaler
    assert raw(pair.models[0].variables) == before[0]
    assert (raw(pair.models[1].variables) == before[1]) == one_scaler
    for half in halves(batch(1)):
        outputs = pair.step(half)
    assert outputs["applied"]
