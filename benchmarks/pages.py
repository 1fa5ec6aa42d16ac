"""What benchmarks found, from their JSON, as tables of a page."""

from __future__ import annotations


def figures(entries: list[dict]) -> list[str]:
    """Figures beside their targets."""
    return ["| figure | median | quartiles | target | |", "|---|---|---|---|---|", *map(_figure, entries)]


def contenders(title: str, found: dict) -> list[str]:
    """The times of a case, or what else is known of it."""
    if "contenders" not in found:
        return [f"- {title}: {', '.join(f'{key} {value}' for key, value in found.items())}"]
    rows = [f"| {title} | median ms | ratio to {found['reference']} |", "|---|---|---|"]
    for name, seen in found["contenders"].items():
        rows.append(f"| {name} | {seen['median_ms']:.2f} | {seen['ratio']:.2f} |")
    return ["", *rows, ""]


def _figure(entry: dict) -> str:
    quartiles = "" if entry["quartiles"] is None else " to ".join(f"{value:.2f}" for value in entry["quartiles"])
    target = "" if entry["target"] is None else f"{'≥' if entry['at_least'] else '≤'} {entry['target']:g}"
    verdict = {None: "", True: "reached", False: "missed"}[entry["reached"]]
    return f"| {entry['name']} | {entry['value']:.2f} | {quartiles} | {target} | {verdict} |"
