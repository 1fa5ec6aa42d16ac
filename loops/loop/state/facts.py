"""The facts of a checkpoint: JSON that says what run it is of. A file can hold anything, so their form is checked."""

from __future__ import annotations

from typing import Any

from loops.support.json_values import read_object

FORMAT = 2
"""The format of a checkpoint that is saved."""
READ = (2,)
"""The formats that are read: those of every release."""
_PARTS = {
    "identity": dict,
    "versions": dict,
    "counters": dict,
    "data": dict,
    "variables": dict,
    "actions": dict,
    "random": dict,
    "settings": dict,
    "trainable": dict,
    "held": list,
    "action_keys": dict,
}
_OPTIONAL = {"loss_scaler": dict, "changes": list, "complete": bool}
"""A train step may have no scaler, nothing may ever have been changed, and a run may not be over."""
_NO_SOURCE: dict[str, Any] = {"name": "", "length": None, "state": None, "shapes": {"seen": [], "common": None}}
_COUNTERS = ("data", "attempted", "applied", "skipped")


def parse(text: str | bytes) -> dict[str, Any]:
    """The facts in a text.

    Raises:
        ValueError: If it has another form, or is of another version.
    """
    facts = read_object(text)
    if facts.get("format") not in READ:
        said = ", ".join(map(str, READ))
        raise ValueError(f"its format is {repr(facts.get('format'))[:40]}, and this version reads {said}")
    for name, kind in {**_PARTS, **_OPTIONAL}.items():
        if not isinstance({**{one: kind() for one, kind in _OPTIONAL.items()}, **facts}.get(name), kind):
            raise ValueError(f"its {name} are not those of a run")
    counters, data = facts["counters"], facts["data"]
    if not all(_is_count(counters.get(name)) for name in _COUNTERS):
        raise ValueError("its counters are not those of a run")
    if not (_is_count(data.get("batches")) and isinstance(data.get("problem", 0), (str, type(None)))):
        raise ValueError("its data is not that of a run")
    if not (isinstance(data.get("caveats"), list) and all(isinstance(one, str) for one in data["caveats"])):
        raise ValueError("its data is not that of a run")
    if not _is_source(data.get("source", _NO_SOURCE)):
        raise ValueError("its data is not that of a run")
    if not all(isinstance(group, list) and all(map(_is_variable, group)) for group in facts["variables"].values()):
        raise ValueError("its variables are not those of a run")
    if not all(isinstance(flags, str) for flags in facts["trainable"].values()):
        raise ValueError("its trainable are not those of a run")
    keys = facts["action_keys"].values()
    if not all(isinstance(one, list) and all(isinstance(key, str) for key in one) for one in keys):
        raise ValueError("its action_keys are not those of a run")
    return facts


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_source(value: Any) -> bool:
    """Whether it is a name, a length or None, a position, which may be anything, and the shapes of batches."""
    if not (isinstance(value, dict) and {"name", "length", "state", "shapes"} <= value.keys()):
        return False
    shapes = value["shapes"]
    if not (isinstance(shapes, dict) and isinstance(shapes.get("seen"), list) and "common" in shapes):
        return False
    batches = [*shapes["seen"], *([shapes["common"]] if shapes["common"] is not None else [])]
    if not all(isinstance(batch, list) and all(map(_is_shape, batch)) for batch in batches):
        return False
    if len(set(map(len, batches))) > 1:
        return False
    return isinstance(value["name"], str) and (value["length"] is None or type(value["length"]) is int)


def _is_shape(value: Any) -> bool:
    """Whether it is the sides of an array, None where they differ, or None if their number does."""
    return value is None or (isinstance(value, list) and all(side is None or _is_count(side) for side in value))


def _is_variable(entry: Any) -> bool:
    """Whether it is a name, a dtype and a shape."""
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and isinstance(entry[0], str)
        and isinstance(entry[1], str)
        and isinstance(entry[2], list)
    )
