"""Replays share the loops that XLA compiled, one for each strategy and number of steps."""

import functools
import importlib

import pytest

from loops.replay import stepping


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    with pytest.MonkeyPatch.context() as patch:
        # The package has a function of the module's name.
        patch.setattr(importlib.import_module("loops.replay.replay"), "stepper", functools.cache(stepping.stepper))
        yield
