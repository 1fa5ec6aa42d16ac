"""Guards a run that is killed: it starts again from the newest whole checkpoint and ends as the uninterrupted one.

Real processes, really killed; `make crash` kills fifty times, the default tests a few.
"""

import random
import signal
import time

import pytest
from crash_cases import NO_DISK, STEPS, end, run_beside, run_on_a_full_disk, run_to_end
from processes import start, wait_for

from loops.loop.state import folder


def finish(place):
    """Lets the run go on to its end."""
    process = start(run_to_end, place)
    process.join(300)
    assert process.exitcode == 0
    names = [path.name for path in (place / "ckpt").iterdir()]
    assert not [name for name in names if "temp" in name or "tmp" in name or name.startswith("probe")]
    data = {name.partition(".")[0] for name in names if ".data" in name}
    assert data == {f"ckpt-{number}" for number in folder.numbers(place / "ckpt")}
    assert len(data) == 2
    return end(place)


RUNS = [run_to_end, run_beside]


def kill_at_random(place, seed, kills, run=run_to_end):
    """Kills the run so many times, at moments from its start to shortly before its end; how far it was each time."""
    moments, reached = random.Random(seed), []
    while len(reached) < kills and end(place) is None:
        goal = moments.randrange(STEPS)
        process = start(run, place)
        wait_for(lambda goal=goal: max(folder.numbers(place / "ckpt"), default=0) >= goal, process=process, pause=0.01)
        time.sleep(moments.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
        reached.append(max(folder.numbers(place / "ckpt"), default=0))
    return reached


@pytest.mark.slow
def test_kills_at_random_moments(whole, tmp_path):
    kill_at_random(tmp_path, seed=1, kills=1)
    assert finish(tmp_path) == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("seed", range(10))
def test_many_kills_at_random_moments(whole, tmp_path, seed, run):
    reached = kill_at_random(tmp_path, seed, 5, run)
    assert reached == sorted(reached)
    assert finish(tmp_path) == whole


def kill_in_save(place, run):
    """Kills the run when a checkpoint's temporary files are there; whether they stayed."""
    process = start(run, place)
    wait_for(lambda: any((place / "ckpt").glob("ckpt-*_temp*")), process=process, pause=0.0005)
    process.kill()
    process.join()
    return any((place / "ckpt").glob("ckpt-*_temp*"))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_kill_in_the_middle_of_a_save(whole, tmp_path, run):
    """Some saves are over before they can be killed, so it is tried until two were not."""
    torn, tries = 0, 0
    while torn < 2 and tries < 10 and end(tmp_path) is None:
        torn, tries = torn + kill_in_save(tmp_path, run), tries + 1
    assert torn
    assert finish(tmp_path) == whole


@pytest.mark.slow_with("300000-False")
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("room", [300_000, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_disk_that_is_full_in_the_middle_of_a_save(whole, tmp_path, room, background):
    process = start(run_on_a_full_disk, tmp_path, 8, room, background)
    process.join(300)
    if process.exitcode == NO_DISK:
        pytest.skip("this user may not mount a file system of its own, by which a disk can be full")
    assert process.exitcode == 0
    said = (tmp_path / "error CheckpointError").read_text()
    assert "step 8 could not be saved" in said
    assert "No space left on device" in said
    assert end(tmp_path / "copy") == whole
