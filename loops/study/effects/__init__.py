"""Published effects of number formats in training, measured again: one module for each effect."""

from __future__ import annotations

import dataclasses
import time

import scaler
from loops.study.effects import (
    attention_logits,
    chunked_sums,
    float8,
    flushed_part,
    lag,
    layerwise,
    log_normal,
    look_ahead,
    narrow_parity,
    output_logits,
    scale_collapse,
    second_graph,
    sixteen_bit_weights,
    skip_rate,
    spikes,
    static_scale,
    stochastic_rounding,
    underflow,
    unit_scaling,
    updated_scale,
)
from loops.study.effects.effect import Effect as Effect
from loops.study.effects.effect import Preset as Preset
from loops.support.checks import check_count

PRESETS = tuple(
    module.PRESET
    for module in (
        underflow,
        log_normal,
        static_scale,
        sixteen_bit_weights,
        stochastic_rounding,
        chunked_sums,
        second_graph,
        skip_rate,
        look_ahead,
        updated_scale,
        layerwise,
        float8,
        narrow_parity,
        scale_collapse,
        attention_logits,
        output_logits,
        spikes,
        flushed_part,
        lag,
        unit_scaling,
    )
)
"""The effects in the order of the index: published ones, and two of ours."""


def choose(name: str) -> Preset:
    """A preset by name.

    Raises:
        scaler.InvalidArgument: For an unknown name.
    """
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise scaler.InvalidArgument(
        f"preset {name!r}: expected one of {', '.join(preset.name for preset in PRESETS)}; list shows what they "
        f"measure."
    )


def measure(preset: Preset, seeds: int | None = None, steps: int | None = None) -> Effect:
    """Runs a preset, and notes how long it took.

    Args:
        preset: One of `PRESETS`.
        seeds: The number of seeds (default: the preset's number).
        steps: The steps of each run (default: the preset's number).

    Raises:
        scaler.InvalidArgument: For numbers that are not counts, and for fewer than 10 steps, in which nothing settles.
    """
    seeds = preset.seeds if seeds is None else seeds
    check_count(f"preset {preset.name}, seeds={seeds!r}", seeds)
    steps = preset.steps if steps is None else steps
    check_count(f"preset {preset.name}, steps={steps!r}", steps, 10)
    began = time.perf_counter()
    effect = preset.run(seeds, steps)
    return dataclasses.replace(effect, seconds=round(time.perf_counter() - began, 1))
