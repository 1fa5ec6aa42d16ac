"""Guards that Dynamic can do exactly what other frameworks do: scales recorded from their own code.

The scale after each step, from 8, with a growth interval of 4; see the reference notes, section 1.21.
"""

import numpy as np
import pytest
import reference

import scaler
from scaler import Dynamic, LossScaler
from scaler.strategies import Event

P1, P2, P3 = "1111111111111", "00000", "1110111110110010011111111111"
LOW = {"min_scale": 2.0**-126}

GOLDEN = {
    "torch P1": (LOW, P1, "8 8 8 16 16 16 16 32 32 32 32 64 64"),
    "torch P2": (LOW, P2, "4 2 1 .5 .25"),
    "torch P3": (LOW, P3, "8 8 8 4 4 4 4 8 8 4 4 4 2 1 1 .5 .25 .25 .25 .25 .5 .5 .5 .5 1 1 1 1"),
    "jmp P1": ({"min_scale": 1.0}, P1, "8 8 8 16 16 16 16 32 32 32 32 64 64"),
    "jmp P2": ({"min_scale": 1.0}, P2, "4 2 1 1 1"),
    "jmp P3": ({"min_scale": 1.0}, P3, "8 8 8 4 4 4 4 8 8 4 4 4 2 1 1 1 1 1 1 1 2 2 2 2 4 4 4 4"),
    "Megatron H=2 P1": ({"min_scale": 1.0, "hysteresis": 2}, P1, "8 8 8 16 16 16 16 32 32 32 32 64 64"),
    "Megatron H=2 P2": ({"min_scale": 1.0, "hysteresis": 2}, P2, "8 4 2 1 1"),
    "Megatron H=2 P3": (
        {"min_scale": 1.0, "hysteresis": 2},
        P3,
        "8 8 8 8 8 8 8 16 16 16 16 16 8 4 4 2 1 1 1 1 2 2 2 2 4 4 4 4",
    ),
    "Megatron H=2, cumulative": ({"min_scale": 1.0, "hysteresis": 2}, "010", "8 8 4"),
    # A budget of two that a finite step refills: a single non-finite step never backs off.
    "consecutive": ({"hysteresis": 2, "consecutive_hysteresis": True}, "0101001", "8 8 8 8 8 4 4"),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_scales_are_those_recorded(case):
    options, word, scales = GOLDEN[case]
    options = {"initial_scale": 8.0, "growth_interval": 4, **options}
    recorded = np.array([float(scale) for scale in scales.split()], np.float32)
    loss_scaler, ours = LossScaler(Dynamic(**options)), []
    for letter in word:
        loss_scaler.update(Event(np.bool_(letter == "1")))
        ours.append(loss_scaler.loss_scale.numpy())
    np.testing.assert_array_equal(ours, recorded)
    np.testing.assert_array_equal(reference.dynamic(reference.word(word), **options).loss_scale[:, 0], recorded)


def test_the_defaults_are_those_documented():
    numbers = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 1}
    bounds = {"min_scale": 1 / 16384, "max_scale": 1099511627776.0}
    assert scaler.Dynamic() == scaler.Dynamic(32768.0, **numbers, **bounds, consecutive_hysteresis=False)
