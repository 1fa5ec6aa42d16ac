"""Guards all pages together: names that look like markup stay names, and every page is for light, dark and phones."""

import json
import re

import pytest
from page_cases import Page
from recorded_cases import write_run
from test_study_report import FLOAT32, figures_of, write_study

import loops
from loops.diagnose.doctor.shown import memory_figure, memory_page
from loops.diagnose.memory import Bytes, Footprint
from loops.study.page import page
from loops.study.setups import Setup
from loops.support.palette import DARK_PAGE, LIGHT_PAGE

HOSTILE = '--></script></svg><script>alert("&lt;")</script><img src=x onerror=alert(1)>'
GLYPHS = ("defs", "g", "path", "use")
"""What matplotlib draws text with: another name has others."""


def report_of(folder, name):
    # A folder cannot have a slash in its name.
    run = write_run(
        folder / name.replace("/", "|"), names=(f"activations/{name}",), steps=60, skips=(*range(41, 49), 60)
    )
    strategy = {"strategy": name, "skips": 1, "skip_rate": 0.1, "mean_log2_scale": 1, "final_scale": 2, "flushed": None}
    (run / "replay.json").write_text(json.dumps({"steps": 5, "strategies": [strategy]}))
    (run / "summary.json").write_text(json.dumps({"strategy": name, "policy": name, "tensorflow": name}))
    loops.observe.report([run, run], folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def study_of(folder, name):
    setup = Setup("static-2", name, "mixed_float16", "static:2")
    summary, steps = figures_of(write_study(folder, [FLOAT32, setup], broken={("static-2", 1): 3}, nulls={7}))
    for run in summary["runs"][2:]:
        run["strategy"] = name
        if "error" in run:
            run["error"]["message"] = name
    images = dict.fromkeys(("comparison", "loss", "loss_scale", "gradients", "costs"), "iVBORw0K")
    return page({**summary, "task": name}, steps, images)


def doctor_of(folder, name):
    footprints = [Footprint(name, {name: Bytes(1000, 2, None), None: Bytes(3000)}, recomputed=5)]
    return memory_page(footprints, memory_figure(footprints))


PAGES = pytest.mark.parametrize("made", [report_of, study_of, doctor_of], ids=["report", "study", "doctor"])


@PAGES
def test_a_name_that_looks_like_markup_stays_a_name(tmp_path, made):
    usual, hostile = (Page(made(tmp_path / folder, name)) for folder, name in (("usual", "a-b"), ("hostile", HOSTILE)))
    tags = [[one["tag"] for one in page.elements if one["tag"] not in GLYPHS] for page in (usual, hostile)]
    assert tags[0] == tags[1]
    assert not any("onerror" in one for one in hostile.elements)
    assert HOSTILE in hostile.text


@PAGES
def test_every_page_is_for_light_and_dark_and_for_phones_and_fetches_nothing(tmp_path, made):
    text = made(tmp_path, "a-b")
    light, dark = re.search(
        r":root \{ color-scheme: light dark;(.*)\}\n@media \(prefers-color-scheme: dark\) (.*)", text
    ).groups()
    for name in LIGHT_PAGE:
        assert f"--{name}: {LIGHT_PAGE[name]};" in light
        assert f"--{name}: {DARK_PAGE[name]};" in dark
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used <= set(LIGHT_PAGE)
    assert 'name="viewport"' in text
    assert "@media (max-width: 600px)" in text
    assert "default-src 'none'" in text
