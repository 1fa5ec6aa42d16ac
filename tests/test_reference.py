"""`docs/reference/` names everything that is public: each name once, each error with when it is raised."""

import importlib
import inspect
import pathlib
import re
import types

import loops
import loops.support.errors
import scaler.errors

REFERENCE = pathlib.Path(__file__).parent.parent / "docs" / "reference"
ERRORS = (REFERENCE / "errors.md").read_text(encoding="utf-8")
MODULES = ("scaler", "loops", "loops.observe", "loops.views.plots", "scaler.testing")
NAMESPACES = ("strategies", "formats", "weights", "gradients", "layerwise", "observe", "presets", "authoring")


def documented():
    """Module and name of each line of the blocks `{api}`."""
    for page in sorted(REFERENCE.glob("*.md")):
        for module, names in re.findall(r"^```\{api\} ([\w.]+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            yield from ((module, name) for name in names.split())


def public():
    """The same of what the modules export; what `scaler` has under a short name is not named again."""
    short = set(importlib.import_module("scaler").__all__)
    for module in (*MODULES, *(f"scaler.{name}" for name in NAMESPACES)):
        found = importlib.import_module(module)
        names = ["check_strategy"] if module == "scaler.testing" else found.__all__
        things = {name: getattr(found, name) for name in names}
        for name, thing in things.items():
            repeated = module.removeprefix("scaler.") in NAMESPACES and name in short
            if not isinstance(thing, types.ModuleType) and not repeated:
                yield module, name


def test_every_public_name_is_in_the_reference_once():
    named = list(documented())
    assert len(named) > 150
    assert sorted(named) == sorted(public())


def test_every_error_and_warning_has_a_row_with_its_bases():
    rows = {row[0]: row[1] for row in re.findall(r"^\| `([\w.]+)` \|(.*)\|$", ERRORS, re.MULTILINE)}
    found = {}
    for module in (scaler.errors, loops.support.errors):
        for name, thing in inspect.getmembers(module, inspect.isclass):
            if issubclass(thing, BaseException) and thing.__module__ == module.__name__:
                found[f"{module.__name__.split('.')[0]}.{name}"] = thing
    assert set(rows) == set(found)
    for name, thing in found.items():
        others = {base.__name__ for base in thing.__bases__} - {"ScalerError", "UserWarning"}
        assert not [base for base in others if f"`{base}`" not in rows[name]], name


def test_every_exit_status_has_a_row():
    root = pathlib.Path(loops.__file__).parents[1]
    files = [path for package in ("loops", "halfstep") for path in (root / package).rglob("*.py")]
    sources = [path.read_text(encoding="utf-8") for path in files]
    statuses = {number for source in sources for number in re.findall(r"EXIT_\w+ = (\d+)", source)}
    assert len(statuses) >= 7
    assert statuses <= set(re.findall(r"^\| (\d+) \|", ERRORS.split("## Exit statuses")[1], re.MULTILINE))
