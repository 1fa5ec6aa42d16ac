"""Guards what a study says of time, memory and energy: measured between calls, counted once, a dash where unknown."""

import json
import sys
import types

import numpy as np
import pytest
import test_study_report
from test_study_report import DYNAMIC, FLOAT32, page_of

from halfstep.commands.study import cost_rows
from loops.loop.results import Counters
from loops.loop.visit import Visit
from loops.study import measured as module
from loops.study.compare import Estimate, duration
from loops.study.figures import costs_figure
from loops.study.measured import Costs, EnergyMeter, cost_cells, costs_of, has_costs
from loops.study.setups import choose_setups


def processor(powercap, name, energy, largest=10**9):
    place = powercap / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "name").write_text("package-0\n")
    (place / "energy_uj").write_text(f"{energy}\n")
    (place / "max_energy_range_uj").write_text(f"{largest}\n")


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.usefixtures("no_gpus")
def test_processors_add_up_and_parts_of_them_do_not(tmp_path):
    for name, energy in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 0), ("intel-rapl:0:0", 7)):
        processor(tmp_path, name, energy)
    meter = EnergyMeter(tmp_path)
    assert meter.sources == ["RAPL package-0", "RAPL package-0"]
    assert meter.joules() == 0
    processor(tmp_path, "intel-rapl:0", 6_500_000)
    processor(tmp_path, "intel-rapl:1", 250_000)
    assert meter.joules() == 1.75


@pytest.mark.usefixtures("no_gpus")
def test_a_counter_that_begins_again_loses_nothing(tmp_path):
    processor(tmp_path, "intel-rapl:0", 900, largest=999)
    meter = EnergyMeter(tmp_path)
    processor(tmp_path, "intel-rapl:0", 100, largest=999)
    assert meter.joules() == pytest.approx(200e-6)
    processor(tmp_path, "intel-rapl:0", 50, largest=999)
    assert meter.joules() == pytest.approx(1150e-6)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("energy", [None, "not a number"])
def test_a_machine_that_does_not_tell_is_no_error(tmp_path, energy):
    if energy:
        processor(tmp_path, "intel-rapl:0", energy)
    meter = EnergyMeter(tmp_path)
    assert (meter.sources, meter.joules()) == ([], None)


@pytest.mark.usefixtures("no_gpus")
def test_a_counter_that_goes_away_is_none(tmp_path):
    processor(tmp_path, "intel-rapl:0", 5)
    meter = EnergyMeter(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.joules() is None


def test_gpus_are_read_by_nvml(tmp_path, monkeypatch):
    used = iter([1000, 2000, 4000, 9000])
    nvml = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(used),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter(tmp_path)
    assert meter.sources == ["NVML GPU 0", "NVML GPU 1"]
    assert meter.joules() == (4000 - 1000 + 9000 - 2000) / 1000

    def fails(handle):
        raise RuntimeError("Not Supported")

    nvml.nvmlDeviceGetTotalEnergyConsumption = fails
    assert meter.joules() is None
    assert EnergyMeter(tmp_path).sources == []


def test_times_are_those_between_the_actions_without_the_first_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    costs = Costs(types.SimpleNamespace(joules=lambda: 10 * now[0]))
    for arrived, left in ((100.0, 101.0), (103.0, 110.0), (114.0, 114.5)):
        visit = Visit(Counters(4, 4, 4, True), {"loss": np.zeros(4)}, 0.0, 12)
        now[0] = arrived
        costs(visit)
        now[0] = left
        costs.leave(visit)
    assert costs.as_dict(None, 4, {}) == {"milliseconds": [500.0, 1000.0], "joules": [5.0, 10.0], "bytes": None}


def test_costs_of_a_set_up_are_medians_over_all_calls():
    runs = [
        {"costs": {"milliseconds": [1.0, 2.0], "joules": [], "bytes": None}},
        {"costs": {"milliseconds": [3.0, 4.0, 5.0], "joules": [], "bytes": {"total": 7_654_321}}},
        {},
    ]
    row = costs_of(runs)
    assert row == {
        **{"milliseconds": 3.0, "milliseconds_low": 2.0, "milliseconds_high": 4.0},
        **{"joules": None, "bytes": 7_654_321},
    }
    assert cost_cells(row) == ("3", "7.65", "–")
    assert cost_cells(costs_of([])) == cost_cells({}) == ("–", "–", "–")


@pytest.fixture
def costly(tmp_path, monkeypatch):
    made = test_study_report._run

    def with_costs(setup, seed, *rest):
        found = {"milliseconds": [2.0 + seed, 4.0], "joules": [0.5] * (setup is FLOAT32), "bytes": {"total": 3_000_000}}
        return made(setup, seed, *rest) | {"costs": found}

    monkeypatch.setattr(test_study_report, "_run", with_costs)
    return test_study_report.write_study(tmp_path, [FLOAT32, DYNAMIC], steps=2)


@pytest.mark.slow
def test_the_report_has_time_and_memory_where_they_are_known(costly):
    page = page_of(costly)
    assert (costly / "costs.svg").exists()
    assert "float32 3.5 3 0.5" in page.text
    assert f"{DYNAMIC.title} 3.5 3 –" in page.text


def test_the_figure_has_a_panel_for_each_cost_that_is_known(costly):
    summary = json.loads((costly / "summary.json").read_text())
    titles = [axes.get_title(loc="left") for axes in costs_figure(summary).axes]
    assert titles == ["ms a step", "MB that a step holds", "J a step"]
    for row in summary["setups"]:
        row["joules"] = None
    assert len(costs_figure(summary).axes) == 2
    assert not has_costs({"setups": [{"name": "float32"}]})


def test_the_rows_of_the_table_have_a_dash_for_what_is_not_known(costly):
    summary = json.loads((costly / "summary.json").read_text())
    assert cost_rows(summary) == [
        ("set-up", "ms/step", "quartiles", "MB", "J/step"),
        ("float32", "3.5", "2.75 to 4", "3", "0.5"),
        (DYNAMIC.name, "3.5", "2.75 to 4", "3", "–"),
    ]


THREE = choose_setups(["float32", "mixed-none", "mixed-dynamic"])


def test_each_set_up_tells_after_its_first_run():
    estimate = Estimate(THREE, 2)
    assert estimate.ran(0, 4.0) == (
        "study: 1 of 6 runs done, about 4 seconds each in float32; in 16 bits they may take far longer"
    )
    assert estimate.ran(0, 2.0) is None
    # 4 and 2, and four of 50.
    assert estimate.ran(1, 50.0) == "study: 3 of 6 runs done, about 3 minutes for all, 2 minutes left"
    assert estimate.ran(1, 30.0) is None
    # 4 and 2, 50 and 30, and two of 20.
    assert estimate.ran(2, 20.0) == "study: 5 of 6 runs done, about 2 minutes for all, 20 seconds left"
    assert estimate.ran(2, 20.0) is None


def test_one_run_needs_no_estimate():
    assert Estimate(THREE[:1], 1).ran(0, 4.0) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 second"), (89.0, "89 seconds"), (100.0, "2 minutes"), (3600.0, "60 minutes")]
)
def test_a_time_is_rough(seconds, text):
    assert duration(seconds) == text
