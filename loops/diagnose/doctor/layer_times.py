"""Times what models are made of: layers in each format, in a graph and compiled by XLA, with oneDNN and without.

TensorFlow reads whether it uses oneDNN when it starts, so each is measured in a process of its own:
`python -m loops.diagnose.doctor.layer_times SECONDS` prints what one of them measures, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import loops
from loops.diagnose.doctor.timing import time_interleaved
from loops.support.errors import LoopError
from loops.support.text import columns

FORMATS = ("float32", "float16", "bfloat16")
SECONDS = 0.2
"""For which a layer is measured in one format, in a graph and compiled by XLA."""
_NEAR = 1.1
"""Times the least time within which a setting that asks for less is taken for as fast."""


def _self_attention(**kept: Any) -> keras.Model:
    x = keras.Input([32, 64])
    return keras.Model(x, keras.layers.MultiHeadAttention(4, 16, **kept)(x, x))


_LAYERS: Mapping[str, tuple[Callable[..., keras.layers.Layer], list[int]]] = {
    "Dense(256), relu": (lambda **kept: keras.layers.Dense(256, "relu", **kept), [64, 256]),
    "Conv2D(32, 3)": (lambda **kept: keras.layers.Conv2D(32, 3, padding="same", **kept), [32, 16, 16, 16]),
    "attention, 4 heads": (_self_attention, [16, 32, 64]),
}


class Setting(NamedTuple):
    """How a step is run.

    Attributes:
        onednn: Whether TensorFlow uses oneDNN.
        compiled: Whether XLA compiles the step.
    """

    onednn: bool
    compiled: bool

    def __str__(self) -> str:
        return f"{'XLA' if self.compiled else 'graph'}{'' if self.onednn else ', no oneDNN'}"


SETTINGS = (Setting(True, False), Setting(True, True), Setting(False, False), Setting(False, True))
"""Those that ask for less first."""
Times = Mapping[tuple[str, str], Mapping[Setting, float]]
"""Milliseconds of a layer in a format, forward and backward, by setting."""


def measure() -> Times:
    """Measures all layers, in new processes.

    Raises:
        LoopError: If a process fails.
    """
    found: dict[tuple[str, str], dict[Setting, float]] = {}
    # A GPU computes nothing with oneDNN.
    for onednn in (True,) if tf.config.list_physical_devices("GPU") else (True, False):
        for layer, name, *times in _in_a_process(SECONDS, onednn):
            of_layer = found.setdefault((layer, name), {})
            of_layer |= {Setting(onednn, bool(at)): time for at, time in enumerate(times) if time is not None}
    return found


def _in_a_process(seconds: float, onednn: bool) -> list[list]:
    done = subprocess.run(
        [sys.executable, "-m", "loops.diagnose.doctor.layer_times", str(seconds)],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)), "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=pathlib.Path(loops.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LoopError(f"doctor: the process that times layers ended with status {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _of_all_layers(seconds: float) -> list[list]:
    """For each layer and format the milliseconds in a graph and compiled by XLA; None where XLA refuses it."""
    rows: list[list] = []
    for layer, (make, shape) in _LAYERS.items():
        x = tf.random.stateless_normal(shape, (0, 1))
        for name in FORMATS:
            policy = name if name == "float32" else f"mixed_{name}"
            graph, compiled = (_passes(make(dtype=policy), x, compiled) for compiled in (False, True))
            try:
                compiled()
            except tf.errors.OpError:
                rows.append([layer, name, time_interleaved(graph, graph, seconds).before.median, None])
                continue
            turns = time_interleaved(graph, compiled, seconds)
            rows.append([layer, name, turns.before.median, turns.after.median])
    return rows


def _passes(layer: keras.layers.Layer, x: tf.Tensor, compiled: bool) -> Callable[[], None]:
    """A function that takes a layer's forward and backward pass."""
    layer.build(x.shape)

    @tf.function(jit_compile=compiled or None)
    def both(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(tf.cast(layer(x), tf.float32)))
        return tape.gradient(loss, [*layer.trainable_variables, x])

    def call() -> None:
        both(x)
        tf.test.experimental.sync_devices()

    return call


def _best(times: Times, name: str) -> tuple[Setting, float]:
    """The setting for a format, and its time as a multiple of float32's in a graph with oneDNN."""
    ratios = {one: ratio for one in SETTINGS if (ratio := _ratio(times, name, one)) is not None}
    least = min(ratios.values())
    return next((one, ratio) for one, ratio in ratios.items() if ratio <= _NEAR * least)


def _ratio(times: Times, name: str, setting: Setting) -> float | None:
    """The geometric mean over the layers."""
    layers = dict.fromkeys(layer for layer, _ in times)
    pairs = [(times[layer, name].get(setting), times[layer, "float32"][SETTINGS[0]]) for layer in layers]
    known = [time / base for time, base in pairs if time is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(pairs) else None


def verdict(times: Times) -> str:
    """Whether float16 pays on this machine, as a sentence."""
    (_, base), (setting, half), (other, brain) = (_best(times, name) for name in FORMATS)
    in_a_graph = (_ratio(times, "float16", SETTINGS[0]) or math.nan) / base
    ratio = half / base
    pays = "pays" if ratio < 1 / _NEAR else "does not pay" if ratio > _NEAR else "is as fast as float32"
    slow = f", and {in_a_graph:.2f} times in a graph, as fit runs it" if in_a_graph > _NEAR * ratio else ""
    return (
        f"float16 {pays} here: it takes {ratio:.2f} times float32's time at best ({setting}){slow}; bfloat16 takes "
        f"{brain / base:.2f} times ({other})."
    )


def to_copy(times: Times) -> str:
    """The fastest format and its best setting, as a line of a shell."""
    best = {name: _best(times, name) for name in FORMATS}
    # Of formats that are as fast the one with more digits.
    name = next(one for one in FORMATS if best[one][1] <= _NEAR * min(ratio for _, ratio in best.values()))
    setting, policy = best[name][0], name if name == "float32" else f"mixed_{name}"
    start = "" if setting.onednn else "TF_ENABLE_ONEDNN_OPTS=0 "
    return f"{start}python program.py    # with {policy} and jit_compile={setting.compiled}"


def table(times: Times, width: int | None = None) -> str:
    """The milliseconds as columns, if `width` has room for them."""
    settings = [one for one in SETTINGS if any(one in row for row in times.values())]
    head = ["ms, forward and backward", "", *map(str, settings)]
    rows = [
        [layer, name, *(f"{row[one]:.3g}" if one in row else "–" for one in settings)]
        for (layer, name), row in times.items()
    ]
    return columns([head, *rows], width, left=2)


def as_json(times: Times) -> Sequence[Mapping[str, object]]:
    """The milliseconds as values for JSON, one for each layer, format and setting."""
    return [
        {"layer": layer, "format": name, **setting._asdict(), "milliseconds": time}
        for (layer, name), row in times.items()
        for setting, time in row.items()
    ]


if __name__ == "__main__":
    print(json.dumps(_of_all_layers(float(sys.argv[1]))))
