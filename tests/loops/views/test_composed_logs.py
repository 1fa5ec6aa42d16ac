"""A recorded run of a composed step is told and compared by the losses of its parts."""

import io
import json

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from loop_cases import afresh
from models import one_layer

import loops
import scaler
from loops.observe import compare
from loops.record import read_run
from loops.record.log import difference
from loops.record.summary import digest, sentence
from loops.record.tensorboard import curves_of, metadata
from loops.support.part_names import columns_of
from loops.views import plots
from loops.views.report.figures import loss_figures, part_scale_figures, scale_figure
from loops.views.report.tables import strategies_table
from loops.views.report.write import write_report
from loops.views.watch import LiveRun, line, panel

STEPS = 30


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Two runs of two parts, of which the second takes every third turn; in the second run its rate is another.

    Their folders, what `Progress` showed of both, and their visits.
    """
    folders, said, visits, parts = [], io.StringIO(), [], []
    for name, every in (("critic", 1), ("actor", 3)):
        model, optimizer = one_layer(), keras.optimizers.SGD(0.01)
        loss = lambda batch, model=model: tf.reduce_mean(model(batch[0]) ** 2)  # noqa: E731
        parts.append(loops.Part(name, model, loss, optimizer, every=every))
    x = tf.random.stateless_normal([12, 4], [1, 2])
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    again = afresh(loops.ComposedStep(parts), data)
    for name, rate in (("p", 0.01), ("q", 0.02)):
        folders.append(tmp_path_factory.mktemp(name))
        progress = loops.Progress(console=rich.console.Console(file=said, width=300))
        loop = again(data, loops.JsonLines(folders[-1] / "steps.jsonl"), progress, visits.append)
        optimizer.learning_rate = rate
        loop.run(12)
    return folders, said.getvalue(), visits


@pytest.fixture
def runs(seen):
    return seen[0]


def test_two_runs_are_compared_by_the_losses_of_their_parts(runs):
    found = compare(*runs)
    assert [row.name for row in found.rows if row.parts_at is not None] == ["loss of actor"]
    assert "loss of actor by" in str(found)
    assert "Only their losses were compared" in str(found)


def test_a_report_tells_and_draws_them(runs, tmp_path):
    said = sentence(run := read_run(runs[0]), digest(run))
    assert "the loss of critic went from " in said
    assert "the loss of actor went from " in said
    write_report([runs[0]], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Loss of critic" in page
    assert "Loss of actor" in page
    assert "not finite" not in page.partition("Loss of actor")[2].partition("</figure>")[0]


def log(folder, *, scale=64.0, applied=True, far=2.0, **others):
    """The log of a run of two parts, of which "actor" takes every third turn, as given from step 10 on."""
    folder.mkdir()
    rows = []
    for step in range(1, STEPS + 1):
        turn, late = step % 3 == 0, step >= 10
        critic = {"loss": 1.0, "loss_scale": 64.0, "attempted": True, "applied": True}
        actor = {
            "loss": (far if late else 2.0) if turn else None,
            "loss_scale": scale if late else 64.0,
            "attempted": turn,
            "applied": turn and (applied or not late),
        }
        parts = {
            f"{part}/{name}": value
            for part, row in (("critic", critic), ("actor", actor))
            for name, value in row.items()
        }
        rows.append({"step": step, **parts, "attempted": True, "applied": True, **others})
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_another_scale_of_a_part_is_named(tmp_path):
    found = compare(log(tmp_path / "p"), log(tmp_path / "q", scale=32.0))
    assert (found.scale_differs_at, found.scale_differs_in) == (10, ("actor",))
    assert (found.decision_differs_at, found.decision_differs_in) == (None, ())
    assert "Their loss scales differ from step 10 on (part actor)." in found.sentence


def test_another_decision_of_a_part_is_named(tmp_path):
    found = compare(log(tmp_path / "p"), log(tmp_path / "q", applied=False))
    assert (found.decision_differs_at, found.decision_differs_in) == (12, ("actor",))
    assert "Only one of them skipped step 12 (part actor)." in found.sentence


def test_scales_are_known_of_the_steps_that_a_part_took(tmp_path):
    """So that a sudden difference at equal scales is said to have another cause."""
    found = compare(log(tmp_path / "p"), log(tmp_path / "q", far=3.0))
    assert (found.scales_known, found.at_once) == (True, True)
    assert "at the same loss scale" in found.sentence
    assert not compare(log(tmp_path / "r"), log(tmp_path / "s", scale=None)).scales_known


def test_the_table_of_runs_tells_the_parts(tmp_path):
    runs = [read_run(log(tmp_path / "p", scale=32.0)), read_run(log(tmp_path / "q"))]
    table = strategies_table(runs, [digest(run) for run in runs])
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["final loss"] == ["critic 1, actor 2", "critic 1, actor 2"]
    assert cells["final scale"] == ["critic 2^6, actor 2^5", "2^6"]
    assert cells["mean log2 scale"] == ["critic 6.0, actor 5.3", "6.0"]


def test_the_parts_stand_in_the_order_of_the_log(tmp_path):
    """Not in that of a set of strings, which is another one in each process."""
    found = list(read_run(log(tmp_path / "p")).columns)
    assert [name for name in found if "/" in name][::4] == ["critic/loss", "actor/loss"]


def test_a_loss_that_is_not_finite_is_counted_at_the_turns_of_its_part(tmp_path):
    critic, actor = loss_figures(read_run(log(tmp_path / "p", far=None)), 100)
    assert "not finite" not in str(critic.drawn)
    # Turns 12, 15, ..., 30.
    assert "not finite at 7 steps" in str(actor.drawn)
    assert (critic.heading, actor.said) == ("Loss of critic", "The loss of actor.")


def test_the_scale_of_each_part_is_drawn_with_its_skips(tmp_path):
    critic, actor = part_scale_figures(read_run(log(tmp_path / "p", scale=32.0, applied=False)), 100)
    assert critic.drawn is None
    assert critic.said == "The loss scale of critic was 2^6 at each step. No step was skipped."
    assert actor.drawn.alt == "Loss scale of actor over 30 steps, from 2^6 to 2^5; skipped at 7 steps."
    write_report([tmp_path / "p"], tmp_path / "report.html")
    assert "Loss scale of actor" in (tmp_path / "report.html").read_text()


def test_a_scale_that_stays_is_said_and_not_drawn(tmp_path):
    still = scale_figure(read_run(plain(tmp_path / "still", [64.0] * 6)), 100)
    assert (still.drawn, still.said) == (None, "The loss scale was 2^6 at each step. No step was skipped.")
    moved = scale_figure(read_run(plain(tmp_path / "moved", [64.0] * 5 + [32.0])), 100)
    assert moved.drawn.alt == "Loss scale over 6 steps, from 2^6 to 2^5; no step was skipped."
    skipped = scale_figure(read_run(plain(tmp_path / "skipped", [64.0] * 6, applied=False)), 100)
    assert skipped.drawn.alt.endswith("; 6 steps were skipped: 6 by unknown.")
    page = tmp_path / "report.html"
    write_report([tmp_path / "still"], page)
    text = page.read_text(encoding="utf-8").partition("Loss scale and skips")[2].partition("</figure>")[0]
    assert "2^6 at each step" in text
    assert "<svg" not in text
    assert "<details" not in text


def plain(folder, scales, applied=True):
    """The log of a step of one loss with these scales."""
    folder.mkdir()
    lines = [
        {"step": place, "loss": 1 / place, "attempted": True, "applied": applied, "loss_scale": scale, "grad_norm": 1.0}
        for place, scale in enumerate(scales, 1)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_an_output_of_ones_own_that_ends_in_loss_is_no_part(tmp_path):
    known = ["extra/loss", "loss", "critic/loss", "critic/applied", "deep/er/loss", "deep/er/applied"]
    assert columns_of(known, "loss") == {"": "loss", "critic": "critic/loss", "deep/er": "deep/er/loss"}
    assert columns_of(["extra/loss"], "loss") == {}
    own = {"extra/loss": 5.0, "loss": 1.0}
    runs = [log(tmp_path / name, **own) for name in "pq"]
    found = compare(*runs)
    assert {row.name for row in found.rows} == {"loss", "loss of critic", "loss of actor"}
    write_report(runs, tmp_path / "report.html")
    rows = [{"step": 1, **own}]
    assert difference(rows, {1: {name: np.asarray(value) for name, value in own.items()}}) is None


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_losses_and_scales_of_parts_are_plotted(tmp_path):
    folder = log(tmp_path / "p", scale=32.0, applied=False, far=None)
    losses, scales = plots.loss(folder), plots.loss_scale(folder)
    assert legend_of(losses) == legend_of(scales) == ["critic", "actor"]
    assert [axes.get_title(loc="left") for axes in losses.axes[1:]] == ["actor not finite: 7 steps"]
    assert [axes.get_title(loc="left") for axes in scales.axes[1:]] == ["actor: 7 skips"]
    with pytest.raises(scaler.InvalidArgument, match="loss: 8 losses of 4 runs: expected 1 to 6"):
        plots.loss(*[folder] * 4)


def test_parts_stand_side_by_side_with_other_runs(tmp_path):
    single = plain(tmp_path / "single", [64.0] * 6)
    write_report([single, log(tmp_path / "p"), log(tmp_path / "q"), log(tmp_path / "r")], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text().partition("Loss, side by side")[2].partition("</figure>")[0]
    names = ["single", "critic p", "actor p", "critic q", "actor q", "critic r"]
    assert f"Loss of {', '.join(names)} over their steps." in page
    assert "The first 6 of 7 are shown." in page


def test_a_run_that_is_watched_shows_its_parts(tmp_path):
    live = LiveRun(log(tmp_path / "p", scale=32.0))
    live.look()
    said = line(live)
    assert "critic scale 64  actor scale 32" in said
    assert "critic loss 1  actor loss 2" in said
    shown = panel(live, "p", 100, blocks=False).plain
    assert "actor loss scale" in shown
    assert len({row.index(value) for row, value in zip(shown.splitlines()[2:4], "12", strict=True)}) == 1


def test_progress_and_curves_show_the_parts(seen):
    _, said, visits = seen
    assert "critic loss" in said
    assert "actor scale" in said
    curves = curves_of(visits[-1], 0, named=True)
    assert {"critic/scaler/log2_scale", "actor/scaler/log2_scale"} <= set(curves)
    assert not [name for name in curves if name.endswith("loss_scale")]
    assert metadata("critic/scaler/log2_scale").summary_description.startswith("Log2 of the loss scale")
