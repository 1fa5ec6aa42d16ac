"""Other installed distributions that have a package of one of our names, which Python can import only once."""

from __future__ import annotations

from importlib import metadata

OURS = ("scaler", "loops", "halfstep")


def namesakes() -> list[dict[str, str]]:
    """Each with `package`, `distribution`, `version` and `advice`, a sentence."""
    found = []
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name != "halfstep":
            for package in sorted(_packages(distribution).intersection(OURS)):
                entry = {"package": package, "distribution": name, "version": version}
                found.append({**entry, "advice": _advice(**entry)})
    return found


def _packages(distribution: metadata.Distribution) -> set[str]:
    """Its top-level packages: as it says itself, else by its files."""
    said = (distribution.read_text("top_level.txt") or "").split()
    return set(said or (file.parts[0] for file in distribution.files or () if len(file.parts) > 1))


def _advice(package: str, distribution: str, version: str) -> str:
    return (
        f"The distribution {distribution} {version} also installs a top-level package {package!r}. Both write into one "
        f"folder, so that halfstep or {distribution} is damaged: use an environment for each, or uninstall both and "
        "install halfstep again."
    )
