"""Follows a run until it ends or the watcher stops, in one line for a pipe, a few for a terminal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable

import numpy as np
import rich.console
import rich.live
import rich.text

from loops.record.files import check_run
from loops.support.part_names import named
from loops.support.text import amount
from loops.views.watch.progress import LiveRun

_POLL = 0.5
"""Seconds between two reads."""
_LINE = 10.0
"""Seconds between two lines of output without a terminal."""
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=*#"
_SLOW = 30.0
"""Seconds without a new step after which the panel says so."""
_OTHER_TRACE = "its trace is of another run, and left out"


def watch(
    run: str | os.PathLike, console: rich.console.Console | None = None, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Shows a run that another process trains, until it has ended.

    It has ended once `halfstep train` has written its summary, or ten seconds after the last step if the newest
    checkpoint is complete and no process holds the run's lock. A run with checkpoints that was stopped or killed may be
    resumed, and is waited for. A run without checkpoints has ended if no action holds a lock in the folder, and there
    was no new step for half a minute.

    It reads the log and the trace that the run appends to, and writes nothing. On a terminal it redraws a few lines;
    elsewhere it prints a line every ten seconds, and one at the end.

    Args:
        run: The folder of the run, which may still be empty.
        console: The console to write to (default: standard output).
        sleep: Waits for a number of seconds.

    Raises:
        scaler.InvalidArgument: If there is no such folder.
        LoopError: If the folder holds several logs or traces and none has the usual name.
    """
    place = check_run(run, hint=", once the run was started")
    console = console or rich.console.Console()
    course = LiveRun(place)
    if console.is_terminal and not console.is_dumb_terminal:
        _redraw(course, place.resolve().name, console, sleep)
    else:
        _print(course, console, sleep)


def _redraw(course: LiveRun, name: str, console: rich.console.Console, sleep: Callable[[float], object]) -> None:
    blocks = "utf" in (console.encoding or "").lower()
    with rich.live.Live(console=console, auto_refresh=False) as live:
        while True:
            course.look()
            live.update(panel(course, name, console.width, blocks=blocks), refresh=True)
            if course.ended:
                return
            sleep(_POLL)


def _print(course: LiveRun, console: rich.console.Console, sleep: Callable[[float], object]) -> None:
    said, waited = "", _LINE
    while True:
        course.look()
        text = line(course)
        if course.ended or (waited >= _LINE and text != said):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            said, waited = text, 0.0
        if course.ended:
            return
        sleep(_POLL)
        waited += _POLL


def line(course: LiveRun) -> str:
    """The state in one line."""
    if not course.step:
        return "waiting for the first step"
    parts = [f"step {course.step}", f"applied {course.attempted - course.skips.total()}", f"skipped {_skipped(course)}"]
    parts += [f"{named('scale', part)} {values[-1]:g}" for part, values in course.scales.items()]
    parts += [f"{named('loss', part)} {_loss(values[-1])}" for part, values in course.losses.items()]
    if course.margin:
        parts.append(f"headroom {_octaves(course)}")
    if not math.isnan(course.rate):
        parts.append(f"{course.rate:.3g} steps/s")
    if course.ended:
        parts.append(_ended(course.summary or {}))
    if course.other_trace:
        parts.append(_OTHER_TRACE)
    return "  ".join(parts)


def panel(course: LiveRun, name: str, width: int, *, blocks: bool) -> rich.text.Text:
    """The state in a few lines, with small curves.

    Args:
        course: The run so far.
        name: The run's name.
        width: Columns of the terminal.
        blocks: Whether the terminal shows characters beyond ASCII.
    """
    text = rich.text.Text(no_wrap=True, overflow="ellipsis")
    text.append(name, "bold")
    text.append(f"  {_state(course)}\n", "dim")
    if not course.step:
        return text
    room = max(10, min(60, width - 40))
    rows = [("step", f"{course.step:,}", "")]
    for part, values in course.losses.items():
        rows.append((named("loss", part), _loss(values[-1]), spark(_log(values), room, blocks=blocks)))
    for part, values in course.scales.items():
        rows.append((named("loss scale", part), f"{values[-1]:g}", spark(_log(values), room, blocks=blocks)))
    if course.margin:
        rows.append(("headroom", _octaves(course), spark(course.margin, room, blocks=blocks)))
    wide = max(12, *(len(label) + 1 for label, _, _ in rows))
    for label, value, curve in rows:
        text.append(f"  {label:{wide}}", "dim")
        text.append(f"{value:22}")
        text.append(f"{curve}\n", "cyan")
    text.append(f"  {'skipped':{wide}}", "dim")
    text.append(_skipped(course), "yellow" if course.skips else "")
    if course.skips:
        text.append(f"  last at step {course.last_skip:,}", "dim")
    if course.other_trace:
        text.append(f"\n  {_OTHER_TRACE}", "yellow")
    return text


def spark(values: Iterable[float], width: int, *, blocks: bool) -> str:
    """A curve in one line of text, from the lowest to the highest value; a blank where no value is finite."""
    marks = _BLOCKS if blocks else _ASCII
    found = np.array(list(values), np.float64)
    parts = np.array_split(found, min(width, len(found))) if len(found) else []
    means = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts])
    known = means[~np.isnan(means)]
    if not len(known):
        return ""
    low, spread = known.min(), np.ptp(known)
    places = np.nan_to_num((means - low) / spread if spread else np.zeros_like(means)) * (len(marks) - 1)
    return "".join(" " if np.isnan(mean) else marks[round(place)] for mean, place in zip(means, places, strict=True))


def _ended(summary: dict) -> str:
    """How a run ended, in words."""
    for name, form in (("accuracy", "accuracy {:.1%}"), ("perplexity", "perplexity {:.3f}")):
        if isinstance(summary.get(name), (int, float)):
            return f"ended, {form.format(summary[name])}"
    return "ended"


def _state(course: LiveRun) -> str:
    if course.ended:
        return _ended(course.summary or {})
    if not course.step:
        return "waiting for the first step"
    if course.quiet > _SLOW:
        return f"no new step for {course.quiet:.0f} seconds"
    return "" if math.isnan(course.rate) else f"{course.rate:.3g} steps/s"


def _skipped(course: LiveRun) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in course.skips.most_common() if cause != "unknown")
    of = f" of {amount(course.logged, 'logged step')}" if course.logged < course.step else ""
    return str(course.skips.total()) + of + (f" ({causes})" if causes else "")


def _octaves(course: LiveRun) -> str:
    last = course.margin[-1]
    return amount(last, "octave", "g") if math.isfinite(last) else "none: no scale helps"


def _loss(last: float) -> str:
    return f"{last:.4g}" if math.isfinite(last) else "not finite"


def _log(values: Iterable[float]) -> np.ndarray:
    found = np.array(list(values), np.float64)
    positive = found[np.isfinite(found)]
    return np.log(found) if len(positive) and positive.min() > 0 else found
