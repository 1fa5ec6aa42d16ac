"""Guards a run on two workers: one killed, both started again, it ends bit for bit as if nothing had happened.

Real processes on the loopback interface, really killed. Each worker has BatchNorm's statistics, window sums and random
numbers of its own, which its own checkpoint must bring back.
"""

import functools
import json
import traceback

import keras
import models
import numpy as np
import pytest
import replica_cases as cases
import tensorflow as tf
from worker_cases import END, ends, explained, killed, killed_beside, run_to_end, start_workers, statuses, told

from loops.loop.state import folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the uninterrupted run comes to, on each worker."""
    place = tmp_path_factory.mktemp("whole")
    assert statuses(start_workers(run_to_end, place)) == [0, 0]
    return ends(place)


@pytest.mark.exhaustive
def test_workers_share_weights_and_nothing_else(whole):
    """What follows would not notice a worker that goes on from the other's checkpoint if they were the same."""
    first, second = whole
    assert first["shared"] == second["shared"]
    assert first["next"] == second["next"]
    assert first["counters"] == second["counters"] == "Counters(data=10, attempted=5, applied=4, known=True)"
    assert sum(one != other for one, other in zip(first["own"], second["own"], strict=True)) >= 6
    assert first["noise"] != second["noise"]
    assert first["lines"].count("\n") == END


@pytest.mark.exhaustive
def test_a_skip_is_explained_on_the_first_alone_and_all_go_on_as_without(whole, tmp_path):
    """The other worker waits for its next step: what the first repeats must not wait for the other."""
    assert statuses(start_workers(explained, tmp_path)) == [0, 0]
    assert ends(tmp_path) == whole
    (found,) = json.loads((tmp_path / "explanations.json").read_text())["explanations"]
    assert found["sentence"].startswith(
        "Step 4 was skipped, but the share of the batch that replica 0 takes passes alone, up to its gradients. The "
        "step was skipped"
    )


@pytest.mark.slow
def test_a_killed_worker_ends_the_others_and_all_go_on(whole, tmp_path):
    victim = 0
    found = statuses(start_workers(killed, tmp_path, victim))
    assert sorted(found) == [-9, 7]
    assert found[victim] == -9
    lost = (tmp_path / "lost").read_text()
    assert lost.startswith(f"worker {1 - victim} waits for another of the 2 workers, which is gone")
    assert "Start all of them again" in lost
    # The one that lived had saved the step after which the other was killed.
    places = [tmp_path / "ckpt", tmp_path / "ckpt" / "worker-1"]
    assert folder.numbers(places[victim]) == [3]
    assert folder.numbers(places[1 - victim])[-1] == 3
    assert len(folder.numbers(places[1 - victim])) == 2
    assert statuses(start_workers(run_to_end, tmp_path)) == [0, 0]
    assert ends(tmp_path) == whole
    assert [folder.numbers(place) for place in places] == [[10, 9], [10, 9]]


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_while_its_thread_saves_leaves_a_step_that_all_have(whole, tmp_path):
    found = statuses(start_workers(killed_beside, tmp_path, 1))
    assert found == [7, -9]
    places = [tmp_path / "ckpt", tmp_path / "ckpt" / "worker-1"]
    assert folder.numbers(places[1]) == [3]
    assert 3 in folder.numbers(places[0])
    assert statuses(start_workers(run_to_end, tmp_path, True)) == [0, 0]
    assert ends(tmp_path) == whole
    assert [folder.numbers(place) for place in places] == [[10, 9, 6], [10, 9, 6]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("background", [False, True])
def test_what_happens_to_one_worker_ends_all_at_the_same_step_saved(tmp_path, background):
    assert statuses(start_workers(told, tmp_path, background)) == [0, 0]
    first, second = (json.loads((tmp_path / f"report-{index}.json").read_text()) for index in (0, 1))
    other = "worker 1 stopped with an error after step 2, so worker 0 stops, too: the output of worker 1 says why."
    assert first[0][0] == "WorkerLost"
    assert first[0][1].startswith(other)
    assert second[0][:2] == ["ValueError", "of the user"]
    assert first[1][:2] == second[1][:2] == ["SystemExit", "143"]
    assert first[2][1] == "an action on worker 1 ended the run"
    assert second[2][1] == "StopWhen's condition was true at step 7"
    assert first[3][:2] == second[3][:2] == ["", None]
    # The step each ended at, and the newest checkpoint.
    assert [one[2:] for one in first] == [one[2:] for one in second] == [[2, 2], [5, 5], [7, 7], [10, 10]]


SECONDS = 240
APPLIED = [True, False, True, False, True, False, False]


def work(index, folder, accumulate):
    """One worker's `TrainStep` in a loop, each worker of which overflows in turn: its report, or what it raised."""
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Must come first.
        adam, model = functools.partial(keras.optimizers.Adam, 0.01), models.plain_model
        rig = cases.Rig(strategy, model, adam, steps_per_call=7, clip_norm=0.5, accumulate=accumulate)
        batches = [cases.batch(number) for number in range(7)]
        for number, worker in ((1, 0), (3, 1), (5, 0), (6, 1)):
            batches[number] = cases.spoil(batches[number], "gradients", worker, 2)
        report = {
            "applied": rig.run(batches)["applied"].tolist(),
            "finite": cases.finite(rig.variables()),
            "loss_scale": float(rig.loss_scaler.loss_scale),
            "counters": [int(count) for count in rig.loss_scaler.counters],
            "weights": [part.tolist() for parts in cases.components(rig.weights()) for part in parts],
        }
        (folder / f"{index}.json").write_text(json.dumps(report))
    except BaseException:
        (folder / f"{index}.log").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of both workers, by the size of a window. Both are killed if one takes too long."""

    @functools.cache
    def of(accumulate):
        folder = tmp_path_factory.mktemp("workers")
        found = statuses(start_workers(work, folder, accumulate), SECONDS)
        said = [path.read_text()[-3000:] for path in sorted(folder.glob("*.log"))]
        assert found == [0, 0], said
        return [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]

    return of


@pytest.mark.slow
def test_a_window_is_skipped_on_both(reports):
    first, second = reports(7)
    assert first == second
    assert not any(first["applied"])
    assert first["finite"]
    assert first["counters"] == [2, 1, 1, 1]


def test_as_one_process_on_the_concatenated_batch(reports):
    adam = functools.partial(keras.optimizers.Adam, 0.01)
    one = cases.Rig(tf.distribute.get_strategy(), models.plain_model, adam, clip_norm=0.5)
    one.run([cases.batch(99)] * 6)  # As many as an in-graph loop of 7 steps is traced with.
    one.run([cases.batch(number) for number in (0, 2, 4)])
    expected = [part for parts in cases.components(one.weights()) for part in parts]
    for worker in reports(1):
        assert worker["applied"] == APPLIED
        assert worker["finite"]
        assert worker["loss_scale"] == cases.LOSS_SCALE["float32"] / 2**4
        for ours, theirs in zip(worker["weights"], expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
