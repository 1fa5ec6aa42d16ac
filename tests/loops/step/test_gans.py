"""Guards steps with several models, optimizers and scalers: the GANs of `docs/gan.md`, which this file runs.

Each trains in float16 without a value that is not finite, and an overflow skips the optimizer it is in and no other.
"""

import pathlib

import pytest
import tensorflow as tf
from markdown_blocks import run_blocks
from rigs import assert_finite, raw

TEXT = (pathlib.Path(__file__).parents[3] / "docs" / "gan.md").read_text(encoding="utf-8")
"""The blocks up to the WGAN, and all of them: names are used again there."""


@pytest.fixture(scope="module")
def dcgan(tmp_path_factory):
    return run_blocks(TEXT.split("## WGAN-GP")[0], tmp_path_factory.mktemp("dcgan"))


def run_wgan(folder, steps, loop="steps_per_call=100"):
    """With a loop of its own where it does not matter what was learned: XLA could not compile it, as it is random."""
    setup, rest = TEXT.split("## DCGAN")
    random = "```python\nrandom = tf.random.Generator.from_seed(0)\n```\n"
    trained = rest.split("## WGAN-GP")[1].replace(".run(300)", f".run({steps})").replace("steps_per_call=100", loop)
    trained = trained.replace("attempted == 600", f"attempted == {2 * steps}").replace("== 300", f"== {steps}")
    return run_blocks(setup + random + trained, folder)


@pytest.fixture(scope="module")
def wgan(tmp_path_factory):
    return run_wgan(tmp_path_factory.mktemp("wgan"), 300)


def held(names, player):
    """What one player's step moves."""
    model = names[{"g": "generator", "d": "discriminator", "c": "critic"}[player]]
    masters = names.get(f"{player}_masters")
    return [*model.variables, *(masters.weights if masters else []), *names[f"{player}_optimizer"].variables]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "players"), [("dcgan", "dg"), ("wgan", "cg")])
def test_it_learns_in_float16_and_stays_finite(kind, players, request):
    names = request.getfixturevalue(kind)
    dtypes = {variable.dtype for variable in names["generator"].trainable_variables}
    assert dtypes == ({"float16"} if kind == "dcgan" else {"float32"})
    for player in players:
        assert_finite(held(names, player))
        counters = names[f"{player}_scaler"].counters
        assert counters.applied >= 280
    assert names["distance"](names["generator"]) < 0.6 * names["start"]


@pytest.mark.slow
def test_an_overflow_skips_the_optimizer_it_is_in_and_no_other(tmp_path):
    names, bad, good = run_wgan(tmp_path, 2, "steps_per_call=2, jit_compile=False"), "g", "c"
    names["g_scaler"]._state["loss_scale"].assign(2.0**100)
    names["c_scaler"]._state["loss_scale"].assign(2.0**8)
    compiled = names["wgan_loop"].calls.one  # Of what the loop has traced.
    reals = tf.constant(names["images"][: 2 * names["BATCH"]])
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
