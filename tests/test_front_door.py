"""Guards `import halfstep as hs`: few names, the packages' own objects, imported when they are used."""

import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import halfstep as hs
import loops
import scaler

_ASKED = """
import json, sys
import halfstep as hs

shown = dir(hs)
before = {name.partition(".")[0] for name in sys.modules}
hs.Dynamic
print(json.dumps([shown, sorted(before), "scaler" in sys.modules, "loops" in sys.modules]))
"""


def test_the_packages_and_their_names_are_the_same_objects():
    assert hs.scaler is scaler
    assert hs.loops is loops
    names = [name for name in hs.__all__ if name not in ("scaler", "loops")]
    assert 10 <= len(names) <= 15
    for name in names:
        owner = loops if name in hs._LOOPS else scaler
        assert name in owner.__all__
        assert getattr(hs, name) is getattr(owner, name), name


def test_a_name_means_one_thing():
    commands = {module.name for module in pkgutil.iter_modules(hs.__path__)}
    assert commands.isdisjoint({*hs.__all__, "main"})
    assert set(hs.__all__) & set(scaler.__all__) & set(loops.__all__) == set()
    assert hs.__all__ == sorted(hs.__all__)


def test_nothing_is_imported_before_a_name_is_used():
    result = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, timeout=120, check=True)
    shown, before, scaler_after, loops_after = json.loads(result.stdout)
    assert {"scaler", "loops", "tensorflow", "keras", "numpy", "argparse"}.isdisjoint(before)
    assert set(hs.__all__) <= set(shown)
    assert (scaler_after, loops_after) == (True, False)


def test_the_first_page_names_them():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "getting_started.md").read_text(encoding="utf-8")
    section = page.split("## One import\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`hs\.(\w+)`", section)) == set(hs.__all__)


def test_star_gives_all_names():
    found = {}
    exec("from halfstep import *", found)
    assert set(hs.__all__) <= set(found)


@pytest.mark.parametrize("name", ["Lop", "Warmup", "__path", "explain_"])
def test_what_is_no_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'halfstep' has no attribute '{name}'"):
        getattr(hs, name)
