"""Guards that modules are still found where they were: the same modules, with one warning that names the new path."""

import importlib
import sys
import warnings

import pytest
from processes import start

import halfstep
import loops
import scaler

MOVED = {
    f"{package.__name__}.{old}": new for package in (scaler, loops) for old, new in vars(package)["_MOVED"].items()
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_new_module_and_warns_once(old, monkeypatch):
    new = importlib.import_module(MOVED[old])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in [name for name in sys.modules if name == old or name.startswith(f"{old}.")]:
            monkeypatch.delitem(sys.modules, name)
        assert importlib.import_module(old) is new
        assert importlib.import_module(old) is new
    assert [(one.category, str(one.message)) for one in caught] == [
        (DeprecationWarning, f"{old} has moved: import {MOVED[old]}.")
    ]
    assert new.__name__ == new.__spec__.name == MOVED[old]


USES_OLD_NAMES = """import loops; loops.views.plots.loss
from loops.plots import loss
from loops.workers.join import join_workers
assert join_workers is loops.join_workers and loss is loops.plots.loss"""


def use_old_names(place):
    with place.open("w") as sys.stderr:
        exec(compile(USES_OLD_NAMES, "<string>", "exec"), {"__name__": "__main__"})


def test_the_warning_is_of_the_line_that_imports(tmp_path):
    place = tmp_path / "errors.txt"
    process = start(use_old_names, place)
    process.join(300)
    assert process.exitcode == 0, place.read_text()[-2000:]
    said = [line for line in place.read_text().splitlines() if "DeprecationWarning" in line]
    assert said == [
        "<string>:2: DeprecationWarning: loops.plots has moved: import loops.views.plots.",
        "<string>:3: DeprecationWarning: loops.workers has moved: import loops.loop.workers.",
    ]


@pytest.mark.parametrize("name", ["Csv", "JsonLines", "KeepBatches"])
def test_actions_that_write_are_still_named_beside_the_others(name):
    with pytest.warns(DeprecationWarning, match=f"loops.actions.{name} has moved: import loops.{name}"):
        assert getattr(loops.actions, name) is getattr(loops, name)


def test_names_that_stay():
    from loops.loop import Loop
    from loops.step import ByAttempts
    from scaler.outcome import Cause, Outcome

    assert (Loop, ByAttempts, Cause, Outcome) == (loops.Loop, loops.ByAttempts, scaler.Cause, scaler.Outcome)


def test_the_old_entry_point_is_the_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "loops.cli", raising=False)
    with pytest.warns(DeprecationWarning, match="import halfstep"):
        module = importlib.import_module("loops.cli")
    assert module.main is halfstep.main
