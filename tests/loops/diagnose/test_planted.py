"""The causes that users had, each planted in a small program: which layer, which pass, why, and what helps."""

import contextlib
import functools
import json
import logging
import math

import planted
import pytest
import tensorflow as tf

import loops
from halfstep.commands.past_steps import text_of_explanation
from loops.diagnose.explain import attempts
from loops.diagnose.explain.remedies import Kind
from loops.observe import cure, explain

ZEROED = "derivatives of 'root' that are not finite set to zero"
EXPECTED = {
    "large_weights": ("loss", "forward", "big", "inf", "every layer in float32"),
    "learning_rate": ("overflow", "backward", "out", "inf", "0.01 of the learning rate for the last 1 step"),
    "nan_batch": ("loss", "data", None, "nan", "another batch"),
    "high_floor": ("floor", "backward", "out", "inf", "loss scale 4096"),
    "small_epsilon": ("loss", "forward", "norm", "nan", "epsilon=0.001 in 'norm'"),
    "attention_mask": ("loss", "forward", "masked", "inf", "mask_value=-30000 in 'masked'"),
    "root_at_zero": ("backward", "backward", "root", "inf", ZEROED),
    "root_under_an_overflow": ("backward", "backward", "root", "inf", ZEROED),
    "clamp": ("loss", "forward", "sure", "inf", "the loss in float32"),
    "float16_softmax": ("loss", "forward", "softmax", "inf", "'softmax' in float32"),
    "healthy": ("healthy", "backward", "first", "inf", "loss scale 16384"),
    "window": ("loss", "data", None, "nan", "another batch"),
    "second_moment": ("loss", "weights", "first", "nan", "epsilon=0.001 in the optimizer for the last 1 step"),
    "outlier_in_a_window": ("loss", "forward", "first", "inf", "another batch"),
    "beyond_float16": ("loss", "data", None, "inf", "another batch"),
    "schedule": ("loss", "forward", "out", "inf", "0.001 of the learning rate for the last 4 steps"),
    "before_a_loop": ("loss", "forward", "units", "inf", "'units' and all after it in float32"),
    "compiled": ("floor", "backward", "out", "inf", "loss scale 4096"),
    "zero_over_zero": ("loss", "forward", "spread", "nan", "denominator in 'spread' moved by 0.001"),
    "custom_gradient": ("backward", "backward", "direction", "nan", "denominator in 'direction' moved by 0.001"),
    "loss_over_zero": ("loss", "forward", None, "inf", "denominator in the loss or the step moved by 0.001"),
    "unbounded_variance": ("loss", "forward", "sampling", "inf", "inputs of 'sampling' clipped to [-5, 5]"),
    "uncleared": ("overflow", "backward", None, "inf", "the step's own variables set to zero"),
    "annealed": ("loss", "forward", None, "inf", "the step's own variables set to zero"),
}

EXAMPLES = {"small_epsilon": 1, "outlier_in_a_window": 1, "beyond_float16": 2, "window": 1, "large_weights": None}
"""Also of a layer and of a micro-batch; none where every example does it."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each program's run, made once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            getattr(planted, name)(made[name]).run(planted.STEPS[name])
        return made[name]

    return of


@pytest.fixture(scope="module")
def explained(runs):
    """What is said of a step of each program's run, asked once: by default of the last that was skipped."""
    return functools.cache(lambda name, *step: explain(getattr(planted, name)(runs(name)), *step))


def rows(run):
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


# Keras asks for the shapes of a layer's outputs, and NumPy warns of the mask.
@pytest.mark.slow_with("beyond_float16")
@pytest.mark.exhaustive_with(*EXPECTED.keys() - {"beyond_float16"})
@pytest.mark.filterwarnings("ignore::scaler.ScaleWarning", "ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", EXPECTED)
def test_the_cause_is_found_and_the_remedy_works(runs, explained, name):
    """One call, without a step, finds both."""
    found = explained(name)
    verdict, where, layer, kind, remedy = EXPECTED[name]
    assert (found.verdict, found.where, found.layer, found.kind) == (verdict, where, layer, kind)
    assert [one.name for one in found.remedies if one.name == remedy and one.helps] == [remedy]
    assert found.reproduced
    assert found.observed_alike
    assert all(one.tried for one in found.remedies if one.finite)
    finite = [one.finite for one in found.remedies]
    assert finite == sorted(finite, reverse=True)
    logged = next(row for row in rows(runs(name)) if row["step"] == found.step)
    assert not logged["applied"]
    assert name not in EXAMPLES or found.example == EXAMPLES[name]
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["pass"] == where
    assert {"step", "reproduced", "verdict", "layer", "tensor", "kind", "octaves_over", "fits_at"} <= set(told)
    assert {"name", "tried", "finite"} <= set(told["remedies"][0])


def remedy_of(found, name):
    return next(one for one in found.remedies if one.name == name)


@pytest.mark.slow
def test_what_the_step_keeps_itself_is_not_the_weights(runs, tried):
    tried(Kind.OWN_VARIABLES_CLEARED, Kind.LEARNING_RATE, rates=(0.1,))
    found = explain(planted.annealed(runs("annealed")))
    assert (found.step, found.fits_at, found.blame) == (3, None, None)
    assert "temperature" in remedy_of(found, "the step's own variables set to zero").advice


@pytest.mark.exhaustive
def test_a_scale_at_which_the_trouble_becomes_zero_is_no_remedy(runs):
    """The gradient of a norm at 0 has no value at any scale; at 2^-12 float16 makes 0 of it."""
    found = explain(planted.norm_in_the_loss(runs("norm_in_the_loss")))
    assert (found.verdict, found.fits_at, found.flushed_at) == ("backward", None, 2.0**-12)
    lower = remedy_of(found, "loss scale 0.000244141")
    assert (lower.finite, lower.helps) == (True, False)
    assert not any(one.helps for one in found.remedies)
    assert ": no help\n" in text_of_explanation(found)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "layer", "value"), [("literal_mask", "masked", -1e9), ("literal_epsilon", "norm", 1e-12)]
)
def test_a_literal_of_a_call_is_named_as_lint_names_it(runs, name, layer, value):
    """No attribute holds it, so that no remedy replaces it."""
    loop = getattr(planted, name)(runs(name))
    found = explain(loop)
    assert found.layer == layer
    assert [one.before for one in found.literals] == pytest.approx([value], rel=1e-3)
    assert found.literals[0].problem in found.sentence
    step = loop.train_step
    findings = loops.observe.lint(step.model, step, step.loss_fn, (planted.inputs(16, 8), planted.inputs(16, 1)))
    assert found.literals[0].problem in " ".join(one.finding for one in findings if one.layer == layer)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["literals"][0]["instead"].startswith("Write")


@pytest.mark.exhaustive
def test_what_made_the_weights_grow_is_said(explained):
    """A lower rate lowers the decay, too, so that it alone would not tell."""
    found = explained("weight_decay")
    assert (found.blame, found.grown_through) == ("weights", "weight decay")
    assert found.remedies[0].advice.startswith("Change the sign of weight_decay=-9e+06")


@pytest.mark.exhaustive
def test_a_rate_that_a_schedule_raised_is_told_and_kept_low_in_a_trial(explained):
    found = explained("schedule")
    assert found.learning_rates == (pytest.approx(0.01), 1e4)
    assert remedy_of(found, "the learning rate kept at 0.01 for the last 4 steps").helps
    assert (found.blame, found.grown_through, found.example) == ("weights", "learning rate", None)


@pytest.mark.exhaustive
def test_a_rate_that_is_not_a_number_is_told(runs):
    found = explain(planted.nan_rate(runs("nan_rate")))
    assert (found.verdict, found.step) == ("update", 5)
    assert found.learning_rates == pytest.approx((1e-3 * 3**0.5, math.nan), nan_ok=True)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["learning_rates"][1] is None


@pytest.mark.exhaustive
def test_an_outlier_of_a_healthy_run_blames_nobody(runs):
    """What would have to be tried first is not: a learning rate is no cure of one large example."""
    run = runs("outlier")
    skipped = [row["step"] for row in rows(run) if not row["applied"]]
    assert skipped == [7]
    found = explain(planted.outlier(run))
    assert (found.verdict, found.blame, found.grown_through) == ("healthy", None, None)
    asked = explain(planted.outlier(run), 7)
    assert (asked.example, asked.grown_through) == (2, None)


@contextlib.contextmanager
def products_regrouped(regroups):
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": regroups})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": not regroups})


@pytest.mark.exhaustive
def test_a_step_whose_products_are_regrouped_is_taken_as_it_is_written(tmp_path, monkeypatch):
    """Which products TensorFlow regroups depends on the whole graph: here those of the replay, and not the run's."""
    as_it_was = attempts.Attempts.as_it_was

    @contextlib.contextmanager
    def regrouping(self):
        with as_it_was(self), contextlib.nullcontext() if self.literal else products_regrouped(True):
            yield

    monkeypatch.setattr(attempts.Attempts, "as_it_was", regrouping)
    try:
        with products_regrouped(False):
            planted.regrouped(tmp_path).run(planted.STEPS["regrouped"])
            found = explain(planted.regrouped(tmp_path))
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})
    assert (found.verdict, found.where, found.layer, found.kind) == ("loss", "forward", "cube", "inf")
    assert "'cube' in float32" in [one.name for one in found.remedies if one.finite]
    assert found.reproduced


@pytest.mark.exhaustive
def test_a_scale_that_hides_the_cause_is_lowered_to_see_it(explained):
    found = explained("root_under_an_overflow")
    assert (found.loss_scale, found.seen_at, found.operation) == (2.0**10, 1.0, "SqrtGrad")


@pytest.mark.slow
def test_a_loss_is_a_loss_by_any_name(runs, tried):
    tried(Kind.LOSS_IN_FLOAT32, Kind.PREDICTIONS_CLIPPED, Kind.ALL_IN_FLOAT32)
    found = explain(planted.nameless_loss(runs("nameless_loss")), 1)
    assert (found.verdict, found.where, found.operation) == ("loss", "forward", "Log")
    assert not [one.name for one in found.remedies if one.finite and not one.name.startswith("predictions")]


@pytest.mark.exhaustive
def test_the_step_is_traced_once_for_each_change_and_the_folder_is_only_read(runs, monkeypatch):
    """Tracing takes most of the time: the step unchanged, measured, and for each remedy that changes it."""
    traced, run = [], runs("nan_batch")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    take = attempts.Attempts.take_inlined
    monkeypatch.setattr(attempts.Attempts, "take_inlined", lambda self, batch: (traced.append(1), take(self, batch))[1])
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    tf.get_logger().addHandler(handler)
    try:
        found = explain(planted.nan_batch(run))
    finally:
        tf.get_logger().removeHandler(handler)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()} == before
    changes = [one.name for one in found.remedies if one.name != "another batch"]
    assert len(traced) == 2 + len(changes)
    assert [record.getMessage() for record in records] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "layers"), [("small_epsilon", ["norm"]), ("nan_batch", None), ("healthy", [])])
def test_the_cure_is_the_smallest_set_of_layers(runs, name, layers):
    """None where float32 does not help, and nothing where the step passes."""
    step = {"small_epsilon": 2, "nan_batch": 3, "healthy": 12}[name]
    assert cure(getattr(planted, name)(runs(name)), step) == layers
