"""The result of measuring an effect, as plain values for JSON: its text and the numbers in it."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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
"""The headings of an effect's page, and what an `Effect` calls them."""


def written(name: str) -> dict[str, Any]:
    """What `NAME.toml` beside this file says of an effect."""
    return tomllib.loads(pathlib.Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


class Found(NamedTuple):
    """What a run found.

    Attributes:
        words: The values of the names in braces.
        rows: The cells of the table, each as the form of its column says; text is text already.
        holds: Whether each claim holds, by its key: where all values do. None if they cannot tell.
        lines: The curves of each panel.
        measured: The numbers behind the table.
    """

    words: Mapping[str, Any]
    rows: Iterable[Sequence[Any]]
    holds: Mapping[str, Any]
    lines: Sequence[Sequence[Line]]
    measured: Mapping[str, Sequence[float]]


def told(name: str, seeds: int, steps: int, found: Found) -> Effect:
    """An effect: the text of `NAME.toml` with the numbers of a run."""
    words = {"seeds": seeds, "steps": steps, **found.words}
    text = _Text(name, words)
    parts, forms = text.written, text.written["columns"].values()
    return Effect(
        **{part: text.filled(parts[part]) for part in ("title", "question", *PARTS.values())},
        name=name,
        seeds=seeds,
        steps=steps,
        beside=tuple(tuple(map(text.filled, row)) for row in parts["beside"]),
        columns=tuple(map(text.filled, parts["columns"])),
        rows=tuple(tuple(text.cell(*each) for each in zip(row, forms, strict=True)) for row in found.rows),
        claims=claims_of(name, found.holds, words),
        panels=tuple(text.panel(*each) for each in zip(parts["panels"], found.lines, strict=True)),
        measured=found.measured,
    )


def claims_of(name: str, holds: Mapping[str, Any], words: Mapping[str, Any]) -> tuple[Claim, ...]:
    """What `NAME.toml` claims, with the verdicts and words of `Found`.

    Raises:
        KeyError: For claims of which only the text or only the verdict is there.
    """
    text = _Text(name, words)
    claims = text.written["claims"]
    if without := claims.keys() ^ holds.keys():
        raise KeyError(f"{name}: claims without a text or a verdict: {sorted(without)}")
    verdicts = {key: None if holds[key] is None else bool(np.all(holds[key])) for key in claims}
    return tuple(
        Claim(text.filled(said), verdicts[key], kind == "published")
        for key, claim in claims.items()
        for kind, said in claim.items()
    )


class _Text(string.Formatter):
    """The text of `NAME.toml`. A name in braces is one of the words of a run or a constant of `NAME.py`.

    An array has its mean with the least and the greatest, and "%" after a form makes percent. Where a panel has a name
    in place of ticks, bounds or the height of its reference, these are that word.
    """

    def __init__(self, name: str, words: Mapping[str, Any]):
        self.written = written(name)
        self._known = {**vars(sys.modules[f"{__package__}.{name.replace('-', '_')}"]), **words}

    def filled(self, form: str) -> str:
        """Text with its braces filled in; the lines of one that ends with a line flow into each other."""
        return self.vformat(flowing(form), (), self._known)

    def format_field(self, value: Any, form: str) -> str:
        if form.endswith("%"):
            return percent(value, form[:-1])
        return spread(value, form or ".3g") if isinstance(value, np.ndarray) else super().format_field(value, form)

    def cell(self, value: Any, form: str) -> str:
        """The text of a cell in a column of this form."""
        return value if isinstance(value, str) else self.format_field(value, form)

    def panel(self, panel: dict[str, Any], lines: Sequence[Line]) -> Panel:
        """A panel as it is written, with its curves."""
        height, said = panel.get("reference", (None, ""))
        return Panel(
            **{key: self.filled(panel[key]) for key in ("title", "x_label", "y_label")},
            lines=tuple(lines),
            log_x=panel.get("log_x", 0),
            log_y=panel.get("log_y", 0),
            reference=None if height is None else (float(np.mean(self._named(height))), self.filled(said)),
            ticks=tuple(map(self.filled, self._named(panel.get("ticks", ())))),
            bounds=tuple((at, self.filled(said)) for at, said in self._named(panel.get("bounds", ()))),
        )

    def _named(self, value: Any) -> Any:
        return self._known[value] if isinstance(value, str) else value


def flowing(text: str) -> str:
    """Paragraphs without the ends of their lines; what does not end a line stays as it is."""
    if not text.endswith("\n"):
        return text
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


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


def curves(x: Sequence[float] | np.ndarray, by_label: Mapping[str, Any]) -> tuple[Line, ...]:
    """A curve for each label, of values [positions, seeds]."""
    return tuple(curve(label, x, values) for label, values in by_label.items())


def flat(values: Any, *axes: Iterable[object], name: tuple[object, ...] = ()) -> dict[str, list[float]]:
    """Arrays [axis, ..., seeds] as lists over the seeds, named after their keys and their place on each axis.

    Args:
        values: An array, or a mapping of such or of mappings; a key may be a tuple of names.
        axes: The names of the places on each axis before the seeds.
        name: The names before.
    """
    if isinstance(values, Mapping):
        keyed = ((key if isinstance(key, tuple) else (key,), each) for key, each in values.items())
        return {at: seeds for key, each in keyed for at, seeds in flat(each, *axes, name=(*name, *key)).items()}
    places = list(itertools.product(*axes))
    by_place = zip(places, np.reshape(values, (len(places), -1)), strict=True)
    return {" ".join(map(str, (*name, *place))): seeds.tolist() for place, seeds in by_place}


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
