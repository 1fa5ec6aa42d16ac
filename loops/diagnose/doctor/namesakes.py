"""Finds other installed distributions with a package of the same name as ours, of which Python imports only one."""

from __future__ import annotations

from importlib import metadata

OURS = ("scaler", "loops", "halfstep")


def namesakes() -> list[dict[str, str]]:
    """The conflicting packages, each with `package`, `distribution`, `version` and `advice`, a sentence."""
    found = []
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name != "halfstep":
            for package in sorted(_packages(distribution).intersection(OURS)):
                entry = {"package": package, "distribution": name, "version": version}
                found.append({**entry, "advice": _advice(**entry)})
    return found


def _packages(distribution: metadata.Distribution) -> set[str]:
    """The top-level packages of a distribution: from its metadata, or else from its files."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    return set(listed or (file.parts[0] for file in distribution.files or () if len(file.parts) > 1))


def _advice(package: str, distribution: str, version: str) -> str:
    return (
        f"The distribution {distribution} {version} also installs a top-level package {package!r}. Both write into one "
        f"folder, so halfstep or {distribution} is damaged: use separate environments, or uninstall both and install "
        "halfstep again."
    )
