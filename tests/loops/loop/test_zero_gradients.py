"""Applied steps whose gradients are all zero are said once: a run that trains nothing is not silent about it."""

import json
import types
import warnings

import keras
import numpy as np
import planted
import pytest
import tensorflow as tf
from loop_cases import line, static
from recorded_cases import steps_of

import loops
import scaler
from loops.loop.silence import ZEROS, ZeroGradients
from loops.observe import explain
from loops.record.skips import health, what_is_wrong


def visit(applied, norms, loss=0.5):
    outputs = {
        "applied": np.array(applied, bool),
        "grad_norm": np.array(norms, np.float32),
        "loss": np.full(len(norms), loss, np.float32),
    }
    return types.SimpleNamespace(outputs=outputs, counters=types.SimpleNamespace(data=len(norms)))


def said(*visits):
    watch = ZeroGradients()
    return [text for one in visits if (text := watch.sentence(one))]


def test_it_is_said_once_of_many_in_a_row():
    (text,) = said(*[visit([True] * 8, [0.0] * 8)] * 6)
    assert f"the last {3 * 8} applied steps had a norm of exactly zero" in text
    (text,) = said(visit([True] * 3 + [True] * ZEROS, [1.0] * 3 + [0.0] * ZEROS))
    assert f"the last {ZEROS} applied steps" in text


def test_of_the_outputs_of_a_composed_step_the_part_is_named():
    def step(number):
        norms = {"sound": 1.0, "flat": 0.0}.items()
        of_parts = [{f"{part}/loss": 1.0, f"{part}/applied": True, f"{part}/grad_norm": norm} for part, norm in norms]
        return {"applied": True, **of_parts[0], **of_parts[1]}

    loop = loops.Loop(step, tf.data.Dataset.range(99))
    with pytest.warns(scaler.ScaleWarning, match="applied steps of part 'flat' had a norm of exactly zero"):
        loop.run(ZEROS + 4)


def test_skipped_steps_and_micro_batches_do_not_end_a_row():
    (text,) = said(*[visit([True, False], [0.0, np.nan])] * (ZEROS + 1))
    assert f"the last {ZEROS} applied steps" in text
    assert not said(*[visit([False, False], [0.0, 0.0])] * ZEROS)


@pytest.mark.parametrize(
    "visits",
    [
        [visit([True] * 19, [0.0] * 19)],
        # One gradient between them that is not zero.
        [visit([True] * 19, [0.0] * 19), visit([True] * 20, [1e-9] + [0.0] * 19)],
        [visit([True] * 30, [0.0] * 30, loss=0.0)],
        [visit([True] * 30, [0.0] * 30, loss=np.inf)],
        [types.SimpleNamespace(outputs={"loss": np.ones(30), "applied": np.ones(30, bool)})],
    ],
)
def test_it_is_not_said_of_a_few_of_a_loss_of_zero_or_of_what_is_unknown(visits):
    assert not said(*visits)


def trained(loss, scale, steps=24):
    step = loops.TrainStep(line("mixed_float16"), loss, keras.optimizers.SGD(0.0), loss_scaler=static(scale))
    data = tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.ones([8, 1]) * 3)).repeat()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops.Loop(step, data, steps_per_call=8, jit_compile=False).run(steps)
    return [one for one in caught if "norm of exactly zero" in str(one.message)]


def tiny(y, prediction):
    return 1e-9 * tf.reduce_mean(tf.square(y - tf.cast(prediction, tf.float32)))


def test_a_loop_warns_where_float16_flushes_all():
    (warning,) = trained(tiny, 1.0)
    assert warning.category is scaler.ScaleWarning


@pytest.mark.slow
def test_a_loop_does_not_warn_where_the_scale_is_large_enough():
    assert not trained(tiny, 2.0**24)


def rows(norms, loss=0.5):
    return [
        {"step": step, "applied": True, "loss": loss, "loss_scale": 1.0, "grad_norm": norm}
        for step, norm in enumerate(norms, 1)
    ]


def test_the_log_shows_it():
    found = health(steps_of(rows([1.0] * 5 + [0.0] * 25)))
    assert (found.healthy, found.zeros, found.step) == (False, 25, 6)
    assert what_is_wrong(found).startswith(
        "The gradients of the last 25 applied steps in the log have a norm of exactly z"
    )
    for fine in (rows([0.0] * 19), rows([0.0] * 30 + [1.0]), rows([0.0] * 30, loss=0.0), []):
        assert (health(steps_of(fine)).healthy, health(steps_of(fine)).zeros) == (True, 0)


def test_the_last_problem_counts():
    """Skips at the end are looked at first, and those long ago are not."""
    skipped = [{"step": 0, "applied": False, "loss": None, "cause": "LOSS", "loss_scale": 1.0, "grad_norm": None}] * 3
    after = [dict(row, step=place) for place, row in enumerate(rows([0.0] * 30) + skipped)]
    assert (health(steps_of(after)).step, health(steps_of(after)).zeros) == (30, 30)
    before = [dict(row, step=place) for place, row in enumerate(skipped + rows([0.0] * 30))]
    assert (health(steps_of(before)).step, health(steps_of(before)).later) == (3, ())


def test_a_report_says_it(tmp_path):
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows([0.0] * 60)))
    loops.observe.report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "the gradients of the last 60 applied steps have a norm of exactly zero" in page
    assert "halfstep explain" in page


@pytest.mark.exhaustive_with("flushed-True")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning")
@pytest.mark.parametrize(("name", "helps"), [("flushed", True), ("clipped_loss", False)])
def test_explain_tries_larger_scales(tmp_path, name, helps):
    build = getattr(planted, name)
    build(tmp_path).run(planted.STEPS[name])
    found = explain(build(tmp_path))
    assert (found.step, found.verdict, found.nonzero_at is not None, bool(found.nonzero)) == (1, "zero", helps, helps)
    assert "The gradients of the last 24 applied steps in the log" in found.sentence
    wanted = "16 bits flush them to zero. Use a larger" if helps else "A larger loss scale does not change that"
    assert wanted in found.sentence
