"""Guards a run on two workers: one killed, both started again, it ends bit for bit as if nothing had happened.

Real processes on the loopback interface, really killed. Each worker has BatchNorm's statistics, window sums and random
numbers of its own, which its own checkpoint must bring back.
"""

import json

import pytest
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
