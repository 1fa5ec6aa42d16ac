"""The facts of a checkpoint: JSON that says what run it is of. A file can hold anything, so their form is checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from loops.support.json_values import read_object

FORMAT = 2
"""The format of a checkpoint that is saved."""
READ = (2,)
"""The formats that are read: those of every release."""
_MISSING = object()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_shape(value: Any) -> bool:
    """Whether it is the sides of an array, None where they differ, or None if their number does."""
    return value is None or (isinstance(value, list) and all(side is None or _is_count(side) for side in value))


def _is_variable(entry: Any) -> bool:
    """Whether it is a name, a dtype and a shape."""
    return isinstance(entry, list) and [type(part) for part in entry] == [str, str, list]


def _are_shapes(value: Any) -> bool:
    """Whether these are the shapes of batches, each with as many arrays."""
    if not _fits(value, {"seen": [[_is_shape]], "common": _is_anything}):
        return False
    common = [] if value["common"] is None else [value["common"]]
    return _fits(common, [[_is_shape]]) and len(set(map(len, [*value["seen"], *common]))) <= 1


def _is_anything(value: Any) -> bool:
    return value is not _MISSING


class _Optional(NamedTuple):
    """A part that may be missing: a step may have no scaler, nothing may have been changed, a run may not be over."""

    form: Any


_SOURCE = {"name": str, "length": (int, type(None)), "state": _is_anything, "shapes": _are_shapes}
_FORM: dict[str, Any] = {
    "identity": dict,
    "versions": dict,
    "counters": {name: _is_count for name in ("data", "attempted", "applied", "skipped")},
    "data": {
        "batches": _is_count,
        "problem": (str, type(None)),
        "caveats": [str],
        "source": _Optional(_SOURCE),
    },
    "variables": {...: [_is_variable]},
    "actions": dict,
    "random": dict,
    "settings": dict,
    "trainable": {...: str},
    "held": list,
    "action_keys": {...: [str]},
    "loss_scaler": _Optional(dict),
    "changes": _Optional(list),
    "complete": _Optional(bool),
}
"""The form of each part: a type or several, a test, a list of one form, an object of names; `...` is any name."""


def parse(text: str | bytes) -> dict[str, Any]:
    """The facts in a text.

    Raises:
        ValueError: If it has another form, or is of another version.
    """
    facts = read_object(text)
    if facts.get("format") not in READ:
        said = ", ".join(map(str, READ))
        raise ValueError(f"its format is {repr(facts.get('format'))[:40]}, and this version reads {said}")
    for name, form in _FORM.items():
        if not _fits(facts.get(name, _MISSING), form):
            raise ValueError(f"its {name} {'is not that' if name == 'data' else 'are not those'} of a run")
    return facts


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, _Optional):
        return value is _MISSING or _fits(value, form.form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(part, form[0]) for part in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        names = dict.fromkeys(value, form[...]) if ... in form else form
        return all(_fits(value.get(name, _MISSING), one) for name, one in names.items())
    if isinstance(form, (type, tuple)):
        return type(value) in (form if isinstance(form, tuple) else (form,))
    return bool(form(value))
