"""Guards steps with several models, optimizers and scalers: the GANs of `docs/gan.md`, which this file runs.

Each trains in float16 without a value that is not finite, and an overflow skips the optimizer it is in and no other.
"""

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from markdown_blocks import run_blocks
from rigs import raw

TEXT = (pathlib.Path(__file__).parents[3] / "docs" / "gan.md").read_text(encoding="utf-8")
"""The blocks up to the WGAN, and all of them: names are used again there."""


@pytest.fixture(scope="module")
def dcgan(tmp_path_factory):
    return run_blocks(TEXT.split("## WGAN-GP")[0], tmp_path_factory.mktemp("dcgan"))


def run_wgan(folder, steps, loop="steps_per_call=100"):
    setup, rest = TEXT.split("## DCGAN")
    random = "```python\nrandom = tf.random.Generator.from_seed(0)\n```\n"
    trained = rest.split("## WGAN-GP")[1].replace(".run(300)", f".run({steps})").replace("steps_per_call=100", loop)
    trained = trained.replace("attempted == 600", f"attempted == {2 * steps}").replace("== 300", f"== {steps}")
    return run_blocks(setup + random + trained, folder)


@pytest.fixture(scope="module")
def wgan(tmp_path_factory):
    return run_wgan(tmp_path_factory.mktemp("wgan"), 300)


@pytest.fixture(scope="module")
def brief_wgan(tmp_path_factory):
    """Where it does not matter what was learned. XLA could not compile it, as it draws random numbers."""
    return run_wgan(tmp_path_factory.mktemp("brief_wgan"), 2, "steps_per_call=2, jit_compile=False")


def held(names, player):
    """What one player's step moves."""
    model = names[{"g": "generator", "d": "discriminator", "c": "critic"}[player]]
    masters = names.get(f"{player}_masters")
    return [*model.variables, *(masters.weights if masters else []), *names[f"{player}_optimizer"].variables]


def all_finite(variables):
    values = [tf.convert_to_tensor(variable).numpy() for variable in variables]
    return all(np.isfinite(value.astype(np.float64)).all() for value in values if value.dtype.kind not in "iub")


@pytest.mark.slow
@pytest.mark.exhaustive_with("dcgan-dg", "wgan-cg")
@pytest.mark.parametrize(("kind", "players"), [("dcgan", "dg"), ("wgan", "cg")])
def test_it_learns_in_float16_and_stays_finite(kind, players, request):
    names = request.getfixturevalue(kind)
    dtypes = {variable.dtype for variable in names["generator"].trainable_variables}
    assert dtypes == ({"float16"} if kind == "dcgan" else {"float32"})
    for player in players:
        assert all_finite(held(names, player))
        counters = names[f"{player}_scaler"].counters
        assert counters.applied >= 280
    assert names["distance"](names["generator"]) < 0.6 * names["start"]


@pytest.mark.slow_with("brief_wgan-wgan_loop-g-c")
@pytest.mark.exhaustive_with("dcgan-loop-d-g", "dcgan-loop-g-d")
@pytest.mark.parametrize(
    ("kind", "loop", "bad", "good"),
    [("dcgan", "loop", "d", "g"), ("dcgan", "loop", "g", "d"), ("brief_wgan", "wgan_loop", "g", "c")],
)
def test_an_overflow_skips_the_optimizer_it_is_in_and_no_other(kind, loop, bad, good, request):
    names = request.getfixturevalue(kind)
    names[f"{bad}_scaler"]._state["loss_scale"].assign(2.0**100)
    names[f"{good}_scaler"]._state["loss_scale"].assign(2.0**8)
    compiled = names[loop].calls.one  # Of what the loop has traced.
    reals = tf.constant(names["images"][: 2 * names["BATCH"] if loop == "wgan_loop" else names["BATCH"]])
    before, other = raw(held(names, bad)), raw(held(names, good))
    scales = {player: float(names[f"{player}_scaler"].loss_scale) for player in (bad, good)}
    outputs = compiled(reals)
    assert not outputs[bad]
    assert outputs[good]
    assert not outputs["applied"]
    assert raw(held(names, bad)) == before
    assert raw(held(names, good)) != other
    assert float(names[f"{bad}_scaler"].loss_scale) == scales[bad] / 2
    assert float(names[f"{good}_scaler"].loss_scale) == scales[good]
    names[f"{bad}_scaler"]._state["loss_scale"].assign(2.0**8)
    assert compiled(reals)[bad]
