"""Pages that need no other file: one frame, one style sheet and one way to escape for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jinja2

from loops.support.palette import DARK_PAGE, LIGHT_PAGE


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        heads: Of the columns.
        rows: As many cells each; the first is the head of its row.
        caption: "" for none.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def render(package: str, template: str, **values: Any) -> str:
    """A page from a template that extends `base.html`. Text is escaped, unless it is `markupsafe.Markup`.

    Args:
        package: The one that the template lies in.
        template: Its file.
        values: What the template names.
    """
    loaders = [jinja2.PackageLoader(package, ""), jinja2.PackageLoader(__name__, "")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(template).render(light=LIGHT_PAGE, dark=DARK_PAGE, **values)
