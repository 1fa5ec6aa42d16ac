"""The digits, loaded once, and runs on them that several tests look at."""

import keras
import pytest
from crash_cases import end, run_to_end
from processes import start

from loops import tasks


@pytest.fixture(scope="session")
def digits():
    return tasks.load("digits")


class SmallTask(tasks.ImageTask):
    """A task with a network that is made and traced in no time, for what does not depend on the network."""

    def model(self, policy):
        layers = [
            keras.layers.Dense(2, activation="relu", dtype=policy),
            keras.layers.BatchNormalization(dtype=policy),
            keras.layers.Flatten(dtype=policy),
            keras.layers.Dense(10, dtype=policy),
            keras.layers.Activation("linear", dtype="float32"),
        ]
        return keras.Sequential([keras.layers.Input(self.images.shape[1:]), *layers], name=self.name)


@pytest.fixture(scope="session")
def small(digits):
    return SmallTask(**vars(digits))


@pytest.fixture
def small_digits(monkeypatch, small):
    """Has "digits" name the small task."""
    monkeypatch.setitem(tasks._TASKS, "digits", lambda: small)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """What the uninterrupted run of `crash_cases` comes to."""
    place = tmp_path_factory.mktemp("whole")
    process = start(run_to_end, place)
    process.join(300)
    assert process.exitcode == 0
    return end(place)
