"""Replays share the loops that XLA compiled, one for each strategy and number of steps; a static scale needs none."""

import functools
import importlib

import numpy as np
import pytest

import scaler
from loops.replay import stepping


@functools.cache
def _stepper(strategy):
    if not isinstance(strategy, scaler.Static):
        return stepping.stepper(strategy)
    scale = np.float32(strategy.loss_scale)
    return lambda facts: stepping.Scales(np.full(len(facts.limit), scale), float(scale))


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    with pytest.MonkeyPatch.context() as patch:
        # The package has a function of the module's name.
        patch.setattr(importlib.import_module("loops.replay.replay"), "stepper", _stepper)
        yield
