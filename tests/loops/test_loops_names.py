"""Guards the names `loops` gives away, and that importing it needs nothing of the extras."""

import pkgutil
import subprocess
import sys
import types

import pytest

import loops
import scaler

_NAMES = """
import sys
extras = ("matplotlib", "sklearn", "tensorboard", "pyarrow")
for name in extras:
    sys.modules[name] = None   # As if it were not installed: Keras looks for matplotlib by itself.
import loops, halfstep.commands.train, loops.run, loops.diagnose.doctor.machine, loops.tasks, loops.study.compare
found = [n for n, m in sys.modules.items() if m and n.partition(".")[0] in extras]
print("found", found)
"""


def test_all_lists_the_public_names_in_order():
    public = [
        name
        for name, value in vars(loops).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert loops.__all__ == sorted([*public, "observe"])  # The namespace of what is told of a run.
    assert len(set(loops.__all__)) == len(loops.__all__)


@pytest.mark.parametrize("package", [loops, scaler], ids=["loops", "scaler"])
def test_every_namespace_is_an_attribute_without_an_import_of_its_own(package, monkeypatch):
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_"]
    assert {"loops": "tasks", "scaler": "testing"}[package.__name__] in names
    for name in names:
        if name not in package.__all__:
            if isinstance(vars(package).get(name), types.ModuleType):
                monkeypatch.delattr(package, name)  # As if no other import had brought it.
            assert getattr(package, name).__name__ == f"{package.__name__}.{name}"
    for name in ("taskz", "__path", "a.b"):
        assert not hasattr(package, name)


def test_dir_shows_what_is_public():
    assert dir(loops) == sorted([*loops.__all__, "tasks", "views"])


def test_every_public_class_says_what_it_is():
    for name in loops.__all__:
        assert getattr(loops, name).__doc__, name


def test_errors_are_one_tree():
    assert issubclass(loops.OutOfData, loops.LoopError)
    assert issubclass(loops.BadOutputs, loops.LoopError)


@pytest.mark.slow
def test_importing_needs_no_extras():
    result = subprocess.run([sys.executable, "-c", _NAMES], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "found []\n", result.stderr[-2000:]
