"""Guards that every preset is a value with a row in the documentation, and the bounds of those that have their own."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest

from scaler import InvalidArgument, presets
from scaler.presets.rules.streak import Streak
from scaler.strategies import Scheduled

STRATEGIES = [name for name in presets.__all__ if not name.endswith("_stuck")]


def made(name, **arguments):
    required = {"initial_scale": 8.0, "growth_interval": 4} if name == "tf_contrib" else {}
    return getattr(presets, name)(**required | arguments)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_is_a_value_that_nobody_changes(name):
    strategy = made(name)
    assert strategy == made(name)
    assert hash(strategy) == hash(made(name))
    assert isinstance(hash(Scheduled({0: strategy})), int)
    for field in dataclasses.fields(strategy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field.name, None)


def test_the_table_has_a_row_with_a_source_for_each_preset_and_mentions_each_policy():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "presets.md").read_text()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    sources = {line[0].split("`")[1]: line[-1] for line in lines if len(line) == 9}
    for name in presets.__all__:
        marks = (f"`{name}(",) if name.endswith("_stuck") else (".py`", "arXiv", "the same file")
        assert any(mark in (text if name.endswith("_stuck") else sources[name]) for mark in marks), name


LEAST, MOST = 2.0**-126, 2.0**126
BOUNDS = [
    *((name, {}) for name in STRATEGIES),
    ("dalle", {"replicas": 3}),
    *(("apex", {"initial_scale": scale, "min_scale": 0.5}) for scale in (2.0**30, 0.25)),
    ("deepspeed_2025_02", {"min_scale": 0.25}),
    ("tf_keras", {"initial_scale": 0.5}),
    ("mindspore", {"growth_factor": 0.5}),
    *((name, {"threshold": threshold}) for name in ("fairseq", "metaseq") for threshold in (0.25, 0.3)),
]


def test_bounds_are_those_named(snapshot):
    named = []
    for name, arguments in BOUNDS:
        strategy = made(name, **arguments)
        named.append(
            f"{name} {arguments}: {getattr(strategy, 'min_scale', 0):.12g} to {getattr(strategy, 'max_scale', None)}"
        )
    assert named == snapshot


def above(value):
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def below(value):
    return float(np.nextafter(np.float32(value), np.float32(-np.inf)))


GROWTH = ("growth_factor", [above(1), MOST], [1, above(MOST)], r"in \(1, 2\^126\]")
BACKOFF = ("backoff_factor", [LEAST, below(1)], [below(LEAST), 1], r"in \[2\^-126, 1\)")
BACK_OFF = "pytorch nemo megatron flax paddle tf_contrib colossalai"
ONLY_GROW = "fairseq metaseq jmp nnabla openseq2seq_backoff deepspeed deepspeed_2025_02 tf_keras"
# What is taken at either end, and what is not any more, with what is said then.
EDGES = [
    *[(name, *GROWTH) for name in f"{BACK_OFF} {ONLY_GROW}".split()],
    *[(name, *BACKOFF) for name in BACK_OFF.split()],
    ("mindspore", "growth_factor", [1.0, MOST], [below(LEAST), above(MOST)], r"in \(0, 2\^126\]"),
    ("mindspore", "initial_scale", [1, MOST], [below(1), above(MOST)], r"in \[1, 2\^126\]"),
    ("guided_diffusion", "growth", [0, 126], [below(0), above(126)], r"in \[0, 126\]"),
    ("guided_diffusion", "initial_log2_scale", [-126, 126], [below(-126), above(126)], r"in \[-126, 126\]"),
    ("dalle", "replicas", [1], [0], r"such as 1\."),
    ("chainer", "interval", [1], [0], r"such as 1000\."),
    ("fairseq", "tolerance", [0, 5.0], [below(0), math.inf], "a share of at least 0"),
    ("fairseq", "min_loss_scale", [0, MOST], [below(0), above(MOST)], r"in \[0, 2\^126\]"),
    ("metaseq", "min_loss_scale", [0, MOST], [below(0), above(MOST)], r"in \[0, 2\^126\]"),
    ("fairseq", "threshold", [LEAST, None], [below(LEAST)], r"in \[2\^-126, 2\^126\]"),
    ("deepspeed", "growth_interval", [1, 2**31 - 2], [0], r"such as 1000\."),
    ("flax", "growth_interval", [1, 2**31 - 2], [0], r"such as 2000\."),
    ("nnabla", "growth_interval", [1, 2**31 - 3], [0], r"such as 2000\."),
    ("pytorch", "growth_interval", [1, 2**31 - 1], [0, 2**31], r"in \[1, 2\^31\), such as 2000\."),
    ("nemo", "hysteresis", [1], [0], r"such as 1\."),
    ("colossalai", "hysteresis", [0, 1], [-1], r"such as 1\."),
    ("apex", "min_scale", [LEAST, None, 2.0**24], [below(LEAST)], r"in \[2\^-126, 2\^126\]"),
]


@pytest.mark.parametrize(("preset", "name", "taken", "refused", "says"), EDGES)
def test_limits_of_arguments(preset, name, taken, refused, says):
    for value in taken:
        made(preset, **{name: value})
    for value in refused:
        with pytest.raises(InvalidArgument, match=f"{name}=.*{says}"):
            made(preset, **{name: value})


def test_limits_of_streaks_that_deepspeed_and_others_are_made_of():
    named = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "first_interval": None}
    rest = {"hysteresis": 1, "refill": ("growth",), "backoff_floor": LEAST, "growth_ceiling": MOST, "double": False}
    assert vars(Streak(8.0)) == {"initial_scale": 8.0, **named, **rest}
    assert Streak(8.0, growth_interval=5, first_interval=5).first_interval == 5
    with pytest.raises(InvalidArgument) as caught:
        Streak(8.0, growth_interval=5, first_interval=4)
    assert str(caught.value) == "first_interval=4: expected at least growth_interval=5."
    for name in ("growth_factor", "backoff_factor"):
        assert getattr(Streak(8.0, **{name: LEAST}), name) == LEAST
        for wrong in (below(LEAST), above(MOST)):
            with pytest.raises(InvalidArgument, match=rf"^{name}=.*in \[2\^-126, 2\^126\]"):
                Streak(8.0, **{name: wrong})
    assert Streak(8.0, backoff_floor=16.0, growth_ceiling=16.0).min_scale == 8.0
    with pytest.raises(InvalidArgument, match=r"^min_scale=16\.0, max_scale=8\.0: expected min_scale <= max_scale"):
        Streak(8.0, backoff_floor=16.0, growth_ceiling=8.0)
    with pytest.raises(InvalidArgument, match="expected a tuple of some of growth, finite, backoff"):
        Streak(8.0, refill=("never",))
