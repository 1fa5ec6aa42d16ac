"""Files of an effect: the numbers as JSON, the figure as an SVG, and a page with both."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.effects.effect import PARTS, Claim, Effect, flowing, written
from loops.support.errors import NotWritable
from loops.support.json_values import without_nan


def write(effect: Effect, folder: str | os.PathLike) -> list[pathlib.Path]:
    """Writes `NAME.json`, `NAME.svg` and `NAME.md` into a folder, which is created if missing.

    Returns:
        The files, the page first.

    Raises:
        loops.NotWritable: If it cannot be written.
    """
    from benchmarks.effects.figure import effect_figure
    from loops.support.drawing import svg_of

    files = [pathlib.Path(folder) / f"{effect.name}.{ending}" for ending in ("md", "json", "svg")]
    drawn = svg_of(effect_figure(effect))
    check_writable(folder)
    write_text(files[0], page(effect))
    write_text(files[1], as_json(effect) + "\n")
    write_text(files[2], drawn)
    return files


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file.

    Raises:
        loops.NotWritable: With the reason.
    """
    with _said(path):
        path.write_text(text, encoding="utf-8")


def check_writable(folder: str | os.PathLike) -> None:
    """Creates a folder, and raises before anything is measured if that fails or it cannot be written.

    Raises:
        loops.NotWritable: With the reason.
    """
    place = pathlib.Path(folder)
    with _said(place):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass


@contextlib.contextmanager
def _said(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWritable(
            f"{path}: {error.strerror or error}. Choose a folder that can be written with --out."
        ) from error


def as_json(effect: Effect) -> str:
    """An effect as JSON, with null for values that are not finite."""
    return json.dumps(without_nan(dataclasses.asdict(effect)), indent=1, ensure_ascii=False)


def page(effect: Effect) -> str:
    """The page of an effect in Markdown. Each number in it comes from the effect."""
    parts = [
        f"# {effect.title}",
        effect.question,
        table(("", "published", "here"), effect.beside),
        table(*_percent_above(effect.columns, effect.rows)),
        f"![Figure]({effect.name}.svg)",
        "## Findings",
        "\n".join(f"- {_emphasized(claim)}: {claim.text}" for claim in effect.claims),
    ]
    parts += [f"**{heading}.** {getattr(effect, part)}" for heading, part in PARTS.items()]
    command = f"python -m benchmarks.effects {effect.name} --seeds {effect.seeds} --steps {effect.steps}"
    parts.append(f"`{command}` takes {effect.seconds:.0f} s: [all numbers]({effect.name}.json).")
    return "\n\n".join(parts) + "\n"


def _percent_above(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table with the sign of percent in the heading of each column where all numbers have it."""
    heads, cells = list(columns), [list(row) for row in rows]
    for at in range(len(heads)):
        numbers = [row[at] for row in rows if any(map(str.isdigit, row[at]))]
        if numbers and all(" %" in cell for cell in numbers):
            heads[at] += ", %"
            for row in cells:
                row[at] = row[at].replace(" %", "")
    return heads, cells


def _emphasized(claim: Claim) -> str:
    return f"**{claim.verdict}**" if claim.holds is False else claim.verdict


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in rows and columns as a Markdown table."""
    head, *body = (f"| {' | '.join(line)} |" for line in [columns, *rows])
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def index(effects: Sequence[Effect]) -> str:
    """The page that links to the pages of the effects."""
    rows = [(f"[{effect.title}]({effect.name}.md)", _agree(effect)) for effect in effects]
    text = written("index")
    return f"# {text['title']}\n\n{flowing(text['text'])}\n\n{table(('page', 'what agrees'), rows)}\n"


def _agree(effect: Effect) -> str:
    published = [claim.holds for claim in effect.claims if claim.published]
    told = [holds for holds in published if holds is not None]
    agree = [f"{sum(told)} of {len(told)}"] if told else []
    untold = [f"{len(published) - len(told)} cannot be told"] if len(published) > len(told) else []
    return ", ".join(agree + untold) or "nothing published to compare with"
