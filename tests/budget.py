"""What a case may cost: a run prints its dearest cases, and with `--budget` one that costs more is red.

Counted is CPU time, of this process and of those that it waited for: seconds on a clock depend on what else runs. On a
slow machine, or in a slow hour of a shared one, the budget is larger: by as much as starting has taken longer. What a
fixture of a wider scope costs is not counted, since other cases share it. A mark says why a case may cost more.
"""

import resource

import pytest

SHOWN = 10
LEAST = 1.0
"""Seconds below which a case is not worth a line."""
ALLOWED = {"dear", "slow", "exhaustive"}
STARTING = 4.2
"""Seconds of CPU time until TensorFlow and the packages are imported, where a budget is meant as it is said."""

SPREAD = 1.4
"""How far one case goes from run to run, with something else beside it: the same one took 2.6 to 3.6 s. Red is what is
surely over, since a run that is red by chance says nothing."""

_slower, _started, _shared, _spent = pytest.StashKey(), pytest.StashKey(), pytest.StashKey(), {}


def pytest_addoption(parser):
    parser.addoption("--budget", type=float, metavar="SECONDS", help="what a case without a mark may take of the CPU")


def cpu_seconds():
    """What this process has taken by now, and the processes that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def pytest_configure(config):
    config.stash[_slower] = max(1.0, cpu_seconds() / STARTING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[_started], item.stash[_shared] = cpu_seconds(), 0.0
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    start, item = cpu_seconds(), request._pyfuncitem
    before = item.stash[_shared]
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":  # The whole of it: also those that it asked for meanwhile.
            item.stash[_shared] = before + cpu_seconds() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        seconds = cpu_seconds() - item.stash[_started] - item.stash[_shared]
        report.user_properties.append(("cpu_seconds", seconds))
        limit = (item.config.getoption("--budget") or 0.0) * item.config.stash[_slower]
        reasons = [mark for mark in item.iter_markers() if mark.name in ALLOWED and (mark.args or mark.name != "dear")]
        if report.passed and limit and seconds > limit * SPREAD and not reasons:
            report.outcome = "failed"
            report.longrepr = (
                f"It passed and took {seconds:.1f} s of CPU time: expected {limit:.3g} s or less. Trace less, or share "
                'what is traced in a fixture of the module; where neither can be, mark it `dear("why")`.'
            )
    return report


def pytest_runtest_logreport(report):
    if report.when == "call":
        _spent[report.nodeid] = dict(report.user_properties).get("cpu_seconds", 0.0)


def pytest_terminal_summary(terminalreporter):
    dearest = sorted(_spent.items(), key=lambda item: -item[1])[:SHOWN]
    if dearest and dearest[0][1] > LEAST:
        terminalreporter.section("dearest cases, in seconds of CPU time")
        for name, seconds in dearest:
            if seconds > LEAST:
                terminalreporter.write_line(f"{seconds:6.1f}  {name}")
