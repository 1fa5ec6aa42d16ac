"""The autopsy of a run in a report."""

from __future__ import annotations

import html
import shlex
from collections.abc import Callable

import scaler
from loops.diagnose.explain.explain import explain
from loops.diagnose.explain.explanation import Explanation
from loops.diagnose.explain.remedies import Remedy
from loops.record.run import Recorded
from loops.record.skips import in_words, what_is_wrong
from loops.record.summary import Digest
from loops.run.rewind.open import open_run
from loops.views.report.tables import behind, cell, table


def autopsy_of(run: Recorded, build: str | None, progress: Callable[[str], object]) -> Explanation | str:
    """What `halfstep explain` says of a run, or why it says nothing.

    Args:
        run: It has to be of a folder, with checkpoints or short enough to be taken again from its start.
        build: As for `halfstep explain --build`.
        progress: Called now and then with what is done.
    """
    try:
        return explain(open_run(run.place, build), run=run.place, progress=progress)
    except scaler.ScalerError as error:
        return str(error)


def section(run: Recorded, found: Digest, autopsy: Explanation | str | None) -> str:
    """The autopsy as HTML: what it found, why it could not be made, or the command for it; "" without trouble."""
    if autopsy is None:
        return _suggested(run, found)
    if isinstance(autopsy, str):
        return f"<h3>Autopsy</h3><p>This run cannot be explained: {html.escape(autopsy)}</p>"
    parts = ["<h3>Autopsy</h3>", f"<p>{html.escape(autopsy.sentence)}</p>"]
    if autopsy.remedies:
        # What did not help is nothing to do.
        rows = [
            [html.escape(one.name), _did(one), html.escape(one.advice) if one.helps else html.escape(one.why_not or "")]
            for one in autopsy.remedies
        ]
        parts.append(f'<div class="text">{table(["tried", "the step", "to do"], rows)}</div>')
    if autopsy.magnitudes:
        rows = [
            [html.escape(row.layer), html.escape(row.dtype), cell(row.forward), cell(row.backward)]
            for row in autopsy.magnitudes
        ]
        heads = ["layer", "computed in", "largest output", "largest gradient, scaled"]
        parts.append(behind(table(heads, rows, f"Magnitudes in step {autopsy.step}")))
    return "".join(parts)


def _suggested(run: Recorded, found: Digest) -> str:
    if not run.place or (found.health.healthy and not found.skips):
        return ""
    if found.health.healthy:
        return f"<h3>Autopsy</h3><p>Not needed: {html.escape(in_words(found.health))}.</p>"
    command = shlex.join(["halfstep", "explain", run.place, "--step", str(found.health.step)])
    return (
        f"<h3>Autopsy</h3><p>{html.escape(what_is_wrong(found.health))} What went wrong last began at step "
        f"{found.health.step:,}. <code>{html.escape(command)}"
        "</code> takes it again and says why; <code>halfstep report --explain</code> puts the answer here. Both need "
        "the run’s checkpoints, and for a program <code>--build</code>.</p>"
    )


def _did(remedy: Remedy) -> str:
    if not remedy.tried:
        return "could not be tried"
    if not remedy.finite:
        return "fails"
    said = "passes" if remedy.at_scale is None else f"passes at a loss scale of {remedy.at_scale:g}"
    return said if remedy.helps else f"{said}, no help"
