"""Guards the wheel and the sdist: the same bytes wherever they are built, with all they need and no more."""

import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from markdown_it import MarkdownIt
from what_to_push import lacking, metadata

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="hatchling is not installed"),
    pytest.mark.slow,
]

ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = {".ci/run", ".pre-commit-config.yaml"}
"""What only the repository needs."""
EXTRAS = ("gpu", "study", "trace", "tensorboard", "all")


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


def addresses(markdown):
    """Where links and images lead, as a renderer sees them."""
    page = MarkdownIt("commonmark").enable("table").render(markdown)
    return re.findall(r'(?:href|src)="([^"]*)"', page)


def test_no_link_of_the_page_on_the_index_leads_into_a_repository(archives):
    found = metadata(archives[1])
    text = found.get_payload(decode=True).decode()
    assert found["Description-Content-Type"] == "text/markdown"
    assert [place for place in addresses(text) if not place.startswith("https://")] == []
    assert "](" not in text or addresses(text)
    assert "Your own loop in five minutes" in text
    assert len(text.splitlines()) > 80


def test_with_a_repository_the_links_lead_to_the_tag(tmp_path):
    source = copied(tmp_path / "source", 1_500_000_000)
    project = source / "pyproject.toml"
    urls = '[project.urls]\nRepository = "https://example.org/halfstep/"\n\n[project.scripts]'
    project.write_text(project.read_text().replace("[project.scripts]", urls))
    found = metadata(built(source, tmp_path / "built")[1])
    places = addresses(found.get_payload(decode=True).decode())
    start = f"https://example.org/halfstep/{{}}/v{found['Version']}/"
    assert f"{start.format('blob')}docs/getting_started.md" in places
    assert f"{start.format('raw')}docs/small_loss.svg" in places
    assert len(places) == len(addresses((ROOT / "README.md").read_text(encoding="utf-8"))) > 25
    assert all(place.startswith((start.format("blob"), start.format("raw"))) for place in places)


@pytest.mark.skipif(not importlib.util.find_spec("twine"), reason="twine is not installed")
def test_an_index_takes_the_archives(archives):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("PASSED") == 2


@pytest.mark.skipif(
    not importlib.util.find_spec("check_wheel_contents"), reason="check-wheel-contents is not installed"
)
def test_the_wheel_holds_no_mistake_that_is_known(archives):
    command = [sys.executable, "-m", "check_wheel_contents", str(archives[1])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_what_a_release_lacks_is_said(archives):
    found = metadata(archives[1])
    version = found["Version"]
    right = f"# Changelog\n\n## Unreleased\n\n## {version} - 2026-11-25\n\n- A line.\n\n## 0.0.1 - 2026-01-01\n"
    found["Project-URL"] = "Repository, https://example.org/halfstep"
    assert lacking(found, right, "") == []
    assert "heading" in lacking(found, right.replace(version, "9.9.9"), "")[0]
    assert "Unreleased" in lacking(found, right.replace("Unreleased\n", "Unreleased\n\n- A line.\n"), "")[0]
    assert "committed" in lacking(found, right, " M README.md\n")[0]
    del found["Project-URL"]
    assert "urls" in lacking(found, right, "")[0]


def test_this_version_is_the_newest_in_the_changelog_and_the_supported_pythons_are_classifiers(archives):
    found = metadata(archives[1])
    assert "heading" not in " ".join(lacking(found, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), ""))
    minors = [int(one.rpartition(".")[2]) for one in found.get_all("Classifier") if ":: 3." in one]
    assert found["Requires-Python"] == f"<3.{max(minors) + 1},>=3.{min(minors)}"
    assert minors == list(range(min(minors), max(minors) + 1))


def test_the_extra_of_all_holds_every_one_but_the_libraries_of_cuda(archives):
    wanted = metadata(archives[1]).get_all("Requires-Dist")
    held = {name: {one.partition(";")[0] for one in wanted if f"extra == '{name}'" in one} for name in EXTRAS}
    assert held["all"] == held["study"] | held["trace"] | held["tensorboard"]
    assert held["gpu"] == {"tensorflow[and-cuda]"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if f"`{name}`" not in readme] == []
