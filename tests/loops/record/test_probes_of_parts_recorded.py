"""Guards what a `Trace`, TensorBoard and a report make of the probes of the parts of a `ComposedStep`."""

import numpy as np
import pytest
from composed_cases import Players, dataset
from tensorboard_cases import descriptions, values

import loops
import scaler
from loops.record.reading import as_recorded
from loops.record.trace.visit_columns import noise_pairs
from loops.views.report.write import write_report
from scaler import observe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_graphs")]
KINDS = [*observe.KINDS[:3], "update_rms"]


def probed(players, **arguments):
    step = players.step
    names = arguments.pop("names", ("critic", "actor"))
    probes = {name: observe.watch(getattr(players, name), **{"kinds": KINDS} | arguments) for name in names}
    return loops.ComposedStep(
        step.parts, step.forward, loss_scaler=step.loss_scaler, accumulate=step.accumulate, probes=probes
    )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:TensorBoard is not installed")
def test_what_parts_with_turns_and_scalers_of_their_own_leave(tmp_path):
    """Of the second step the critic's loss is infinite; the actor's turn is every other step."""
    players, seen = Players("turns", "float16", every=2), []
    step = probed(players)
    actions = [
        loops.Trace(tmp_path / "trace.arrow", every=1),
        loops.TensorBoard(tmp_path / "board", every=1),
        loops.JsonLines(tmp_path / "steps.jsonl"),
        seen.append,
    ]
    loops.Loop(step, dataset(6, bad=((2, "critic"),)), steps_per_call=3, actions=actions).run(6)
    amax = {name: np.concatenate([visit.vectors[f"{name}/amax"] for visit in seen]) for name in step.probes}
    tables = loops.observe.read(tmp_path / "trace.arrow")
    for name, watch in step.probes.items():
        for place, row in enumerate(watch.names):
            kind, _, path = row.partition("/")
            column = tables.steps[f"amax/{kind}/{name}/{path}"].to_pylist()
            turns = range(6) if name == "critic" else (1, 3, 5)
            expected = [float(amax[name][at, place]) if at in turns else None for at in range(6)]
            np.testing.assert_equal(column, expected)
    assert tables.lacks == ()
    # Each part has a scale of its own, and so the step has none.
    for name in ("critical_low", "critical_high", "loss_scale"):
        assert tables.steps[name].null_count == 6 or np.isnan(tables.steps[name].to_numpy()).all()
    # The largest of the activations decides, whosever it is.
    rows = {name: [row.startswith("activations/") for row in watch.names] for name, watch in step.probes.items()}
    largest = np.maximum(*(amax[name][:, rows[name]].max(axis=1) for name in rows))
    np.testing.assert_allclose(tables.steps["headroom"].to_numpy(), np.log2(65504 / largest), rtol=1e-6)
    counted = tables.histograms
    of_actor = ["/actor/" in name for name in counted["tensor"].to_pylist()]
    assert set(counted["step"].to_numpy()[of_actor]) == {2, 4, 6}

    shown, said = {}, descriptions(tmp_path / "board")
    for _, tag, step, _, _ in values(tmp_path / "board"):
        shown.setdefault(tag, set()).add(step)
    assert shown["actor/activations/headroom"] == {2, 4, 6}
    assert shown["critic/activations/headroom"] == {1, 2, 3, 4, 5, 6}
    assert said["critic/scaler/headroom"] == said["actor/scaler/headroom"] != ""
    assert shown["update_rms/actor/dense"] == {2, 4, 6}
    assert shown["update_rms/critic/dense"] == {1, 3, 4, 5, 6}
    assert "exponents/weight_gradients/actor/dense/kernel" in shown

    found = as_recorded(tmp_path)
    assert "activations/actor/batch_normalization" in found.tensors.names
    assert "actor/dense" in found.gauges.of("update_rms").names
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "critic/dense" in text
    assert "actor/dense" in text


@pytest.mark.exhaustive_with("watched0")
@pytest.mark.parametrize("watched", [("critic", "actor"), ("critic",)])
def test_of_one_scaler_the_critical_scale_is_that_of_the_step(tmp_path, watched):
    players, seen = Players("one scaler", "float16"), []
    step = probed(players, names=watched)
    loops.Loop(step, dataset(2), steps_per_call=2, actions=[loops.Trace(tmp_path / "trace.arrow"), seen.append]).run(2)
    tables = loops.observe.read(tmp_path / "trace.arrow")
    assert tables.lacks == (() if len(watched) == 2 else ("weights",))
    np.testing.assert_array_equal(tables.steps["loss_scale"].to_numpy(), seen[0].outputs["critic/loss_scale"])
    # The next power of two at which the largest gradient, in float16 throughout, would overflow.
    largest = np.zeros(2)
    for name, watch in step.probes.items():
        rows = ["_gradients/" in row for row in watch.names]
        largest = np.maximum(largest, seen[0].vectors[f"{name}/amax"][:, rows].max(axis=1))
    scale = seen[0].outputs["critic/loss_scale"]
    # A part that is not measured may overflow first.
    expected = 2.0 ** np.floor(np.log2(65520 * scale / largest)) if len(watched) == 2 else np.full(2, np.nan)
    np.testing.assert_array_equal(tables.steps["critical_low"].to_numpy(), expected)


def test_noise_scales_by_name():
    assert noise_pairs(["noise_scale/noise", "noise_scale/signal"]) == [
        ("noise_scale", "noise_scale/noise", "noise_scale/signal")
    ]
    names = ["noise_scale/a/noise", "noise_scale/a/signal", "update_rms/a/noise", "noise_scale/b/noise"]
    assert noise_pairs(names) == [("noise_scale/a", "noise_scale/a/noise", "noise_scale/a/signal")]


def test_a_forecast_of_parts_is_refused():
    players = Players("turns")
    with pytest.raises(scaler.InvalidArgument, match="a ComposedStep has no loss of its own"):
        loops.Loop(probed(players), dataset(2), actions=[loops.Forecast()]).run(2)
