"""Guards the wheel and the sdist: the same bytes wherever they are built, with all they need and no more."""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="hatchling is not installed"),
    pytest.mark.slow,
]

ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = {".ci/run", ".pre-commit-config.yaml"}
"""What only the repository needs."""


def tracked():
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this is no git checkout")
    return {name for name in found.stdout.split("\0") if name and (ROOT / name).exists()}


def copied(place, changed):
    """The tracked files in another folder, with another time of change and other permissions, and what runs leave."""
    for name in tracked():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        os.utime(target, (changed, changed))
        target.chmod(0o600 if changed % 2 else 0o664)
    for left in ("scaler/__pycache__/errors.cpython-311.pyc", "study/report.html", "dist/halfstep-0.0.9.tar.gz"):
        (place / left).parent.mkdir(parents=True, exist_ok=True)
        (place / left).write_bytes(b"left by a run")
    return place


def built(source, place):
    """The sdist and the wheel of a folder."""
    environment = {name: value for name, value in os.environ.items() if name not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(place), "-t", "sdist", "-t", "wheel"]
    subprocess.run(command, cwd=source, env=environment, capture_output=True, check=True)
    return next(place.glob("*.tar.gz")), next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    place = tmp_path_factory.mktemp("archives")
    return built(copied(place / "one", 1_500_000_001), place / "built")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_folder_and_time_give_the_same_bytes(archives, tmp_path):
    again = built(copied(tmp_path / "a longer name", 1_700_000_000), tmp_path / "built")
    assert [path.name for path in again] == [path.name for path in archives]
    assert list(map(digest, again)) == list(map(digest, archives))


def test_the_sdist_gives_the_same_archives(archives, tmp_path):
    with tarfile.open(archives[0]) as sdist:
        sdist.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder,) = tmp_path.iterdir()
    assert list(map(digest, built(folder, tmp_path / "built"))) == list(map(digest, archives))


def test_the_wheel_holds_both_packages_and_nothing_else(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = {name.partition(".dist-info/")[2] for name in wheel.namelist()} - {""}
        points = wheel.read(next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))).decode()
    assert names == {name for name in tracked() if name.startswith(("scaler/", "loops/", "halfstep/"))}
    assert {"scaler/py.typed", "loops/py.typed", "halfstep/py.typed"} <= names
    assert {"loops/support/pages/style.css", "loops/views/report/page.html"} <= names
    assert metadata == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert "halfstep = halfstep.command:main" in points


def test_the_sdist_holds_what_the_tests_need(archives):
    with tarfile.open(archives[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names == tracked() - LEFT_OUT | {"PKG-INFO"}
