"""Guards the public face of the package: its names, and what importing it brings along."""

import inspect
import types

import pytest
import tensorflow as tf

import scaler

NAMESPACES = (
    scaler.authoring,
    scaler.formats,
    scaler.gradients,
    scaler.layerwise,
    scaler.observe,
    scaler.presets,
    scaler.strategies,
    scaler.weights,
)


def test_all_names_what_is_public():
    public = {
        name for name, value in vars(scaler).items() if name[0] != "_" and not isinstance(value, types.ModuleType)
    }
    namespaces = {module.__name__.removeprefix("scaler.") for module in NAMESPACES}
    assert public | namespaces | {"PerLoss"} == set(scaler.__all__)  # Which is imported when it is asked for.


def test_all_of_the_presets_names_what_is_public():
    public = {
        name
        for name, value in vars(scaler.presets).items()
        if name[0] != "_" and not isinstance(value, types.ModuleType)
    }
    assert set(scaler.presets.__all__) == public


def test_an_unknown_name_is_no_module():
    with pytest.raises(AttributeError, match="module 'scaler' has no attribute 'Dynamik'"):
        scaler.Dynamik  # noqa: B018


def test_all_is_sorted_without_repeats_and_each_name_is_described():
    for module in (scaler, *NAMESPACES):
        assert list(module.__all__) == sorted(set(module.__all__))
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), name


def test_dir_shows_what_is_public():
    assert dir(scaler) == sorted([*scaler.__all__, "testing"])


def test_a_loss_scaler_shows_what_a_user_calls():
    own = {name for name in dir(scaler.LossScaler()) if name[0] != "_"} - set(dir(tf.Module))
    assert own == {
        *("apply", "retry", "scale", "unscale", "update", "check", "explain"),
        *("counters", "last_skip", "loss_scale", "scale_of_gradients", "state", "assign_scale"),
        *("stuck", "strategy", "select", "sum_duplicates"),
    }
