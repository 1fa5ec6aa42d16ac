"""Guards the comparison of two runs: where they part is where they were made to, and the closer one is named."""

import json

import command_cases
import keras
import numpy as np
import pytest
from loop_cases import dataset
from models import plain_model, squared_error
from recorded_cases import write_run

import loops
import scaler


def growing(error, start=1):
    """Magnitudes that are off by an error from a step on."""
    return lambda step, place: 2.0 ** (place + 1) * (1 + error * (step >= start))


def by_name(found):
    return {row.name: row for row in found.rows}


def test_the_same_run_twice_differs_in_nothing(tmp_path):
    run = write_run(tmp_path / "run")
    found = loops.observe.compare(run, run)
    assert (found.differs_at, found.parts_at, found.scale_differs_at, found.decision_differs_at) == (None,) * 4
    # Two steps were skipped: their batches moved no weight, and are left out.
    assert (found.by, found.steps, found.lost, found.other_batches_at) == ("update", 58, (2, 2), None)
    assert "Nothing differs in 58 updates" in found.sentence
    assert "lost 2 of 60" in found.sentence
    assert found.runs[0] != found.runs[1]


def test_where_they_part_and_by_how_much(tmp_path):
    one = write_run(tmp_path / "one", skips=())
    other = write_run(tmp_path / "other", skips=(), loss=lambda step: 3.0 / step + (step >= 30), amax=growing(1.0, 17))
    found = loops.observe.compare(one, other)
    assert (found.steps, found.differs_at, found.parts_at) == (60, 17, 17)
    row = by_name(found)["activations/dense"]
    assert (row.octaves, row.largest, row.steps) == (1.0, 1.0, 60)
    assert by_name(found)["loss"].parts_at == 30
    assert "They part at update 17: activations/dense by 1 octave," in found.sentence
    assert "Cannot tell which is closer" in found.sentence


def test_rounding_is_no_parting(tmp_path):
    one, other = write_run(tmp_path / "one", skips=()), write_run(tmp_path / "other", skips=(), amax=growing(2**-9, 9))
    found = loops.observe.compare(one, other)
    assert (found.differs_at, found.parts_at) == (9, None)
    assert "differ from update 9 on, by no more than rounding" in found.sentence
    far = write_run(tmp_path / "far", skips=(), amax=growing(2**-6, 9))
    assert loops.observe.compare(one, far).parts_at == 9


def test_gradients_are_compared_unscaled_and_not_where_they_overflowed(tmp_path):
    one = write_run(tmp_path / "one", skips=(1, 2))

    def double(step, place):
        return 2.0 ** (place + 1) * (2.0 if place else 1.0)

    other = write_run(tmp_path / "other", skips=(), scale=lambda step: 2.0**16, amax=double)
    found = loops.observe.compare(one, other)
    assert {row.differs_at for row in found.rows if row.name != "loss"} == {None}
    assert (found.scale_differs_at, found.decision_differs_at) == (1, 1)
    assert by_name(found)["activation_gradients/dense"].steps == 58


def test_a_micro_batch_of_a_window_is_not_skipped(tmp_path):
    for name, window in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": 1.0, "loss_scale": 1.0, "attempted": step % window == 0} for step in range(1, 7)]
        lines = [json.dumps({**row, "applied": row["attempted"]}) + "\n" for row in rows]
        (tmp_path / name / "steps.jsonl").write_text("".join(lines))
    found = loops.observe.compare(tmp_path / "one", tmp_path / "two")
    assert (found.decision_differs_at, found.scale_differs_at) == (None, None)
    assert "skipped step" not in found.sentence
    assert found.settings == ("accumulate is 1 and 2",)
    assert "They were set up differently: accumulate is 1 and 2. Some differences come from that." in found.sentence


def test_what_became_zero_is_an_infinite_difference(tmp_path):
    one = write_run(tmp_path / "one", skips=())
    other = write_run(tmp_path / "other", skips=(), amax=lambda step, place: 2.0 ** (place + 1) if step < 5 else 0.0)
    row = by_name(loops.observe.compare(one, other))["activations/dense"]
    assert (row.parts_at, row.octaves, row.largest) == (5, np.inf, 0.0)


LEVELS = np.random.default_rng(0).normal(size=100)


def by_batch(error=0.0, skips=0):
    """Magnitudes of a run that skips its first steps: they fall with the updates, and move with the batch."""
    return lambda step, place: 2.0 ** (place + 0.5 * LEVELS[step] - 0.1 * (step - skips)) * (1 + error)


def test_runs_are_aligned_by_applied_updates(tmp_path):
    """At the third update one of them is at its eighth step: what depends on the updates alone is the same."""

    def amax(skips):
        return lambda step, place: 2.0 ** (place + max(step - skips, 0) % 7)

    late = write_run(tmp_path / "late", skips=range(1, 6), amax=amax(5), loss=lambda step: 1.0 + max(step - 5, 0))
    early = write_run(tmp_path / "early", skips=(), amax=amax(0), loss=lambda step: 1.0 + step)
    found = loops.observe.compare(late, early)
    assert (found.by, found.steps, found.lost, found.batches) == ("update", 55, (5, 0), (60, 60))
    assert (found.differs_at, found.other_batches_at) == (None, 1)
    assert "late lost 5 of 60, early none of 60." in found.sentence
    assert "From update 1 on they take different batches" in found.sentence


def test_the_steps_of_both_are_told_where_they_part(tmp_path):
    late = write_run(tmp_path / "late", skips=(1, 2))
    other = write_run(tmp_path / "other", skips=(), loss=lambda step: 3.0 / (step + 2) * (1 + (step == 9)))
    found = loops.observe.compare(late, other)
    assert (found.parts_at, found.parts_at_steps, found.to_dict()["parts_at_steps"]) == (9, (11, 9), [11, 9])
    assert "They part at update 9 (step 11 of late, step 9 of other): loss" in found.sentence
    assert "took the same batch" not in found.sentence


def test_before_the_first_skip_the_batches_are_the_same(tmp_path):
    one, other = write_run(tmp_path / "one", skips=(30,)), write_run(tmp_path / "other", skips=())
    found = loops.observe.compare(one, other)
    assert (found.other_batches_at, found.parts_at) == (30, 30)
    both = loops.observe.compare(one, write_run(tmp_path / "both", skips=(30,)))
    assert both.other_batches_at is None


@pytest.mark.parametrize(("error", "closer"), [(0.001, None), (0.3, None), (30.0, "fixed")])
def test_a_run_that_lost_batches_is_not_blamed_for_its_batches(tmp_path, error, closer):
    true = write_run(tmp_path / "true", skips=(), amax=by_batch(), dtype="float32")
    fixed = write_run(tmp_path / "fixed", skips=(), amax=by_batch(0.01))
    late = write_run(tmp_path / "late", skips=range(1, 6), amax=by_batch(error, 5))
    found = loops.observe.compare(late, fixed, true)
    assert found.closer == closer
    row = by_name(found)["activations/dense"]
    assert (row.of_batches[0] > 0.1, row.of_batches[1], row.hidden) == (True, 0.0, closer is None)
    if closer is None:
        assert (
            "Cannot tell which is closer to float32 (true): in 4 of 4 values one run is farther from true by no more"
            in found.sentence
        )


def test_a_run_that_lost_batches_may_be_the_closer_one(tmp_path):
    """As where every batch is the same."""
    true = write_run(tmp_path / "true", skips=(), amax=lambda step, place: 2.0 ** -(0.1 * step), dtype="float32")
    rough = write_run(tmp_path / "rough", skips=(), amax=lambda step, place: 2.0 ** -(0.1 * step) * 1.05)
    late = write_run(tmp_path / "late", skips=range(1, 6), amax=lambda step, place: 2.0 ** -(0.1 * (step - 5)))
    found = loops.observe.compare(late, rough, true)
    assert {row.closer for row in found.rows if row.name != "loss"} == {0}
    assert found.closer == "late"


def test_micro_batches_count_with_their_windows():
    """Two to an update; the first window was skipped, and the last is not whole."""
    loss = np.array([8.0, 8.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    windows = {"loss": loss, "attempted": [0, 1] * 3 + [0], "applied": [0, 0, 0, 1, 0, 1, 0]}
    plain = {"loss": loss[2:6], "attempted": [0, 1] * 2, "applied": [0, 1] * 2}
    found = loops.observe.compare(windows, plain)
    assert (found.by, found.steps, found.lost, found.differs_at) == ("applied micro-batch", 4, (2, 0), None)
    assert found.sentence.startswith("Nothing differs in 4 applied micro-batches.")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"loss": [1.0, 2.0, 3.0]}, "does not record which steps were applied"),
        ({"loss": [1.0, 2.0], "step": [1, 3], "applied": [1, 1]}, "does not record every step from the first on"),
        ({"loss": [1.0] * 3, "applied": [1, np.nan, 1]}, "does not record for every step whether it was applied"),
    ],
)
def test_what_does_not_tell_its_updates_is_aligned_by_steps(other, why):
    found = loops.observe.compare({"loss": [1.0, 2.0, 3.0], "applied": [0, 1, 1]}, other)
    assert (found.by, found.lost) == ("step", (1, None))
    assert f"aligned by step, not by applied update: arrays 2 {why}, so its updates cannot be counted" in found.sentence
    assert found.steps == len(other["loss"])


@pytest.fixture
def three(tmp_path):
    near = write_run(tmp_path / "near", skips=(), amax=growing(0.01))
    far = write_run(tmp_path / "far", skips=(), amax=growing(0.1))
    true = write_run(tmp_path / "true", skips=(), dtype="float32")
    return near, far, true


def test_the_closer_one_to_float32_is_named(three):
    near, far, true = three
    for pair, place in (((near, far), 0), ((far, near), 1)):
        found = loops.observe.compare(*pair, true)
        assert (found.closer, found.reference) == ("near", "true")
        assert {row.closer for row in found.rows if row.name != "loss"} == {place}
        assert "near is closer to float32 (true), in 3 of 4 values" in found.sentence


def test_one_of_the_two_may_be_the_float32_run(three):
    near, _, true = three
    found = loops.observe.compare(near, true)
    assert (found.closer, found.reference) == (None, "true")
    assert "true is float32; near is farthest from it in activations/dense, by 0.014 octaves" in found.sentence


def test_runs_of_one_name_are_told_apart_by_their_places(tmp_path):
    """The float32 run too: a sentence that only says `run` may mean any of the three."""
    one = write_run(tmp_path / "one" / "run", skips=(), amax=growing(0.01))
    other = write_run(tmp_path / "other" / "run", skips=(), amax=growing(0.1))
    true = write_run(tmp_path / "true" / "run", skips=(), dtype="float32")
    found = loops.observe.compare(one, other, true)
    assert (found.runs, found.reference, found.closer) == ((str(one), str(other)), str(true), str(one))
    assert f"{one} is closer to float32 ({true})" in found.sentence
    found = loops.observe.compare(one, true, true)
    assert (found.runs, found.reference) == ((str(one), str(true)), str(true))
    assert loops.observe.compare(one, one, true).runs == ("run 1", "run 2")
    assert loops.observe.compare(one, one, true).reference == str(true)


def test_a_reference_that_is_not_float32_is_refused(three):
    with pytest.raises(
        scaler.InvalidArgument, match="a reference must compute in float32 throughout, and nothing says so"
    ):
        loops.observe.compare(three[1], three[2], three[0])


def test_runs_of_other_models_have_their_losses(tmp_path):
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", names=("activations/conv",))
    found = loops.observe.compare(one, other)
    assert list(by_name(found)) == ["loss"]
    assert found.alone[1] == ("activations/conv",)
    assert "no tensor in common" in found.sentence


def test_without_a_trace_the_losses_are_compared(tmp_path):
    one, other = (write_run(tmp_path / name, trace=False) for name in ("one", "other"))
    (other / "summary.json").write_text('{"policy": "float32"}')
    found = loops.observe.compare(one, other)
    assert found.reference == "other"
    assert "Only their losses were compared, since not both have a trace" in found.sentence
    assert all("hs.Trace(" in note for note in found.notes)


def test_no_step_in_common():
    found = loops.observe.compare({"loss": [1.0], "step": [1]}, {"loss": [1.0], "step": [2]})
    assert found.sentence == "arrays 1 and arrays 2 have no step in common."


def test_one_step_is_a_step_and_one_octave_an_octave():
    same, other, twice = ({"loss": [value], "step": [1]} for value in (1.0, 1.0, 2.0))
    assert loops.observe.compare(same, other).sentence.startswith("Nothing differs in 1 step.")
    assert "loss by 1 octave." in loops.observe.compare(same, twice).sentence
    said = loops.observe.compare(same, {"loss": [1.0 + 1e-6], "step": [1]}).sentence
    assert "by no more than rounding in the only step." in said


def command(capsys, *arguments):
    return command_cases.run(capsys, "lab", "compare", *arguments)


def test_the_command_prints_a_table_or_json(three, capsys):
    status, printed, _ = command(capsys, *three)
    assert status == 0
    line = next(line for line in printed.splitlines() if line.startswith("activations/dense"))
    assert line.split() == ["activations/dense", "float16", "1", "1", "0.123", "0.123", "near"]
    _, printed, _ = command(capsys, three[0], three[2])
    assert "from float32" in printed
    status, printed, _ = command(capsys, *three, "--json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(printed, parse_constant=refuse)
    assert (status, found["closer"], found["parts_at"]) == (0, "near", 1)
    assert {row["name"] for row in found["rows"]} >= {"loss", "activations/dense"}


def test_a_missing_run_is_one_line(tmp_path, capsys):
    status, printed, errors = command(capsys, tmp_path / "none", tmp_path)
    assert (status, printed) == (2, "")
    assert "no such folder" in errors


def test_a_parting_that_no_rounding_makes_is_put_down_to_something_else(tmp_path):
    """As of another learning rate from update 17 on: until then the runs are the same."""
    base, true = write_run(tmp_path / "base", skips=()), write_run(tmp_path / "true", skips=(), dtype="float32")
    other = write_run(tmp_path / "other", skips=(), amax=growing(1.0, 17))
    found = loops.observe.compare(base, other, true)
    assert found.at_once
    assert "equal to the last bit, in the same formats and at the same loss scale, so something" in found.sentence
    assert "in 3 of 4 values, which says nothing about their arithmetic." in found.sentence
    by_rounding = write_run(
        tmp_path / "by_rounding", skips=(), amax=lambda s, p: growing(2**-9, 9)(s, p) * (1 + (s > 20))
    )
    of_another_format = write_run(tmp_path / "of_another", skips=(), amax=growing(1.0, 17), dtype="bfloat16")
    at_another_scale = write_run(tmp_path / "scaled", skips=(), scale=lambda step: 2.0 ** (15 - (step > 9)))
    for another in (by_rounding, of_another_format, at_another_scale):
        found = loops.observe.compare(base, another, true)
        assert found.parts_at > 1
        assert not found.at_once
        assert "nothing of their arithmetic" not in found.sentence


def test_nothing_is_said_of_loss_scales_that_no_log_has(tmp_path):
    runs = [tmp_path / "one", tmp_path / "other"]
    for place, last in zip(runs, (1.0, 2.0), strict=True):
        place.mkdir()
        rows = [{"step": step, "loss": last if step == 9 else 0.5, "applied": True} for step in range(1, 10)]
        (place / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = loops.observe.compare(*runs)
    assert (found.at_once, found.scales_known) == (True, False)
    assert "at the same loss scale" not in found.sentence
    assert "unless the scales differ, something other than arithmetic parts them" in found.sentence


def test_settings_that_the_runs_say_are_compared(tmp_path, three):
    near, far, true = three
    for run, rate in ((near, 0.1), (far, 0.2)):
        (run / "summary.json").write_text(json.dumps({"policy": run.name, "learning_rate": rate, "seed": 3}))
    found = loops.observe.compare(near, far, true)
    assert found.settings == ("learning_rate is 0.1 and 0.2",)
    assert (
        "They were set up differently: learning_rate is 0.1 and 0.2. Some differences come from that." in found.sentence
    )
    assert "in 3 of 4 values, which says nothing about their arithmetic." in found.sentence


def test_a_log_that_lacks_steps_does_not_tell_a_window(tmp_path):
    """All it has may be the ends of windows, or none."""
    run = write_run(tmp_path / "whole", skips=(), trace=False)
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "thin").mkdir()
    (tmp_path / "thin" / "steps.jsonl").write_text("".join(lines[1::2]))
    assert loops.observe.compare(run, tmp_path / "thin").settings == ()


@pytest.mark.exhaustive
def test_settings_are_read_from_the_checkpoints_of_a_run(tmp_path):
    runs = []
    for rate in (0.1, 0.2):
        runs.append(write_run(tmp_path / str(rate), skips=()))
        step = loops.TrainStep(plain_model(), squared_error, keras.optimizers.SGD(rate))
        loops.Loop(step, dataset(2, 8), actions=[loops.Checkpoint(runs[-1] / "checkpoints", every=1)]).run(1)
    assert loops.observe.compare(*runs).settings == ("optimizer.learning_rate is 0.1 and 0.2",)


def test_logs_that_lack_steps_are_not_said_to_part_by_something_else(tmp_path):
    """The loss parts at the second logged step, and what was before it is in no log."""
    places = [write_run(tmp_path / name, skips=(), trace=False) for name in ("one", "other")]
    for place, more in zip(places, (0.0, 1.0), strict=True):
        lines = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()][4::5]
        for line in lines[1:]:
            line["loss"] += more
        (place / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = loops.observe.compare(*places)
    assert (found.by, found.at_once) == ("step", False)
    assert "other than arithmetic" not in found.sentence
