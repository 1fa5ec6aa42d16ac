"""The functions of MLflow that a recipe calls, with their names and arguments, for a run in memory.

The real package is not installed for the tests: `mlflow-skinny` 3.17 alone brings 21 further packages, and refuses the
importlib-metadata of constraints.txt. Where it is installed, tests/test_recipes.py compares the arguments.
"""

import contextlib
import pathlib
import re
import types

__all__ = [
    "get_run",
    "log_artifact",
    "log_metric",
    "log_metrics",
    "log_params",
    "set_experiment",
    "set_tag",
    "start_run",
]

_runs, _active = {}, []


def _check(key):
    assert re.fullmatch(r"[/\w.\- :]+", key), key
    return key


def set_experiment(experiment_name):
    assert not _active
    _check(experiment_name)


@contextlib.contextmanager
def start_run(run_id=None):
    assert run_id is None
    data = types.SimpleNamespace(metrics={}, params={}, tags={}, history=[], artifacts={})
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run-{len(_runs)}"), data=data)
    _runs[run.info.run_id] = run
    _active.append(run)
    try:
        yield run
    finally:
        _active.pop()


def get_run(run_id):
    return _runs[run_id]


def log_metric(key, value, step=None):
    assert type(value) in (int, float)
    assert type(step) is int
    _active[-1].data.history.append((step, _check(key), value))
    _active[-1].data.metrics[key] = float(value)


def log_metrics(metrics, step=None):
    for key, value in metrics.items():
        log_metric(key, value, step)


def log_params(params):
    _active[-1].data.params.update({_check(key): str(value) for key, value in params.items()})


def set_tag(key, value):
    _active[-1].data.tags[_check(key)] = str(value)


def log_artifact(local_path, artifact_path=None):
    _active[-1].data.artifacts[pathlib.Path(local_path).name] = pathlib.Path(local_path).read_bytes()
