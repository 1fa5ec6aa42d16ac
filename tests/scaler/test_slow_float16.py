"""Guards that a step in float16 on a processor that is slow at it says so, once, and only there."""

import warnings

import keras
import pytest
import tensorflow as tf
from models import squared_error

import scaler
from scaler.backend import versions

ARITHMETIC = "flags : fpu sse avx512f avx512_fp16 amx_tile\n"


@pytest.fixture
def on_a(tmp_path, monkeypatch):
    """Has the processor be one with some flags, in a new process."""

    def set_flags(flags, onednn=True):
        (tmp_path / "cpuinfo").write_text(flags)
        monkeypatch.setattr(versions, "_CPU", tmp_path / "cpuinfo")
        monkeypatch.setattr(versions, "_has_onednn", lambda: onednn)
        forget()

    yield set_flags
    forget()


def forget():
    versions.is_slow_in_float16.cache_clear()
    versions.warn_of_slow_float16.cache_clear()


def said_by_steps(policy, jit_compile=None):
    """What two traces of a step by hand say while its loss is scaled."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, dtype=policy)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            loss_scaler = scaler.LossScaler(scaler.Dynamic())

            @tf.function(jit_compile=jit_compile, autograph=False)
            def step(x, y, loss_scaler=loss_scaler):
                return loss_scaler.scale(squared_error(y, model(x, training=True)))

            step.get_concrete_function(tf.ones([4, 3]), tf.ones([4, 1]))
    return [one for one in said if "oneDNN" in str(one.message)]


def test_a_step_in_a_graph_is_warned_of_once_a_process(on_a):
    on_a(ARITHMETIC)
    said = said_by_steps("mixed_float16")
    assert len(said) == 1
    assert said[0].category is scaler.ScaleWarning
    assert all(
        way in str(said[0].message) for way in ("TF_ENABLE_ONEDNN_OPTS=0", "jit_compile=True", "--policy float32")
    )


@pytest.mark.parametrize(
    ("policy", "flags", "onednn", "jit_compile"),
    [
        ("float32", ARITHMETIC, True, None),
        ("mixed_bfloat16", ARITHMETIC, True, None),
        ("mixed_float16", ARITHMETIC.replace("avx512_fp16", "avx512_bf16"), True, None),
        ("mixed_float16", ARITHMETIC, False, None),
        ("mixed_float16", ARITHMETIC, True, True),
    ],
    ids=["float32", "bfloat16", "another processor", "without oneDNN", "XLA"],
)
def test_nothing_is_said_where_it_is_fast(on_a, policy, flags, onednn, jit_compile):
    on_a(flags, onednn)
    assert not said_by_steps(policy, jit_compile)


def test_fit_is_warned_of(on_a):
    on_a(ARITHMETIC)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, dtype="mixed_float16")])
    optimizer = scaler.keras.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    # An error ends `fit` where it is said, so that the rest of the step is not traced.
    warnings.simplefilter("error", scaler.ScaleWarning)
    with pytest.raises(scaler.ScaleWarning, match="float16 is slow on this processor"):
        model.fit(tf.ones([4, 3]), tf.ones([4, 1]), verbose=0)


def test_a_processor_that_does_not_say_what_it_is_counts_as_fast(on_a, tmp_path):
    on_a(ARITHMETIC)
    (tmp_path / "cpuinfo").unlink()
    assert not versions.is_slow_in_float16()


@pytest.mark.parametrize("value", ["0", "1"])
def test_without_tensorflows_own_word_the_environment_counts(monkeypatch, value):
    from tensorflow.python.util import _pywrap_util_port

    monkeypatch.delattr(_pywrap_util_port, "IsMklEnabled")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", value)
    assert versions._has_onednn() == (value == "1")
