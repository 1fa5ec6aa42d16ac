"""Guards SIGTERM and SIGINT at any moment of a run: the step is finished and saved, and the exit status says which."""

import os
import signal
import time

import pytest
from crash_cases import end, exit_as_a_script, run_to_end, start

from loops.resume import folder

MOMENTS = ["trace", "evaluation", "save"]


def stop(place, moment, number):
    """Starts a run that lingers at a moment, sends it a signal there, and waits for its end."""
    process = start(exit_as_a_script, place, moment)
    limit = time.monotonic() + 120
    while not (place / moment).exists() and process.is_alive() and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(120)
    return process.exitcode


def check(place, moment, number, status, whole):
    assert stop(place, moment, number) == status
    assert end(place) is None
    saved = folder.numbers(place / "ckpt")
    if moment == "trace":
        assert not saved  # Nothing was done yet.
    else:
        # What was done is saved to the last step: nothing of it is done again.
        assert saved[0] == len((place / "steps.jsonl").read_text().splitlines()) == 2
    process = start(run_to_end, place)
    process.join(300)
    assert end(place) == whole


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_saves_and_exits_with_143(whole, tmp_path, moment):
    check(tmp_path, moment, signal.SIGTERM, 143, whole)


@pytest.mark.parametrize(
    "moment",
    [pytest.param("trace", marks=pytest.mark.slow), pytest.param("save", marks=pytest.mark.slow), "evaluation"],
)
def test_sigint_saves_and_exits_as_interrupted(whole, tmp_path, moment):
    """A script that ends with KeyboardInterrupt is killed by SIGINT, which shells show as status 130."""
    check(tmp_path, moment, signal.SIGINT, -signal.SIGINT, whole)
