"""Guards that what CI runs is what the Makefile runs, and that the files that a repository's host reads are valid."""

import itertools
import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
if not (ROOT / ".github").is_dir():
    pytest.skip("the sdist has no workflows", allow_module_level=True)
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w./-]+):(?!=)", MAKEFILE, flags=re.MULTILINE))


def loaded(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def recipe(target):
    """The commands of a target."""
    return re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)[1]


def steps():
    """Each step of each workflow, with its job."""
    for path in WORKFLOWS:
        for job in loaded(path)["jobs"].values():
            for step in job["steps"]:
                yield pytest.param(job, step, id=f"{path.stem}-{step.get('run') or step['uses'].partition('@')[0]}")


def targets_of(job, step):
    """The targets that a step makes: one that stands in it, or those of its job's matrix."""
    (word,) = re.fullmatch(r'make ("\$TARGET"|[\w-]+)', step["run"]).groups()
    if word != '"$TARGET"':
        return {word}
    assert step["env"] == {"TARGET": "${{ matrix.target }}"}
    return {one["target"] for one in job["strategy"]["matrix"]["include"]}


@pytest.mark.parametrize(("job", "step"), [one for one in steps() if "run" in one.values[1]])
def test_a_step_makes_a_target(job, step):
    assert targets_of(job, step) <= TARGETS


@pytest.mark.parametrize(("job", "step"), [one for one in steps() if "uses" in one.values[1]])
def test_an_action_is_pinned_by_its_commit(job, step):
    assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


def test_a_change_is_tested_as_a_submission_is():
    """What .ci/run makes, on every Python that is claimed."""
    made = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^together (.*)$", (ROOT / ".ci/run").read_text(), re.M))))
    jobs = loaded(".github/workflows/tests.yml")["jobs"]
    run = {
        target for job in jobs.values() for step in job["steps"] if "run" in step for target in targets_of(job, step)
    }
    assert {"lint", "docs", "test", "test-slow", "test-select", "oldest"} <= made
    assert {one for one in made if one in TARGETS} <= run
    assert "newest" in run
    low, high = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(low), int(high))]


def test_who_may_write():
    """A night that fails leaves a red badge and nothing else; a release has no token but its own proof."""
    found = {}
    for path in WORKFLOWS:
        workflow = loaded(path)
        assert workflow["permissions"] == {}
        for name, job in workflow["jobs"].items():
            rights = {right for right, kind in job["permissions"].items() if kind == "write"}
            found |= {(path.stem, name): rights} if rights else {}
            assert "secrets." not in str(job)
    assert found == {("pages", "deploy"): {"pages", "id-token"}, ("release", "publish"): {"id-token"}}


def test_the_pages_are_built_in_the_same_way_elsewhere():
    """`make docs` in CI, on the host of the pages and at home: one command, in which a warning is an error."""
    settings = loaded(".readthedocs.yaml")
    jobs = settings["build"]["jobs"]
    made = [
        command for command in itertools.chain(jobs["install"], jobs["build"]["html"]) if command.startswith("make ")
    ]
    assert made == ["make .venv/docs-ready", "make docs"]
    assert ".venv/docs-ready" in TARGETS
    (command,) = re.findall(r"sphinx-build (.*)", recipe("docs/_build/html/index.html"))
    *options, source, out = command.split()
    assert "-W" in options
    assert settings["sphinx"] == {"configuration": f"{source}/conf.py", "fail_on_warning": "-W" in options}
    assert f"cp -r {out} $READTHEDOCS_OUTPUT/html" in jobs["build"]["html"]
    uploads = [
        step["with"]["path"]
        for job in loaded(".github/workflows/pages.yml")["jobs"].values()
        for step in job["steps"]
        if "upload" in step.get("uses", "")
    ]
    assert uploads == [out]
    assert not [one for one in (ROOT / ".github/workflows").glob("*") if "sphinx-build" in one.read_text()]


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_a_form_asks_for_what_doctor_says(name):
    form = loaded(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    assert "halfstep doctor --json" in fields["doctor"]["attributes"]["label"]
    for field in fields.values():
        assert field["type"] == "textarea"
        assert set(field["attributes"]) <= {"label", "description", "render", "placeholder", "value"}
    assert name != "bug" or fields["doctor"]["validations"] == {"required": True}


def test_it_can_be_cited():
    """The fields that version 1.2.0 of the format demands, and a licence that is the project's."""
    citation = loaded("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert all(isinstance(citation[name], str) and citation[name] for name in ("message", "title"))
    assert citation["authors"]
    assert all(set(author) <= {"name", "family-names", "given-names", "orcid"} for author in citation["authors"])
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
    allowed = {"cff-version", "message", "type", "title", "authors", "license", "keywords", "version", "url"}
    assert set(citation) <= allowed | {"abstract", "date-released", "repository-code"}


def test_updates_are_proposed_for_all_that_is_pinned():
    updates = loaded(".github/dependabot.yml")
    assert updates["version"] == 2
    assert [one["package-ecosystem"] for one in updates["updates"]] == ["github-actions", "pip"]


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"])
def test_what_they_lead_to_is_there(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link
    for option in set(re.findall(r"`make ([\w-]+)`", text)):
        assert option in TARGETS, option
