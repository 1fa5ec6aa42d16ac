"""Draws the pictures of these pages: `python docs/concepts/pictures.py` writes them beside the pages."""

import pathlib
import sys

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import loops.tasks
import scaler
from loops.support.drawing import STYLE, shade, svg_of
from loops.support.palette import BLUE, GREEN, ORANGE, RED, SOFT, TEXT

HERE = pathlib.Path(__file__).parent
AS_ONE = {"histtype": "stepfilled"}
"""The bars of a histogram as one shape."""
FORMATS = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")


def formats() -> Figure:
    """How far each format reaches, as powers of two."""
    figure = Figure((7.5, 2.7), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(reversed(FORMATS)):
        limits = scaler.float_format(name)
        low, normal, high = np.log2([limits.smallest_subnormal, limits.smallest_normal, limits.max])
        axes.barh(row, normal - low, left=low, height=0.5, color=ORANGE, alpha=0.55)
        axes.barh(row, high - normal, left=normal, height=0.5, color=BLUE)
        bits = 1 - int(np.log2(limits.epsilon))
        axes.text(136, row, f"{bits} bits", va="center", color=SOFT)
    axes.set_yticks(range(len(FORMATS)), reversed(FORMATS))
    ticks = (-149, -126, -100, -50, -24, 0, 16, 50, 100, 128)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_xlim(-155, 162)
    axes.grid(axis="y", visible=False)
    axes.set_title("full precision (blue), fewer and fewer bits (orange)", loc="left")
    axes.set_xlabel("magnitude of a value")
    return figure


def scaling() -> Figure:
    """The gradients of a real network in float16, at a scale that is too low, right, and too high."""
    found, limits = digits_gradients(), scaler.float_format("float16")
    zero, infinite = np.log2([limits.zero_threshold, limits.overflow_threshold])
    figure = Figure((7.5, 4.2), layout="constrained")
    panels = figure.subplots(3, sharex=True, sharey=True)
    for axes, octaves in zip(panels, (0, 15, 40), strict=True):
        moved = found + octaves
        shade(axes, -50, 30)
        axes.hist(moved, bins=np.arange(-50, 31), weights=np.full(len(moved), 100 / len(moved)), color=BLUE, **AS_ONE)
        lost = 100 * np.mean(moved <= zero), 100 * np.mean(moved >= infinite)
        axes.set_title(f"loss scale $2^{{{octaves}}}$", loc="left")
        axes.set_title(f"becomes zero: {lost[0]:.0f} %, infinite: {lost[1]:.0f} %", loc="right", color=SOFT)
    panels[0].text(-49, panels[0].get_ylim()[1] * 0.8, "zero in float16", color=TEXT)
    panels[1].text(-24.5, panels[1].get_ylim()[1] * 0.8, "subnormal", color=TEXT)
    panels[0].text(29, panels[0].get_ylim()[1] * 0.8, "infinite in float16", color=TEXT, ha="right")
    panels[1].set_ylabel("share of the gradients (%)")
    panels[2].set_xlim(-50, 30)
    ticks = range(-48, 30, 8)
    panels[2].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    panels[2].set_xlabel("magnitude of a gradient, times the loss scale")
    return figure


def digits_gradients() -> np.ndarray:
    """log2 of the gradients of a network's activations, in float32, after some training; zeros are left out.

    The loss has a weight of 2^-14, as a term among others may have it.
    """
    keras.utils.set_random_seed(0)
    task = loops.tasks.load("digits")
    x, y = task.images.reshape(-1, 64)[:1024], task.labels[:1024]
    layers = [keras.layers.Dense(size, activation="relu") for size in (64, 32)] + [keras.layers.Dense(10)]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential([keras.Input([64]), *layers])
    model.compile(keras.optimizers.Adam(3e-3), loss_of)
    model.fit(x, y, batch_size=64, epochs=4, verbose=0)
    values, seen = tf.constant(x[:64]), []
    with tf.GradientTape() as tape:
        for layer in layers:
            values = layer(values)
            seen.append(values)
        loss = loss_of(y[:64], values) * 2.0**-14
    found = np.concatenate([gradient.numpy().ravel() for gradient in tape.gradient(loss, seen)])
    return np.log2(np.abs(found[found != 0]))


def masters() -> Figure:
    """A weight of 1 that is moved by 2^-13 a hundred times, with a float32 master and without one."""
    update, alone, master = 2.0**-13, np.float16(1), np.float32(1)
    rows = []
    for _ in range(100):
        alone = np.float16(alone + np.float16(update))
        master = np.float32(master + update)
        rows.append((alone, master, np.float16(master)))
    figure = Figure((7.5, 2.7), layout="constrained")
    axes = figure.subplots()
    names = ("float16 weight without a master", "float32 master", "its float16 weight")
    looks = ({"color": RED}, {"color": SOFT, "linestyle": "--"}, {"color": BLUE, "drawstyle": "steps-post"})
    for name, look, values in zip(names, looks, zip(*rows, strict=True), strict=True):
        axes.plot(range(1, 101), np.float32(values), label=name, **look)
    axes.set_xlabel("step")
    axes.set_ylabel("value of the weight")
    axes.legend(loc="upper left")
    return figure


def skips() -> Figure:
    """A float16 weight with a master and a dynamic scale, step by step: what a skip moves and what it does not."""
    scales, values, skipped = course()
    figure = Figure((7.5, 3.6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    steps = np.arange(1, len(scales) + 1)
    for axes, shown, name, colour in ((above, scales, "loss scale", BLUE), (below, values, "weight", GREEN)):
        axes.plot(steps, shown, drawstyle="steps-mid", color=colour)
        axes.plot(steps[skipped], shown[skipped], "x", color=TEXT, markersize=7, label="skipped")
        axes.set_ylabel(name)
    above.set_yscale("log", base=2)
    above.legend(loc="lower right")
    below.set_xlabel("step")
    return figure


def course(steps: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scale that each step used, the weight after it, and whether it was skipped.

    The gradient of the weight is 2.5, so that float16 bears a scale of 2^14 and no more.
    """
    weight = tf.Variable(tf.constant([1.0], tf.float16))
    masters_of = scaler.MasterWeights([weight])
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**12, growth_interval=5))
    optimizer = keras.optimizers.SGD(2.0**-6)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            scaled = loss_scaler.scale(tf.reduce_sum(tf.cast(weight, tf.float32) * 2.5))
        outcome = loss_scaler.apply(optimizer, tape.gradient(scaled, [weight]), masters_of)
        return outcome.loss_scale, tf.cast(weight[0], tf.float32), outcome.finite

    scales, values, applied = zip(*([float(part) for part in step()] for _ in range(steps)), strict=True)
    return np.array(scales), np.array(values), ~np.array(applied, bool)


DRAWN = {"formats": formats, "scaling": scaling, "masters": masters, "skips": skips}


def write(name: str, folder: pathlib.Path = HERE) -> pathlib.Path:
    """Draws one of them and writes it as an SVG."""
    path = folder / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        path.write_text(svg_of(DRAWN[name]()), encoding="utf-8")
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or DRAWN:
        print(write(name))
