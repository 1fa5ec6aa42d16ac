"""Prints what a person has to push for the release that is built in a folder, or what the release still lacks."""

from __future__ import annotations

import email
import pathlib
import re
import subprocess
import sys
import zipfile
from email.message import Message

ROOT = pathlib.Path(__file__).parents[2]


def metadata(wheel: pathlib.Path) -> Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def lacking(found: Message, changelog: str, changed: str) -> list[str]:
    """What the release lacks, in sentences.

    Args:
        found: The metadata of the wheel.
        changelog: The text of CHANGELOG.md.
        changed: The files that differ from the last commit, as `git status --porcelain` lists them.
    """
    newest = re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## )", changelog, re.MULTILINE | re.DOTALL)
    said = []
    if newest is None or newest[1] != found["Version"]:
        said.append(f"CHANGELOG.md has no dated heading for {found['Version']} at its top.")
    if unreleased and unreleased[1].strip():
        said.append("CHANGELOG.md has lines under Unreleased.")
    if not found.get_all("Project-URL"):
        said.append(
            "pyproject.toml has no [project.urls], so that the README's links are left out on the index's page."
        )
    if changed.strip():
        said.append("Some files are not committed.")
    return said


def main(folder: str) -> int:
    """Prints it, and returns 1 if anything is lacking."""
    (wheel,) = pathlib.Path(folder).glob("*.whl")
    found = metadata(wheel)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    said = lacking(found, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), status.stdout)
    if said:
        print("Not yet a release:", *said, sep="\n    ")
        return 1
    tag = f"v{found['Version']}"
    print(f"{wheel.stem} is checked. What is left for a person:")
    print(f'    git tag --annotate {tag} --message "Halfstep {found["Version"]}"\n    git push origin {tag}')
    print(f"    .venv/bin/twine upload {folder}/*    # where no workflow publishes the tag")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
