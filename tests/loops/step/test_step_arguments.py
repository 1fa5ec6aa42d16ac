"""Guards what a TrainStep refuses when it is made: what would otherwise fail in a trace, or go wrong in silence."""

import keras
import pytest
from models import squared_error

import loops
import scaler


def model():
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(4, name="near"), keras.layers.Dense(1, name="far")])


def rescaled():
    return scaler.layerwise.insert_rescales(model(), after=["near"])[0]


SGD = keras.optimizers.SGD
REFUSED = {
    "no optimizer": ({"optimizer": 5}, "TrainStep: optimizer=5: expected a Keras optimizer"),
    "an unknown name": ({"optimizer": "adamm"}, "TrainStep: optimizer='adamm': expected a Keras optimizer"),
    "a name that needs more": ({"optimizer": "lossscaleoptimizer"}, "the name of one such as 'adam'"),
    "a class": ({"optimizer": SGD}, "expected a Keras optimizer such as"),
    "an optimizer that scales": ({"optimizer": keras.optimizers.LossScaleOptimizer(SGD())}, "inner_optimizer"),
    "one that accumulates": ({"optimizer": SGD(gradient_accumulation_steps=3)}, "pass accumulate="),
    "a norm of 0": ({"clip_norm": 0.0}, "clip_norm=0.0: expected a positive finite number"),
    "no clipping": ({"clip": 1.0}, "expected scaler.ClipByNorm"),
    "two clippings": ({"clip": scaler.ClipByNorm(1.0), "clip_norm": 1.0}, "expected one of them"),
    "attempts of another scaler": (
        {"optimizer": SGD(loops.ByAttempts(lambda step: 0.1, scaler.LossScaler(scaler.Static(2.0))))},
        "another loss scaler",
    ),
    "rescales without their Layerwise": ({"model": rescaled()}, "expected layerwise="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_when_it_is_made(case):
    changes, named = REFUSED[case]
    arguments = {"model": model(), "loss_fn": squared_error, "optimizer": SGD(), **changes}
    with pytest.raises(scaler.InvalidArgument, match=named) as caught:
        loops.TrainStep(arguments.pop("model"), arguments.pop("loss_fn"), arguments.pop("optimizer"), **arguments)
    assert "in user code" not in str(caught.value)


@pytest.mark.parametrize("name", ["adam", "SGD"])
def test_the_name_of_an_optimizer_is_taken_as_by_compile(name):
    step, compiled = loops.TrainStep(model(), squared_error, name), model()
    compiled.compile(name)
    assert type(step.optimizer) is type(compiled.optimizer)
    ours, theirs = step.optimizer.get_config(), compiled.optimizer.get_config()
    assert ours | {"name": ""} == theirs | {"name": ""}
    parts = [loops.Part(one, model(), squared_error, name) for one in ("first", "second")]
    assert isinstance(parts[0].optimizer, keras.optimizers.Optimizer)
    # Each gets one of its own.
    assert loops.ComposedStep(parts).optimizers["second"] is not parts[0].optimizer
    with pytest.raises(scaler.InvalidArgument, match="Part 'first': optimizer=None: expected a Keras optimizer"):
        loops.Part("first", model(), squared_error, None)


def test_attempts_of_its_own_scaler_are_taken():
    loss_scaler = scaler.LossScaler(scaler.Static(2.0))
    optimizer = SGD(loops.ByAttempts(lambda step: 0.1, loss_scaler))
    assert loops.TrainStep(model(), squared_error, optimizer, loss_scaler=loss_scaler).loss_scaler is loss_scaler
