"""How the README becomes the page of the package index, where a path of the repository leads nowhere."""

from __future__ import annotations

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
"""An image or a link to a file of the repository: its mark, text, path and anchor."""


class Readme(MetadataHookInterface):
    """Hands the README to the metadata of wheel and sdist."""

    def update(self, metadata: dict) -> None:
        """Sets `readme`, which pyproject.toml calls dynamic."""
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        text = outside(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def outside(text: str, repository: str, tag: str) -> str:
    """Makes links to files hold outside of the repository: they lead to those of a tag, or become their text.

    Args:
        text: Markdown.
        repository: The address of the repository, or nothing if it has none. Then images are left out.
        tag: The tag of the release.
    """

    def held(match: re.Match) -> str:
        mark, said, path, anchor = match.groups(default="")
        if not repository:
            return "" if mark else said
        return f"{mark}[{said}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/{tag}/{path}{anchor})"

    return re.sub(r"\n{3,}", "\n\n", LINK.sub(held, text))
