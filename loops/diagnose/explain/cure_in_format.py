"""Finds the fewest layers that must stay out of a narrower format at a past step, measured by the step's gradients."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import scaler
from loops.diagnose.advice import without_advice
from loops.diagnose.explain.attempts import Attempts
from loops.diagnose.explain.examples import minimal
from loops.diagnose.explain.explain import Progress, attempt_progress, replay_progress
from loops.diagnose.explain.gradients_in_format import GradientsInFormat, Moved
from loops.loop.loop import Loop
from loops.run.rewind.rewind import rewind
from loops.support.errors import LoopError


@dataclasses.dataclass(frozen=True)
class FormatCure:
    """Which layers may compute in a format at a step, and which must not.

    Gradients about which different loss scalers decide, such as those of the parts of a `loops.ComposedStep`, are
    judged apart, each by its own norm and noise. Then each number here is that of the gradients that it moves the
    nearest to their limit, or the furthest beyond it.

    Attributes:
        format: The format of weights and activations.
        left_out: The paths of the layers that must stay out of it, in the order of the model.
        inside: The paths of those that may be in it together.
        error: How far those move the gradients of all weights, over their norm.
        noise: How far the gradients of one batch lie from those of the data, about, over their norm.
        limit: How far they may move: the noise, but by no more than half of the norm.
        alone: How far each layer alone moves them, by path.
        may_alone: Of those left out the ones that may be in it if no other layer is.
        parts: If there are several scalers, the same numbers for each, by its part or its name.
        joint: The names of the parts about which one scaler decides, if there are several.
        not_tried: Layers that the step does not show, by path, with a sentence that says why.
        models: The names with which paths begin, if there are several models.
    """

    format: str
    left_out: list[str]
    inside: list[str]
    error: float
    noise: float
    limit: float
    alone: dict[str, float]
    may_alone: list[str] = dataclasses.field(default_factory=list)
    parts: dict[str, PartInFormat] = dataclasses.field(default_factory=dict)
    joint: list[str] = dataclasses.field(default_factory=list)
    not_tried: dict[str, str] = dataclasses.field(default_factory=dict)
    models: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class PartInFormat:
    """What a format does to the gradients about which one of several scalers decides; as in a `FormatCure`.

    Attributes:
        error: How far the layers that are inside together move these gradients, over their norm.
        noise: Their noise.
        limit: How far they may move.
        alone: How far each layer alone moves them, by path.
    """

    error: float
    noise: float
    limit: float
    alone: dict[str, float]


@without_advice()
def find_format_cure(
    loop: Loop,
    step: int,
    format: str,
    *,
    run: str | os.PathLike | None = None,
    progress: Progress = lambda text: None,
) -> FormatCure:
    """Finds a smallest set of layers to leave out, so that the others may compute in a format at this step.

    They may if their rounding moves the step's gradients by no more than the noise of the batch does, and by less than
    half of their norm. The noise is the deviation of the gradients of up to five neighbouring batches. Every float16
    layer computes in float32, and delayed scaling is measured as current scaling. Gradients of several scalers are
    judged apart: none may move too far. A layer that the step does not call, or whose part does not have its turn, is
    neither in nor out.

    Args:
        loop: The loop of the run, before its first step.
        step: The number of the step, from 1.
        format: As of `scaler.formats.emulated`.
        run: The folder with the log `steps.jsonl`, if the loop has no `JsonLines`.
        progress: Called now and then with a text that says what is done.

    Raises:
        scaler.InvalidArgument: For another format, a step that the run did not take, or a model without such layers.
        LoopError: If the run cannot be restored, or the step's gradients cannot be compared.
    """
    emulated = scaler.formats.emulated(format)
    moment = rewind(loop, step, run=None if run is None else pathlib.Path(run), progress=replay_progress(progress))
    gradients = GradientsInFormat(Attempts(moment, attempt_progress(progress)), emulated)
    if not gradients.paths:
        reasons = " ".join(dict.fromkeys(gradients.not_tried.values()))
        raise LoopError(f"step {step}: no layer can be tried in {format}. {reasons}")
    found = _Found(gradients)
    # What is NaN is not within the limit.
    left_out = minimal(gradients.paths, lambda chosen: found.may(_others(gradients.paths, chosen))) or []
    inside = _others(gradients.paths, left_out)
    together, alone = found.worst(inside), {path: found.worst([path]) for path in gradients.paths}
    return FormatCure(
        format,
        left_out,
        inside,
        together.error,
        together.noise,
        together.limit,
        {path: one.error for path, one in alone.items()},
        [path for path in left_out if found.may([path])],
        found.parts(inside),
        gradients.joint,
        gradients.not_tried,
        gradients.prefixes,
    )


def _others(paths: Sequence[str], left_out: Sequence[str]) -> list[str]:
    return [path for path in paths if path not in left_out]


class _Found:
    """What sets of layers do to the gradients, each measured once.

    Args:
        gradients: Those of the step.
    """

    def __init__(self, gradients: GradientsInFormat):
        self._gradients = gradients
        self._known: dict[frozenset[str], Mapping[str, Moved]] = {}

    def moved(self, inside: Sequence[str]) -> Mapping[str, Moved]:
        """How far each of the gradients that are judged apart moves if these layers are inside."""
        key = frozenset(inside)
        if key not in self._known:
            self._known[key] = self._gradients.moved(key)
        return self._known[key]

    def may(self, inside: Sequence[str]) -> bool:
        """Whether none moves too far."""
        return all(one.error <= one.limit for one in self.moved(inside).values())

    def worst(self, inside: Sequence[str]) -> Moved:
        """That which comes nearest to its limit, or lies the furthest beyond it."""
        return max(self.moved(inside).values(), key=_strain)

    def parts(self, inside: Sequence[str]) -> dict[str, PartInFormat]:
        """Each by itself, if there are several."""
        together = self.moved(inside)
        if len(together) < 2:
            return {}
        alone = {path: self.moved([path]) for path in self._gradients.paths}
        return {
            name: PartInFormat(
                one.error, one.noise, one.limit, {path: found[name].error for path, found in alone.items()}
            )
            for name, one in together.items()
        }


def _strain(one: Moved) -> float:
    if math.isnan(one.error):
        return math.inf
    return one.error / one.limit if one.limit else math.inf if one.error else 0.0
