"""The result of measuring an effect, as plain values for JSON."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import scaler


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence about the measurement, and whether the numbers support it.

    Attributes:
        text: The claim, in words.
        holds: Whether it holds in this run: always computed from the numbers. None if they cannot tell, as where what
            is published is less than these seeds could show.
        published: Whether somebody published it. Otherwise it is a finding of ours, with which nothing can agree.
    """

    text: str
    holds: bool | None
    published: bool = True

    @property
    def verdict(self) -> str:
        """The words in front of the claim."""
        if self.holds is None:
            return "Cannot tell"
        if self.published:
            return "Agrees" if self.holds else "Disagrees"
        return "Ours" if self.holds else "Ours, refuted"


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve with its spread over seeds.

    Attributes:
        label: The text in the legend.
        x: Positions, ascending.
        y: Means over the seeds, one for each position; None where there is none.
        low: The least of the seeds.
        high: The greatest of the seeds.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes of the figure.

    Attributes:
        title: The title above the axes.
        x_label: The label of the x axis, with the unit.
        y_label: The label of the y axis, with the unit.
        lines: The curves.
        log_x: The base of a logarithmic axis, or 0 for a linear one.
        log_y: The base of the y axis, likewise.
        reference: The height and label of a dashed horizontal line; None for no line.
        ticks: Words at the positions 0, 1, 2, ... instead of numbers; empty for numbers.
        bounds: The positions and labels of dashed vertical lines; a label is about what lies to their left.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: float = 0
    log_y: float = 0
    reference: tuple[float, str] | None = None
    ticks: tuple[str, ...] = ()
    bounds: tuple[tuple[float, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Effect:
    """One published effect, measured here.

    Attributes:
        name: The name on the command line.
        title: The title of its page.
        question: The question, and the answer, in two sentences.
        published: The paper's result, with its figure and address, or a note that there is no paper.
        design: How it was measured, with the sizes.
        seeds: The number of seeds.
        steps: The steps of each run.
        beside: The comparison with the paper: rows of the quantity, the published figure, and ours, as text.
        columns: The headings of the table.
        rows: The cells of the table, as text.
        claims: Whether direction and order of magnitude agree with the published ones, claim by claim.
        remarks: Explanations, and caveats last.
        panels: The panels of the figure.
        measured: The numbers behind the table: a list over the seeds for each.
        seconds: How long the measurement took; `measure` sets it.
    """

    name: str
    title: str
    question: str
    published: str
    design: str
    seeds: int
    steps: int
    beside: tuple[tuple[str, str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    claims: tuple[Claim, ...]
    remarks: str
    panels: tuple[Panel, ...]
    measured: Mapping[str, Sequence[float]]
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An effect that can be run.

    Attributes:
        name: The name on the command line.
        summary: The question, in a few words.
        steps: The default number of steps of a run.
        run: Measures the effect, given the numbers of seeds and steps.
        seeds: The default number of seeds.
    """

    name: str
    summary: str
    steps: int
    run: Callable[[int, int], Effect]
    seeds: int = 3


PARTS = {"Published": "published", "Method": "design", "Remarks": "remarks"}
"""The headings of an effect's text and page, and what an `Effect` calls them."""


def described(name: str, **words: object) -> dict[str, str]:
    """What `NAME.md` beside this file says of an effect, as arguments of `Effect`: its title, its question and so on.

    Args:
        name: Its name.
        words: The values of the names in braces.
    """
    text = pathlib.Path(__file__).with_name(f"{name}.md").read_text(encoding="utf-8").removeprefix("# ")
    start, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    title, _, question = start.partition("\n")
    headed = (part.partition("\n") for part in parts)
    found = {"title": title, "question": question, **{PARTS[heading]: body for heading, _, body in headed}}
    return {"name": name, **{part: _flowing(body).format(**words) for part, body in found.items()}}


def _flowing(text: str) -> str:
    """Paragraphs without the ends of their lines."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def to_values(effect: Effect) -> dict[str, Any]:
    """An effect as values for JSON."""
    return dataclasses.asdict(effect)


def from_values(values: Mapping[str, Any]) -> Effect:
    """The effect from the values that `to_values` returned, also after a round trip through JSON.

    Raises:
        scaler.InvalidArgument: For values in another form.
    """
    try:
        if not re.fullmatch(r"[\w-]+", values["name"]):
            # The page and the figure are files of that name.
            raise TypeError(f"name {values['name'][:40]!r}")
        panels = tuple(map(_panel, values["panels"]))
        claims = tuple(Claim(**claim) for claim in values["claims"])
        tables = {name: tuple(map(tuple, values[name])) for name in ("beside", "rows")}
        return Effect(**{**values, **_tuples(values, "columns"), **tables, "claims": claims, "panels": panels})
    except (KeyError, TypeError) as error:
        raise scaler.InvalidArgument(
            f"these are not the values of an effect ({error!r}): run python -m benchmarks.effects."
        ) from error


def curve(label: str, x: Sequence[float] | np.ndarray, by_seed: np.ndarray) -> Line:
    """A curve of values [positions, seeds]; values that are not finite are left out."""

    def known(values: np.ndarray) -> tuple[float | None, ...]:
        return tuple(float(f"{value:.6g}") if np.isfinite(value) else None for value in values)

    by_seed = np.asarray(by_seed, np.float64)
    return Line(
        label,
        tuple(float(position) for position in x),
        known(by_seed.mean(axis=1)),
        known(by_seed.min(axis=1)),
        known(by_seed.max(axis=1)),
    )


def course_of(label: str, by_step: np.ndarray, points: int = 120) -> Line:
    """A curve over the steps of a run [steps, seeds], thinned to `points` points."""
    at = np.unique(np.linspace(0, len(by_step) - 1, points).astype(int))
    return curve(label, at + 1, np.asarray(by_step)[at])


def spread(values: Any, form: str = ".3g", unit: str = "") -> str:
    """A mean with the least and the greatest of the seeds, and the unit once: "52 % (50–55)"."""
    values = np.asarray(values, np.float64).ravel()
    return with_range(*(f"{value:{form}}" for value in (values.mean(), values.min(), values.max())), unit=unit)


def with_range(mean: str, low: str, high: str, unit: str = "") -> str:
    """A mean with its unit, and the least and the greatest in brackets if they differ."""
    if low == high:
        return mean + unit
    # A dash beside a sign would read as another sign.
    between = " to " if set("+-") & set(low + high) else "–"
    return f"{mean}{unit} ({low}{between}{high})"


def percent(values: Any, form: str = ".1f") -> str:
    """Shares as percentages, as `spread` writes them."""
    return spread(100 * np.asarray(values, np.float64), form, " %")


def _panel(values: Mapping[str, Any]) -> Panel:
    bounds = tuple(map(tuple, values["bounds"]))
    lines = tuple(map(_line, values["lines"]))
    return Panel(**{**values, **_tuples(values, "reference", "ticks"), "lines": lines, "bounds": bounds})


def _line(values: Mapping[str, Any]) -> Line:
    return Line(**{**values, **_tuples(values, "x", "y", "low", "high")})


def _tuples(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: None if values[name] is None else tuple(values[name]) for name in names}
