"""Guards runs that share a trace: each is the run that it is alone, whatever the one before it did."""

import re

import pytest
import tensorflow as tf

from loops.run.train import RunOptions, train
from loops.study.compare import SharedTrace

pytestmark = pytest.mark.slow

STRATEGIES = {
    "grows": "dynamic:growth_interval=3",
    "skips at first": "dynamic:initial_scale=1099511627776,growth_interval=3",
}


def unnumbered(text):
    """Without the numbers that Keras gives to the names of a process's models."""
    return re.sub(r"_\d+/", "/", text)


@pytest.mark.exhaustive_with("skips at first", "grows")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_later_run_is_the_run_that_it_is_alone(small, tmp_path, strategy):
    trace = SharedTrace()
    for seed in (0, 1):
        options = RunOptions("mixed_float16", strategy, steps=60, seed=seed)
        shared = train(small, options, tmp_path / f"shared{seed}", built_by=trace.build)
    alone = train(small, options, tmp_path / "alone")
    assert shared == alone
    rows = [unnumbered((tmp_path / name / "steps.jsonl").read_text()) for name in ("shared1", "alone")]
    assert rows[0] == rows[1]


@pytest.mark.exhaustive
def test_a_step_is_traced_once_for_all_seeds(small, tmp_path):
    trace, loops = SharedTrace(), []

    def build(*arguments, **settings):
        loops.append(trace.build(*arguments, **settings))
        return loops[-1]

    for seed in range(3):
        train(small, RunOptions("mixed_float16", "dynamic", steps=10, seed=seed), tmp_path / str(seed), built_by=build)
    first, *others = (loop.calls for loop in loops)
    assert all(one is first for one in others)
    assert first._many.experimental_get_tracing_count() == 1
    assert isinstance(loops[-1].position.iterator, tf.data.Iterator)
