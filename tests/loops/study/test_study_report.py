"""The report of a small made-up study: what it says, and that nothing in a study's files can break it."""

import base64
import json
import re

import numpy as np
import pytest
from page_cases import Page

import loops
from loops.study import page, setups
from loops.study.compare import summarise
from loops.study.page import read_steps, report_study
from loops.study.setups import SETUPS, SMALL, Setup

STEPS = 30
FIGURES = ("comparison", "loss", "loss_scale", "gradients", "small_loss")
FLOAT32 = Setup("float32", "float32", "float32", "none")
NONE = Setup("mixed-none", "mixed <b>float16</b> & no $scaling", "mixed_float16", "none")
DYNAMIC = Setup("mixed-dynamic", "mixed float16, dynamic scale", "mixed_float16", "dynamic:growth_interval=10")
SMALL_DYNAMIC = Setup("small-mixed-dynamic", "small loss: dynamic", "mixed_float16", "dynamic", loss_factor=SMALL)
BARE = Setup("float16-none", "pure float16", "float16", "none", masters=False)
ACCURACY = {
    "float32": 0.985,
    "mixed-none": 0.983,
    "mixed-dynamic": 0.981,
    "small-mixed-dynamic": 0.9,
    "float16-none": 0.3,
}


def write_study(folder, setups, seeds=2, steps=STEPS, nulls=frozenset(), counted=True, broken=None):
    """Files as `run_study` writes them.

    The losses of the steps in `nulls` are null, and the step is skipped. `broken` has the last step of the runs that
    failed, by name and seed; one that failed before its first step wrote no file.
    """
    runs = []
    for setup in setups:
        for seed in range(seeds):
            name = f"runs/{setup.name}-seed{seed}"
            last = (broken or {}).get((setup.name, seed), steps)
            records = [_record(setup, seed, step, nulls) for step in range(1, last + 1)]
            if records:
                (folder / name).mkdir(parents=True)
                (folder / name / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            skipped = sum(not record["applied"] for record in records)
            run = _run(setup, seed, skipped, nulls, counted and bool(records)) | {"folder": name}
            if last < steps:
                for result in ("accuracy", "final_loss", "skipped", "loss_scale", "digest_depends_on"):
                    del run[result]
                run["error"] = {"type": "StuckError", "message": "It is <stuck> & stays so.", "step": last}
            runs.append(run)
    rows = summarise(setups, runs)
    for row in [*rows, *(run for run in runs if "error" not in run)]:
        lost = row["final_loss"] is None or np.isnan(row["final_loss"])
        row["final_loss"] = None if lost else row["final_loss"]
    summary = {"task": "digits", "steps": steps, "seeds": seeds, "setups": rows, "runs": runs}
    (folder / "summary.json").write_text(json.dumps(summary, allow_nan=False))
    return folder


def _record(setup, seed, step, nulls):
    finite = step not in nulls
    loss = setup.loss_factor * (1 + 0.1 * seed) / step if finite else None
    kind, _, constant = setup.strategy.partition(":")
    scale = 2.0 ** (10 + step // 10) if kind == "dynamic" else float(constant) if kind == "static" else 1.0
    return {"step": step, "loss": loss, "attempted": True, "applied": finite, "loss_scale": scale, "grad_norm": loss}


def _run(setup, seed, skipped, nulls, counted):
    histogram, scaled = np.zeros((2, 81), int)
    if counted:
        histogram[25:45], scaled[35:55] = 10, 10
    counts = {"histogram": histogram.tolist(), "scaled_histogram": scaled.tolist(), "zero": 3, "overflowed": 0}
    counts |= {
        "nonzero": int(histogram.sum()),
        "flushed": int(scaled[:35].sum()) + 17 * counted,
        "lowest_exponent": -60,
    }
    return {
        "setup": setup.name,
        "policy": setup.policy,
        "strategy": setup.strategy,
        "loss_factor": setup.loss_factor,
        "emulated": setup.emulated,
        "unit_scaled": setup.unit_scaled,
        "learning_rate": 0.01,
        "batch_size": 64,
        "seed": seed,
        "accuracy": ACCURACY.get(setup.name, 0.9) + 0.002 * seed,
        "final_loss": float("nan") if nulls else 0.5,
        "skipped": skipped,
        "loss_scale": 1.0,
        "digest_depends_on": {
            "intra_op_threads": 2,
            "inter_op_threads": 3,
            "jit_compile": False,
            "op_determinism": True,
            "tensorflow": "2.99.0",
            "keras": "3.99.0",
            "devices": ["CPU"],
        },
        "gradients": {"weights": counts, "activations": counts},
    }


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("study"), [FLOAT32, NONE, SMALL_DYNAMIC], nulls={7, 8, STEPS})
    return folder, report_study(folder), Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_has_its_figures_and_needs_no_other_file(study):
    folder, written, page = study
    assert written == [folder / name for name in (*(f"{name}.svg" for name in FIGURES), "report.html")]
    assert all(path.read_text(encoding="utf-8").startswith("<svg") for path in written[:-1])
    source = (folder / "report.html").read_text(encoding="utf-8")
    sources = [one[name] for one in page.elements for name in ("src", "href", "srcset") if name in one]
    images = [base64.b64decode(src.removeprefix("data:image/svg+xml;base64,"), validate=True) for src in sources]
    assert len(images) == len(written) - 1
    assert all(image.startswith(b"<svg") and b"prefers-color-scheme: dark" in image for image in images)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link", re.sub(r'src="[^"]*"', "", source))
    assert "<b>float16</b>" not in source


@pytest.mark.slow
def test_page_shows_every_setup_with_its_numbers(study):
    _, _, page = study
    for setup, accuracy in ((FLOAT32, "98.6% 98.5% to 98.7%"), (NONE, "98.4% 98.3% to 98.5%")):
        assert f"{setup.title} {accuracy} not finite 3" in page.text
    assert "small loss: dynamic 90.1% 90.0% to 90.2% not finite 3 8.5% 8.5% −8.5" in page.text
    assert "TensorFlow 2.99.0, Keras 3.99.0" in page.text
    assert "2 within an operation, 3 between operations" in page.text
    assert f"halfstep lab study digits --steps {STEPS} --seeds 2 --setup float32 --setup mixed-none" in page.text
    assert f"the loss of “float32”, seed 1, at 3 of {STEPS} steps, the first of them 7." in page.text
    assert "failed" not in page.text


def test_the_constant_scales_of_a_study_are_said(tmp_path):
    static = Setup("static", "static <scale>", "mixed_float16", "static:1024")
    summary, steps = figures_of(write_study(tmp_path, [FLOAT32, static, DYNAMIC], seeds=1))
    (said,) = page._constant_notes(summary, steps)
    assert said == "Constant, and not drawn: “static &lt;scale&gt;” at 2<sup>10</sup>."


def test_losses_have_gaps_and_no_factor(tmp_path):
    folder = write_study(tmp_path, [SMALL_DYNAMIC], seeds=1, nulls={2})
    summary = json.loads((folder / "summary.json").read_text())
    table = setups.losses(summary, read_steps(folder, summary), summary["setups"][0])
    np.testing.assert_allclose(table[0, :4], [1, np.nan, 1 / 3, 1 / 4])


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], [BARE]], ids=["float32", "bare"])
def test_any_study_has_a_report(tmp_path, others):
    """And float16 without masters is explained where it fails."""
    for name in ("small_loss.svg", "loss_scale.svg"):
        (tmp_path / name).write_bytes(b"of an earlier study")
    page = page_of(write_study(tmp_path, [FLOAT32, *others], seeds=1, steps=3))
    assert all(setup.title in page.text for setup in [FLOAT32, *others])
    assert not any((tmp_path / name).exists() for name in ("small_loss.svg", "loss_scale.svg"))
    assert ("What can happen without masters" in page.text) == bool(others)


@pytest.mark.parametrize(
    "setups",
    [[FLOAT32], [FLOAT32, DYNAMIC], [FLOAT32, NONE, DYNAMIC], [FLOAT32, NONE, BARE], [FLOAT32, BARE], [DYNAMIC, BARE]],
    ids=lambda setups: "+".join(one.name for one in setups),
)
def test_result_sentence_comes_from_the_numbers(tmp_path, snapshot, setups):
    summary = json.loads((write_study(tmp_path, setups, seeds=1, steps=1) / "summary.json").read_text())
    assert page.result_sentence(summary) == snapshot


def test_command_of_a_whole_study_names_no_setup():
    summary = {"task": "mnist", "steps": 5, "seeds": 1, "setups": [{"name": setup.name} for setup in SETUPS]}
    assert page.command(summary) == "halfstep lab study mnist --steps 5 --seeds 1"


def page_of(folder):
    """Written anew."""
    report_study(folder)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def figures_of(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return summary, read_steps(folder, summary)


@pytest.mark.slow
def test_a_candidate_that_failed_is_in_the_report_with_the_others(tmp_path):
    folder = write_study(tmp_path, [FLOAT32, NONE, DYNAMIC], broken={(DYNAMIC.name, seed): 0 for seed in (0, 1)})
    # Where nothing moved a loss scale, none is drawn.
    page, where = page_of(folder), "before its first step"
    assert len([*folder.glob("*.svg")]) == 3
    for seed in (0, 1):
        assert f"mixed-dynamic seed {seed} failed {where}: StuckError: It is <stuck> & stays so." in page.text
    assert f"{DYNAMIC.title} failed {where} – – – – –" in page.text
    assert "within 0.2 points of it; no run of “mixed float16, dynamic scale” finished." in page.text
    assert f"{NONE.title} 98.4%" in page.text
    assert "TensorFlow 2.99.0" in page.text


def test_a_seed_that_failed_is_in_no_mean_and_is_named(tmp_path):
    folder = write_study(tmp_path, [FLOAT32, DYNAMIC], broken={(DYNAMIC.name, 1): 3})
    text = Page(page.page(*figures_of(folder), dict.fromkeys(FIGURES, "iVBORw0K"))).text
    assert f"{DYNAMIC.title} 98.1% 1 of 2 failed 0.5 0 8.5% 8.5% −0.5" in text
    assert "mixed-dynamic seed 1 failed at step 3" in text
    assert "mixed-dynamic seed 0 failed" not in text


def test_every_number_of_the_table_has_its_heading_for_a_narrow_page(tmp_path):
    summary, steps = figures_of(write_study(tmp_path, [FLOAT32, NONE, SMALL_DYNAMIC], nulls={7}))
    source = page.page(summary, steps, dict.fromkeys(FIGURES, "iVBORw0K"))
    heads = ["Accuracy", "Final loss", "Skipped", "Flushed, weights", "Flushed, activations", "vs float32"]
    assert re.findall(r'<td data-head="([^"]*)">', source) == heads * 3
    assert re.findall(r'<th scope="col">([^<]*)</th>', source) == ["Set-up", *heads]
    assert "content: attr(data-head)" in source
    assert source.count('<svg class="mark"') == 3


def test_a_run_outside_of_the_study_is_not_read(tmp_path):
    write_study(tmp_path / "other", [FLOAT32], seeds=1, steps=1)
    folder = write_study(tmp_path / "study", [FLOAT32], seeds=1, steps=1)
    summary = json.loads((folder / "summary.json").read_text())
    summary["runs"][0]["folder"] = "../other/runs/float32-seed0"
    with pytest.raises(loops.LoopError, match="lies outside of the study's folder"):
        read_steps(folder, summary)
