"""Guards `import halfstep as hs`: all public names, the packages' own objects, imported when they are used."""

import json
import os
import pathlib
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys

import pytest

import halfstep as hs
import loops
import scaler
from halfstep import front_door

ROOT = pathlib.Path(__file__).parents[1]

_ASKED = """
import importlib.machinery, json, sys

asked = []


class Spares:
    "Finds our packages, and notes their names; what they would import themselves is spared."

    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if name in ("scaler", "loops"):
            asked.append(name)
            spec.loader.exec_module = lambda module: setattr(module, "Dynamic", name)
        return spec


sys.meta_path.insert(0, Spares())
import halfstep as hs

shown = dir(hs)
before = {name.partition(".")[0] for name in sys.modules}
loaded = hs.Dynamic
print(json.dumps([shown, sorted(before), loaded, sorted({"scaler", "loops"} & {*sys.modules})]))
"""


def test_all_names_of_both_packages_are_the_same_objects():
    assert hs.scaler is scaler
    assert hs.loops is loops
    assert set(hs.__all__) == {*scaler.__all__, *loops.__all__, "scaler", "loops"}
    for name in set(hs.__all__) - {"scaler", "loops", "observe"}:
        owner = loops if name in loops.__all__ else scaler
        assert getattr(hs, name) is getattr(owner, name), name
    assert set(hs.__all__) <= set(dir(hs))
    found = {}
    exec("from halfstep import *", found)
    assert set(hs.__all__) <= set(found)


def test_a_name_means_one_thing():
    modules = {module.name for module in pkgutil.iter_modules(hs.__path__)}
    assert modules & {*hs.__all__, "main"} == {"observe"}
    assert set(scaler.__all__) & set(loops.__all__) == {"Counters", "observe"}
    assert hs.Counters is loops.Counters
    assert not set(scaler.observe.__all__) & set(loops.observe.__all__)
    for package in (scaler.observe, loops.observe):
        assert all(getattr(hs.observe, name) is getattr(package, name) for name in package.__all__)
    assert hs.__all__ == sorted(hs.__all__)


def test_nothing_is_imported_before_a_name_is_used():
    result = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, timeout=120, check=True)
    shown, before, loaded, after = json.loads(result.stdout)
    assert {"scaler", "loops", "tensorflow", "keras", "numpy", "argparse"}.isdisjoint(before)
    assert set(hs.__all__) <= set(shown)
    # Of the packages themselves another test has it that the lower one does not import the upper one.
    assert (loaded, after) == ("scaler", ["scaler"])


NEAR = {"trace": "hs.Trace", "Tensorboard": "hs.TensorBoard", "spike_guard": "hs.SpikeGuard", "Lop": "hs.Loop"}


@pytest.mark.parametrize("name", [*NEAR, "Warmup", "__path", "explain_"])
def test_what_is_no_name_is_an_attribute_error_that_tells_what_is_near(name):
    near = rf": is it {NEAR[name]}\?" if name in NEAR else ""
    with pytest.raises(AttributeError, match=f"module 'halfstep' has no attribute '{name}'{near}"):
        getattr(hs, name)


def in_folder(folder, *command, path=(ROOT,)):
    """What a program that starts in a folder prints, and its status."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("file", "started", "says"),
    [
        ("scaler/__init__.py", ["-c", "import halfstep as hs; hs.Loop"], "ImportError"),
        ("loops.py", ["-m", "halfstep", "doctor"], "halfstep"),
    ],
    ids=["program", "command"],
)
def test_a_file_of_the_user_that_hides_a_package_is_named(tmp_path, file, started, says):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine = 1\n")
    status, _, said = in_folder(tmp_path, *started)
    package = re.match(r"\w+", file).group()
    assert status == 1
    assert said.strip().endswith(
        f"{says}: {tmp_path / file} hides the package {package!r} of Halfstep: a program that starts in its "
        "folder imports it in place of the package. Give it another name."
    )


def install_another(site, package, version="1.2"):
    """Installs a distribution with a package of that name, as pip does; it lacks what it imports."""
    (site / package).mkdir(parents=True, exist_ok=True)
    (site / package / "__init__.py").write_text("import a_module_that_is_missing\n")
    folder = site / f"auto_{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: auto-{package}\nVersion: {version}\n")
    (folder / "RECORD").write_text(f"{package}/__init__.py,,\n{folder.name}/RECORD,,\n")


def test_another_distribution_that_overwrote_a_package_is_named_with_what_to_run(tmp_path):
    site, here, package = tmp_path / "site", tmp_path / "here", "loops"
    here.mkdir()
    shutil.copytree(ROOT / "halfstep", site / "halfstep")
    for one in ("scaler", "loops"):
        (site / one).mkdir()
        shutil.copy(ROOT / one / "__init__.py", site / one)
    install_another(site, package)
    expected = (
        f"{site / package / '__init__.py'} is not the package {package!r} of Halfstep. The distribution auto-{package} "
        f"1.2 also installs a top-level package {package!r}. One overwrites or hides the other: use separate "
        f"environments, or run `pip uninstall auto-{package}` and then `pip install --force-reinstall --no-deps "
        "halfstep`."
    )
    # Without the packages of this environment, one of which is ours.
    asked = "-S", "-c", "import halfstep as hs; hs.Loop"
    assert in_folder(here, *asked, path=[site])[2].strip().endswith(f"ImportError: {expected}")
    assert in_folder(here, "-S", "-m", "halfstep", "doctor", path=[site]) == (1, "", f"halfstep: {expected}\n")
    # Uninstalling it takes the file away, and the package of ours stays without it.
    shutil.rmtree(site / f"auto_{package}-1.2.dist-info")
    (site / package / "__init__.py").unlink()
    assert (
        in_folder(here, *asked, path=[site])[2]
        .strip()
        .endswith(
            f"ImportError: {site / package / '__init__.py'} of Halfstep is missing or was overwritten, as by another "
            "distribution: run `pip install --force-reinstall --no-deps halfstep`."
        )
    )


def test_another_distribution_that_hides_a_clone_is_named_too(tmp_path):
    install_another(tmp_path / "site", "scaler")
    _, _, said = in_folder(tmp_path, "-c", "import halfstep as hs; hs.Loop", path=[tmp_path / "site", ROOT])
    assert said.strip().endswith(
        f"run `pip uninstall auto-scaler` and then `pip install --force-reinstall --no-deps -e {ROOT}`."
    )
    _, _, said = in_folder(tmp_path, "-c", "import loops", path=[tmp_path / "site", ROOT])
    assert said.strip().endswith("If another distribution installed it, `halfstep doctor` says what to do.")


@pytest.mark.parametrize("code", ["import loops", "import loops.observe"])
def test_loops_names_a_file_that_hides_scaler(tmp_path, code):
    (tmp_path / "scaler.py").write_text("mine = 1\n")
    status, _, said = in_folder(tmp_path, "-c", code)
    assert status == 1
    assert said.splitlines()[-1].startswith(f"ImportError: {tmp_path / 'scaler.py'} hides the package 'scaler'")


@pytest.mark.parametrize("uses", ["import loops\n\nloops.Loop\n", "import halfstep as hs\n\nhs.LossScaler\n"])
def test_a_program_of_that_name_that_starts_itself_is_named(tmp_path, uses):
    (tmp_path / "scaler.py").write_text(uses)
    status, _, said = in_folder(tmp_path, "scaler.py")
    assert status == 1
    assert f"ImportError: {tmp_path / 'scaler.py'} hides the package 'scaler'" in said.splitlines()[-1]


def test_the_command_by_its_other_name_names_a_file_that_hides_halfstep(tmp_path, monkeypatch):
    """As `python -m loops --version` does in that folder, in a process that has imported TensorFlow."""
    (tmp_path / "halfstep.py").write_text("mine = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "halfstep"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["loops", "--version"])
    with pytest.raises(ImportError) as error:
        runpy.run_module("loops", run_name="__main__")
    assert str(error.value).startswith(f"{tmp_path / 'halfstep.py'} hides the package 'halfstep'")


def test_a_package_that_nobody_asked_for_may_be_hidden(tmp_path):
    (tmp_path / "loops.py").write_text("")
    assert front_door.hidden(("scaler",)) is None
    assert [one["package"] for one in front_door.hiding_files(tmp_path)] == ["loops"]
    assert front_door.hiding_files(ROOT) == []
