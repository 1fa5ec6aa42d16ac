"""Guards SIGTERM and SIGINT at any moment of a run: the step is finished and saved, and the exit status says which."""

import os
import signal

import pytest
import tensorflow as tf
from crash_cases import end, exit_as_a_script, run_to_end
from processes import start, wait_for

import loops
from loops.loop.state import folder

MOMENTS = ["trace", "evaluation", "save"]


def stop(place, moment, number, background):
    """Starts a run that lingers at a moment, sends it a signal there, and waits for its end."""
    process = start(exit_as_a_script, place, moment, background)
    wait_for((place / moment).exists, process=process, pause=0.01)
    os.kill(process.pid, number)
    process.join(120)
    return process.exitcode


def check(place, moment, number, status, background=False):
    assert stop(place, moment, number, background) == status
    assert end(place) is None
    saved = folder.numbers(place / "ckpt")
    if moment == "trace":
        assert not saved  # Nothing was done yet.
    else:
        # What was done is saved to the last step: nothing of it is done again.
        assert saved[0] == len((place / "steps.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow_with("save-False")
@pytest.mark.exhaustive_with("evaluation-False", "trace-False")
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_saves_and_exits_with_143(whole, tmp_path, moment, background):
    check(tmp_path, moment, signal.SIGTERM, 143, background)
    if moment == "save":  # Of which something torn could be left.
        process = start(run_to_end, tmp_path)
        process.join(300)
        assert end(tmp_path) == whole


@pytest.mark.slow
def test_sigint_saves_and_exits_as_interrupted(tmp_path):
    """A script that ends with KeyboardInterrupt is killed by SIGINT, which shells show as status 130."""
    check(tmp_path, "trace", signal.SIGINT, -signal.SIGINT)


def run_and_signal(number, times=1):
    """A loop that gets a signal from itself while it acts on its second step; the steps it took."""
    taken = []

    def act(visit):
        taken.append(visit.counters.data)
        if visit.counters.data == 2:
            for _ in range(times):
                signal.raise_signal(number)
            taken.append("acted")

    loop = loops.Loop(lambda number: {"loss": number}, tf.data.Dataset.range(1, 9), steps_per_call=1, actions=[act])
    return loop, taken


@pytest.fixture
def handler():
    """Puts back what SIGTERM did before a test."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, before)


def test_sigterm_without_a_handler_is_an_exit_after_the_visit(handler):
    handler(signal.SIG_DFL)
    loop, taken = run_and_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit:
        loop.run(5)
    assert exit.value.code == 143
    assert taken == [1, 2, "acted"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert loop.run(5).data == 5


def test_a_handler_of_the_users_own_is_called_after_the_visit(handler):
    called = []
    handler(lambda number, frame: called.append((number, len(taken))))
    loop, taken = run_and_signal(signal.SIGTERM)
    loop.run(5)
    assert called == [(signal.SIGTERM, 3)]
    assert taken == [1, 2, "acted", 3, 4, 5]


def test_a_second_sigterm_is_not_kept(handler):
    called = []
    handler(lambda number, frame: called.append(len(taken)))
    loop, taken = run_and_signal(signal.SIGTERM, times=2)
    loop.run(5)
    assert called[0] == 2


def test_an_ignored_sigterm_stays_ignored(handler):
    handler(signal.SIG_IGN)
    loop, taken = run_and_signal(signal.SIGTERM)
    loop.run(5)
    assert taken == [1, 2, "acted", 3, 4, 5]
