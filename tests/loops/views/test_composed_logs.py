"""A recorded run of a composed step is told and compared by the losses of its parts."""

import keras
import pytest
import tensorflow as tf
from models import plain_model

import loops
from loops.observe import compare
from loops.record import read_run
from loops.record.summary import digest, sentence
from loops.views.report.write import write_report


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of two parts, of which the second takes every third turn; in the second run its rate is another."""
    folders = []
    for name, rate in (("p", 0.01), ("q", 0.02)):
        keras.utils.set_random_seed(1)
        folder = tmp_path_factory.mktemp(name)
        models = [plain_model(), plain_model()]
        parts = [
            loops.Part(part, model, lambda batch, model=model: tf.reduce_mean(model(batch[0]) ** 2), own, every=every)
            for part, model, own, every in zip(
                ("critic", "actor"),
                models,
                (keras.optimizers.SGD(0.01), keras.optimizers.SGD(rate)),
                (1, 3),
                strict=True,
            )
        ]
        x = tf.random.stateless_normal([12, *models[0].input_shape[1:]], [1, 2])
        data = tf.data.Dataset.from_tensors((x, x)).repeat()
        loops.Loop(loops.ComposedStep(parts), data, actions=[loops.JsonLines(folder / "steps.jsonl")]).run(12)
        folders.append(folder)
    return folders


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
