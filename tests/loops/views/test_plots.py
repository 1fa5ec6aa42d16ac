"""Guards the plots of a run: each a Figure, of a folder, a trace or arrays, with what was recorded in it."""

import dataclasses

import numpy as np
import pytest
from recorded_cases import write_run

import loops
import scaler
from loops.record import as_recorded
from loops.views import plots
from loops.views.chart import NOT_MEASURED, heat_cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "mine")


def drawn(figure, tmp_path):
    """The first panel, once the figure is known to be one that can be saved."""
    figure.savefig(tmp_path / "figure.svg")
    return figure.axes[0]


def labels(axes):
    return [text.get_text() for legend in axes.figure.legends for text in legend.get_texts()]


def marks(strip):
    """The steps that a strip marks."""
    return [segment[0][0] for segment in strip.collections[0].get_segments()]


def test_each_is_a_figure_of_a_folder(folder, tmp_path):
    for plot in (plots.loss, plots.loss_scale, plots.headroom, plots.exponents):
        drawn(figure := plot(folder), tmp_path)
        assert [axes.get_xlabel() for axes in figure.axes].count("step") == 1
    axes = drawn(plots.histogram(folder, "activations/dense", 41), tmp_path)
    assert axes.get_title(loc="left") == "activations/dense, step 40"
    assert sum(bar.get_height() for bar in axes.patches if bar.get_height() < 1) == pytest.approx(0.9)


def test_skips_are_marked_by_cause():
    run = {"loss_scale": [8.0, 8.0, 4.0], "applied": [1, 0, 0], "cause": [None, "OVERFLOW", "LOSS"]}
    axes, *strips = plots.loss_scale(run).axes
    assert axes.lines[0].get_ydata().tolist() == [8, 8, 4]
    assert [strip.get_title(loc="left") for strip in strips] == ["LOSS: 1 skip", "OVERFLOW: 1 skip"]
    assert list(map(marks, strips)) == [[3], [2]]


def test_losses_of_several_runs(folder):
    axes = plots.loss(folder, {"loss": np.arange(1.0, 9.0)}).axes[0]
    assert labels(axes) == ["mine", "arrays"]
    _, strip = plots.loss({"loss": [1.0, np.nan, 3.0]}).axes
    assert marks(strip) == [2]
    assert strip.get_title(loc="left") == "not finite: 1 step"


def test_a_trace_has_headroom_and_a_map(folder):
    tables = loops.observe.read(folder / "trace.arrow")
    assert labels(plots.headroom(tables).axes[0]) == ["activations, weights", "gradients, at the loss scale"]
    axes = plots.exponents(tables, "weight_gradients").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense/kernel"]


def test_a_long_run_keeps_its_extremes():
    loss = np.ones(100_000)
    loss[70_000] = 50.0
    line = plots.loss({"loss": loss}).axes[0].lines[0]
    assert len(line.get_ydata()) < 10_000
    assert max(line.get_ydata()) == 50.0


def test_no_mark_of_a_long_run_is_lost():
    applied = np.ones(50_000)
    applied[[0, 25_000, 25_001, 49_999]] = 0
    _, strip = plots.loss_scale({"loss_scale": np.full(50_000, 8.0), "applied": applied}).axes
    assert marks(strip) == [1, 25_001, 50_000]


def test_a_run_without_a_finite_loss_stands_beside_others(folder):
    axes, strip = plots.loss(folder, {"loss": [np.nan, np.nan]}).axes
    assert labels(axes) == ["mine", "arrays"]
    assert strip.get_title(loc="left") == "arrays not finite: 2 steps"


def test_a_value_between_gaps_is_a_point():
    axes = plots.loss({"loss": [1.0, np.nan, 3.0, np.nan, 2.0, 4.0]}).axes[0]
    assert [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "."] == [[1, 3]]


def test_what_was_not_measured_is_not_zero(folder):
    """As between the turns of a part: its cells are empty, and the histogram is that of its last turn."""
    run = as_recorded(folder)
    measured = run.tensors
    place = measured.names.index("activations/dense")
    missing = measured.missing.copy()
    missing[20:, place] = True
    later = (measured.tensor == place) & (measured.counted > 20)
    entries = {name: getattr(measured, name)[~later] for name in ("counted", "tensor", "bin", "count")}
    amax = np.where(missing, np.float32(0), measured.amax)
    parted = dataclasses.replace(measured, missing=missing, amax=amax, **entries)
    _, cells = heat_cells(parted, np.array([place]), 6)
    assert (cells[0] == NOT_MEASURED).tolist() == [False, False, True, True, True, True]
    run = dataclasses.replace(run, tensors=parted)
    axes = plots.histogram(run, "activations/dense").axes[0]
    assert axes.get_title(loc="left") == "activations/dense, step 20"
    nothing = dataclasses.replace(
        parted, **{name: values[entries["tensor"] != place] for name, values in entries.items()}
    )
    with pytest.raises(loops.LoopError, match="no histograms of activations/dense, only of others"):
        plots.histogram(dataclasses.replace(run, tensors=nothing), "activations/dense")


def test_what_is_infinite_lies_on_the_edge():
    """Gradients that overflowed have no octave left: the curve leaves through the lower edge."""
    run = {"headroom": [3.0, -np.inf, 2.0]}
    axes = plots.headroom(run).axes[0]
    assert axes.lines[1].get_ydata()[1] == axes.get_ylim()[0]


def test_a_gap_stays_a_gap():
    loss = np.ones(10_000)
    loss[2_000:3_000] = np.nan
    axes = plots.loss({"loss": loss}).axes[0]
    x, y = axes.lines[0].get_data()
    assert np.isnan(y[(x > 1_900) & (x < 3_100)]).any()
    assert not np.isnan(y[(x < 1_900) | (x > 3_100)]).any()


@pytest.mark.parametrize("loss", [[5.0], [-2.0, 3.0], [1e200] * 90, [1e-300, 1e200] * 20])
def test_any_loss_is_drawn(tmp_path, loss):
    axes = drawn(plots.loss({"loss": loss}), tmp_path)
    low, high = axes.get_ylim()
    assert low < min(loss) <= max(loss) < high


@pytest.mark.parametrize(
    ("draw", "error", "said"),
    [
        (lambda run: plots.headroom(run), loops.LoopError, "not known"),
        (lambda run: plots.exponents(run), loops.LoopError, "no tensor was measured"),
        (lambda run: plots.histogram(run, "x"), loops.LoopError, "no histograms"),
        (lambda run: plots.loss_scale(run), loops.LoopError, "no loss_scale"),
        (lambda run: plots.loss(), scaler.InvalidArgument, "0 runs"),
        (lambda run: plots.loss(*[run] * 7), scaler.InvalidArgument, "7 runs"),
        (lambda run: plots.loss({"loss": [np.nan]}), loops.LoopError, "nothing to draw"),
        (lambda run: plots.loss(run, {"loss_scale": [1.0]}), loops.LoopError, "nothing to draw"),
        (lambda run: plots.loss({"loss": [1e300, 1e-300]}), loops.LoopError, "matplotlib draws numbers up to 1e"),
        (lambda run: plots.loss({"loss": ["low", "lower"]}), scaler.InvalidArgument, "expected numbers"),
    ],
)
def test_what_cannot_be_drawn_says_so(draw, error, said):
    with pytest.raises(error, match=said):
        draw({"loss": [1.0, 2.0]})


def test_a_tensor_or_kind_that_was_not_measured_is_refused(folder):
    with pytest.raises(scaler.InvalidArgument, match="activations/dense"):
        plots.histogram(folder, "activations/other")
    with pytest.raises(scaler.InvalidArgument, match="activation_gradients, activations, weight_gradients"):
        plots.exponents(folder, "slots")
