"""Guards that a mistyped argument of a public class is answered with the nearest one, and the rest is as before."""

import copy
import dataclasses
import inspect
import pickle

import keras
import pytest
import tensorflow as tf

import loops
import scaler


def classes():
    """The public classes with a constructor of their own in Python, each once."""
    for module in (scaler, loops, scaler.strategies, scaler.weights, scaler.layerwise):
        for cls in (getattr(module, name) for name in module.__all__):
            if isinstance(cls, type) and not issubclass(cls, BaseException) and cls is not scaler.Strategy:
                parameters = [] if cls is scaler.Cause else list(inspect.signature(cls).parameters.values())
                if parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters):
                    yield cls


CLASSES = list(dict.fromkeys(classes()))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_a_wrong_argument_is_answered_with_the_nearest(cls):
    *_, last = inspect.signature(cls).parameters
    with pytest.raises(TypeError) as caught:
        cls(**{f"{last}x": None})
    assert str(caught.value) == f"{cls.__name__}() has no argument '{last}x'. Did you mean {last!r}?"


def test_most_classes_are_among_them():
    assert len(CLASSES) > 60


def test_an_argument_like_no_other_is_named_alone():
    with pytest.raises(TypeError, match=r"^Dynamic\(\) has no argument 'q'\.$"):
        scaler.Dynamic(q=1)


def test_keras_arguments_get_the_hint_in_their_own_error():
    with pytest.raises(scaler.InvalidArgument, match="Did you mean 'initial_scale'"):
        scaler.LossScaleOptimizer("sgd", initial_scal=8.0)


def test_another_type_error_stays_as_it_is():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'optimizer'"):
        loops.TrainStep(None, None)


def test_a_subclass_that_passes_a_wrong_name_on_is_told_whose_it_is():
    class Own(scaler.LossScaler):
        def __init__(self, policy):
            super().__init__(stuk=policy)

    class Same(scaler.LossScaler):
        pass

    with pytest.raises(TypeError, match=r"^LossScaler\(\) has no argument 'stuk'. Did you mean 'stuck'\?$"):
        Own(None)
    with pytest.raises(TypeError, match=r"^Same\(\) has no argument 'stuk'"):
        Same(stuk=None)
    assert Same(scaler.Static(2.0)).strategy == scaler.Static(2.0)


def test_signatures_copies_and_pickles_are_as_before():
    assert list(inspect.signature(scaler.Dynamic).parameters)[:2] == ["initial_scale", "growth_factor"]
    assert next(iter(inspect.signature(scaler.Event).parameters)) == "finite"
    assert list(inspect.signature(loops.TrainStep).parameters)[:3] == ["model", "loss_fn", "optimizer"]
    own = scaler.Dynamic(8.0)
    assert dataclasses.replace(own, growth_interval=3).growth_interval == 3
    with pytest.raises(TypeError, match="Did you mean 'growth_interval'"):
        dataclasses.replace(own, growth_intervall=3)
    event = scaler.Event(finite=True)
    for one in (own, event):
        assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert event._replace(finite=False) == scaler.Event(False)
    assert tf.nest.map_structure(lambda value: value, event) == event


def test_an_optimizer_keeps_its_configuration():
    made = scaler.LossScaleOptimizer(keras.optimizers.SGD(0.5), scaler.Dynamic(8.0))
    again = scaler.LossScaleOptimizer.from_config(made.get_config())
    assert again.loss_scaler.strategy == scaler.Dynamic(8.0)


def test_names_of_optimizers_are_those_of_compile():
    assert isinstance(scaler.LossScaleOptimizer("adamw").inner_optimizer, keras.optimizers.AdamW)
    assert isinstance(scaler.LossScaleOptimizer(inner_optimizer="SGD").inner_optimizer, keras.optimizers.SGD)
    with pytest.raises(scaler.InvalidArgument, match=r"the name of one such as 'adam'. Did you mean 'nadam'\?"):
        scaler.LossScaleOptimizer("nadamm")


def test_a_strategy_cannot_be_exchanged_in_a_scaler():
    """Its variables are those of the first: the assignment did nothing, and the repr told of the second."""
    loss_scaler = scaler.LossScaler(scaler.Dynamic())
    with pytest.raises(scaler.InvalidArgument, match="Make a new LossScaler"):
        loss_scaler.strategy = scaler.Static(8.0)
    assert loss_scaler.strategy == scaler.Dynamic()
