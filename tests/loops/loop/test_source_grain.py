"""Guards a loop over Grain itself: its loader, whose state is bytes, and its datasets, whose state is a dict."""

import shutil

import numpy as np
import pytest
from source_cases import Run

import loops

grain = pytest.importorskip("grain")
ROWS = np.arange(40, dtype=np.float32)
BY_ITSELF = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
"""Without the threads of Grain, which read 500 batches ahead."""


class Doubled(grain.transforms.Map):
    def map(self, element):
        return 2 * element


class Noisy(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + rng.normal(size=4).astype(np.float32)


def loader(seed=1):
    sampler = grain.samplers.IndexSampler(len(ROWS), shuffle=True, seed=seed, num_epochs=None)
    operations = [Doubled(), grain.transforms.Batch(4, drop_remainder=True)]
    return grain.DataLoader(data_source=ROWS, sampler=sampler, operations=operations, read_options=BY_ITSELF)


def iterated():
    mapped = grain.MapDataset.source(ROWS).seed(1).shuffle().repeat().map(lambda row: 2 * row).batch(4)
    return mapped.to_iter_dataset(BY_ITSELF).random_map(Noisy())


@pytest.mark.parametrize(("make", "steps_per_call"), [(loader, 1), (iterated, 4)])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, make, steps_per_call):
    """Beyond an epoch of ten batches, with a thread that was ahead."""
    run = Run(make(), steps_per_call=steps_per_call, folder=tmp_path / "run").go(7)
    run.loop.position.check()
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    run.go(25)
    resumed = Run(make(), steps_per_call=steps_per_call, folder=tmp_path / "killed").go(25)
    assert resumed.losses == run.losses[7:]
    assert len(set(run.losses)) == 25


def test_a_loader_with_another_sampler_is_refused(tmp_path):
    """By Grain itself, in whose state the sampler is."""
    Run(loader(), folder=tmp_path).go(3)
    with pytest.raises(loops.CheckpointError, match="DataLoaderIterator cannot go on"):
        Run(loader(seed=2), folder=tmp_path).go(6)


def test_a_dataset_of_another_length_is_refused(tmp_path):
    Run(grain.MapDataset.source(ROWS).batch(4), folder=tmp_path).go(3)
    with pytest.raises(loops.CheckpointError, match="its length was 10 and is 5"):
        Run(grain.MapDataset.source(ROWS[:20]).batch(4), folder=tmp_path).go(4)


def test_the_end_of_an_epoch_is_the_end_of_the_data():
    run = Run(grain.MapDataset.source(ROWS).batch(4), steps_per_call=8)
    with pytest.raises(loops.OutOfData, match="ended after 10 of 12 steps"):
        run.go(12)
    assert run.visits == [8, 10]
