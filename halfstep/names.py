"""Names of tasks, policies, strategies and presets, as help shows them before TensorFlow is imported.

They repeat names in `loops` and `scaler`; tests/loops/command/test_cli_help.py compares them.
"""

from __future__ import annotations

IMAGE_TASKS = ("digits", "mnist")
"""The tasks that are an `ImageTask`: a study accepts only these."""
TASKS = (*IMAGE_TASKS, "text")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16")
STRATEGIES = ("dynamic", "headroom", "histogram", "delayed_amax", "log_normal", "smooth")
"""The strategies that need no argument."""
TUNED = ("static", "dynamic", "headroom", "log_normal", "histogram", "delayed_amax", "smooth")
"""The strategies whose parameters `halfstep lab tune` searches."""
PRESETS = (
    "apex",
    "chainer",
    "colossalai",
    "dalle",
    "deepspeed",
    "deepspeed_2025_02",
    "fairscale",
    "fairseq",
    "flax",
    "guided_diffusion",
    "jmp",
    "keras",
    "megatron",
    "metaseq",
    "mindspore",
    "mxnet",
    "nemo",
    "nnabla",
    "openseq2seq_backoff",
    "optax_apply_if_finite",
    "paddle",
    "paddle_static",
    "pytorch",
    "tf_contrib",
    "tf_keras",
)
"""The strategies in `scaler.presets`."""
SETUPS = (
    "float32",
    "mixed-none",
    "mixed-dynamic",
    "float16-none",
    "float16-static",
    "float16-dynamic",
    "small-float32",
    "small-mixed-none",
    "small-mixed-dynamic",
)
"""The set-ups that `halfstep lab study` compares."""
EMULATED = ("emulated-float8", "emulated-mxfp8", "emulated-mxfp6", "emulated-mxfp4", "emulated-nvfp4")
"""Further ones, which run if they are named."""
UNIT_SCALED = ("unit-float32", "unit-mixed-none")
"""Those of a unit-scaled model, likewise."""
FORMS = (
    "none, static:SCALE (static:1024), or a name, with options as in dynamic:growth_interval=200,initial_scale=2**16: "
    f"{', '.join(STRATEGIES)}, or one of hs.presets: {', '.join(PRESETS)}; around any of them "
    "warmup:STEPS+, bounded:MIN,MAX+ or rising_floor:STEP=FLOOR,STEP=FLOOR+ (warmup:100+dynamic); around them all "
    "spike_guard+ (spike_guard:factor=20+dynamic); one after the other with +then:STEP+ (static:1024+then:500+dynamic)"
)
"""The syntax of `loops.run.strategy_text.parse_strategy`, in words."""
