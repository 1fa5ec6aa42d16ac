"""The autopsy of a run in a report."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable

from markupsafe import Markup

import scaler
from loops.diagnose.explain.explain import explain
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import Remedy
from loops.record.run import Recorded
from loops.record.skips import in_words, not_logged, what_is_wrong
from loops.record.summary import Digest
from loops.run.rewind.open import open_run
from loops.support.pages import Table
from loops.views.report.tables import cell


def autopsy_of(run: Recorded, build: str | None, progress: Callable[[str], object]) -> Explanation | str:
    """The explanation that `halfstep explain` gives for a run, or the reason why there is none.

    Args:
        run: A run with a folder, and with checkpoints unless it is short enough to run again from its start.
        build: `MODULE:FUNCTION` that rebuilds the run's loop; None for a run of `halfstep train`.
        progress: Called now and then with a text that says what is being done.
    """
    try:
        return explain(open_run(run.place, build), run=run.place, progress=progress)
    except scaler.ScalerError as error:
        return str(error)


@dataclasses.dataclass(frozen=True)
class Section:
    """An autopsy on a page.

    Attributes:
        said: The text of the autopsy.
        tried: The remedies that were tried.
        magnitudes: The largest values of each layer.
    """

    said: str
    tried: Table | None = None
    magnitudes: Table | None = None


def section(run: Recorded, found: Digest, autopsy: Explanation | str | None) -> Section | None:
    """The autopsy's findings, why there are none, or the command for it; None if nothing went wrong."""
    if autopsy is None:
        return _suggested(run, found)
    if isinstance(autopsy, str):
        return Section(f"This run cannot be explained: {autopsy}")
    tried = magnitudes = None
    if autopsy.remedies:
        # A remedy that did not help is not worth advising.
        rows = [[one.name, _did(one), one.advice if one.helps else one.why_not or ""] for one in autopsy.remedies]
        tried = Table(["tried", "the step", "to do"], rows)
    if autopsy.magnitudes:
        rows = [[row.layer, row.dtype, cell(row.forward), cell(row.backward)] for row in autopsy.magnitudes]
        heads = ["layer", "computed in", "largest output", "largest gradient, scaled"]
        magnitudes = Table(heads, rows, f"Magnitudes in step {autopsy.step}")
    return Section(autopsy.sentence, tried, magnitudes)


def _suggested(run: Recorded, found: Digest) -> Section | None:
    if not run.place or (found.health.healthy and not found.skips):
        return None
    if found.health.healthy and not found.health.sure:
        return Section(f"The log shows nothing wrong: {in_words(found.health)}. {not_logged(found.health)}".rstrip())
    if found.health.healthy:
        return Section(f"Not needed: {in_words(found.health)}.")
    said = Markup(
        "{} What went wrong last began at step {}. <code>{}</code> takes it again and says why; <code>halfstep report "
        "--explain</code> puts the answer here. Both need the run’s checkpoints, and for a program "
        "<code>--build</code>."
    )
    command = shlex.join(["halfstep", "explain", run.place, "--step", str(found.health.step)])
    return Section(said.format(what_is_wrong(found.health), f"{found.health.step:,}", command))


def _did(remedy: Remedy) -> str:
    if not remedy.tried:
        return "could not be tried"
    if not remedy.finite:
        return "fails"
    said = "passes" if remedy.at_scale is None else f"passes at a loss scale of {remedy.at_scale:g}"
    return said if remedy.helps else f"{said}, no help"
