"""Advice from a diagnosis: what to change, with the measured gain of each change."""

from __future__ import annotations

from loops.diagnose.doctor.diagnosis import Diagnosis
from loops.diagnose.doctor.pipeline import Pipeline
from loops.diagnose.doctor.timing import PairedTiming
from loops.diagnose.doctor.trials import Kind, Trial

_SHARE = 0.05
"""The smallest share of a step's time, or of the steps, that is worth a sentence."""


def advice(found: Diagnosis) -> list[str]:
    """The advice as sentences: the largest gain first, memory last. Empty if nothing is worth changing."""
    faster = sorted((one for one in found.trials if _worth_it(one.turns)), key=_ratio)
    lines = [f"{one.name}: {_gain(one)}. To use it: {one.advice}." for one in faster]
    if found.pipeline:
        lines += _of_pipeline(found.pipeline, prefetched=any(one.kind is Kind.PREFETCH for one in faster))
    if (
        found.casts
        and found.policy.startswith("mixed_")
        and found.casts.milliseconds.median > _SHARE * found.step.median
    ):
        share = found.casts.milliseconds.median / found.step.median
        lines.append(
            f"casts: {found.casts.count} per step write {found.casts.bytes / 1e6:.3g} MB, which alone takes "
            f"{share:.0%} of the step's time. 16-bit weights with float32 masters need fewer: use the policy "
            f"{found.policy.removeprefix('mixed_')!r}."
        )
    odd = found.padded
    if odd and _worth_it(odd.turns):
        lines.append(
            f"shapes: layer {odd.layer!r} multiplies {_sides(odd.sides)} in {odd.dtype}; {_sides(odd.rounded)} takes "
            f"{odd.turns.ratio.median:.2f} times the time. Choose multiples of 8, if you can choose the sizes."
        )
    return lines + _of_memory(found)


def _of_pipeline(pipeline: Pipeline, *, prefetched: bool) -> list[str]:
    lines = []
    if pipeline.turns.verdict == "slower" and pipeline.share > _SHARE and not prefetched:
        lines.append(
            f"the input pipeline: it takes {pipeline.share:.0%} of a step, and prefetch alone does not hide it. Cache "
            "constant parts with .cache(), and map with num_parallel_calls=tf.data.AUTOTUNE, after .batch() if the "
            "function can take batches."
        )
    if pipeline.attempted and pipeline.skipped > _SHARE * pipeline.attempted:
        lines.append(
            f"skips: {pipeline.skipped} of {pipeline.attempted} steps moved no weight, and took their full time. "
            "`halfstep explain` says why; loops.observe.find_scale finds a first loss scale."
        )
    return lines


def _of_memory(found: Diagnosis) -> list[str]:
    own = found.footprints[0]
    lines = []
    least = min(found.footprints[1:], key=lambda one: one.all.total, default=own)
    if least.all.total < (1 - _SHARE) * own.all.total:
        what = " with masters" if least.policy in ("float16", "bfloat16") else ""
        lines.append(
            f"memory: {least.policy}{what} would need {least.all.total / own.all.total:.0%} of what {own.policy} needs."
        )
    with_it = own.total_recomputed
    if with_it is not None and with_it < (1 - _SHARE) * own.all.total:
        price = next((one for one in found.trials if one.kind is Kind.RECOMPUTE and one.turns), None)
        time = f", at {price.turns.ratio.median:.2f} times the time" if price and price.turns else ""
        lines.append(f"memory: gradient checkpointing would need {with_it / own.all.total:.0%} of it{time}.")
    return lines


def _worth_it(turns: PairedTiming | None) -> bool:
    return turns is not None and turns.verdict == "faster" and turns.ratio.median < 1 - _SHARE


def _gain(trial: Trial) -> str:
    assert trial.turns is not None
    ratio = trial.turns.ratio
    return f"{ratio.median:.2f} times the time ({ratio.low:.2f} to {ratio.high:.2f})"


def _ratio(trial: Trial) -> float:
    return trial.turns.ratio.median if trial.turns else 1.0


def _sides(sides: tuple[int, ...]) -> str:
    rows, inner, columns = sides
    return f"({rows}, {inner}) by ({inner}, {columns})"
