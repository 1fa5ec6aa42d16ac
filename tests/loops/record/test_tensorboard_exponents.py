"""Guards what TensorBoard shows of a step's probes: the headroom of a trace, and histograms over exponents."""

import types

import keras
import numpy as np
from recorded_cases import NAMES, visit
from tensorboard_cases import values

import loops


def written(folder):
    """The points of each curve and histogram as (step, value)."""
    found = {}
    for kind, tag, step, value, _ in values(folder):
        found.setdefault((kind, tag), []).append((step, value))
    return found


def write(folder, probes, every=5):
    board = loops.TensorBoard(folder, every=every)
    board.begin(types.SimpleNamespace(train_step=types.SimpleNamespace(probes=probes), actions=[]))
    with board:
        made = visit(np.arange(1, 13), (3, 5), NAMES, lambda step: 1.0, lambda step: 2.0**15, lambda step, place: 2.0)
        board(made)
    return written(folder)


def test_headroom_and_exponents(tmp_path, tensorboard):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, dtype="mixed_float16", name="dense")])
    probes = types.SimpleNamespace(names=list(NAMES), model=model, dtypes={"dense": ("float16",)})
    found = write(tmp_path / "probed", probes)
    # 2 x 2^14 is the largest power of two below 65520; at step 5 the gradients were infinite.
    assert [(step, float(value)) for step, value in found["scalars", "scaler/headroom"]] == [(5, -1.0), (10, 14.0)]
    assert [step for step, _ in found["scalars", "activations/headroom"]] == [5, 10]
    assert {tag for kind, tag in found if kind == "histograms"} == {f"exponents/{name}" for name in NAMES}
    ((step, bins),) = found["histograms", "exponents/activations/dense"]
    # As `visit` counts: 2 values in the bin 145 and 7 in the bin 150, whose exponents are 150 less.
    assert step == 10
    np.testing.assert_array_equal(bins[[0, -1]], [[-5, -4, 2], [0, 1, 7]])
    assert bins[:, 2].sum() == 9
    assert not [tag for _, tag in write(tmp_path / "bare", None) if "headroom" in tag or "exponents" in tag]
