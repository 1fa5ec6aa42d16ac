"""Loss scales recorded from other systems' own code, as data: the scale after each step, 1 finite and 0 non-finite.

Recorded on 2026-11-20 and 21 by running the classes named beside them (see docs/presets.md for versions and sources),
from a scale of 8 with a growth interval of 4 unless the arguments say otherwise. At "raises" the original raises an
exception and leaves the scale as it was.
"""

from typing import NamedTuple

P1, P2, P3 = "1111111111111", "00000", "1110111110110010011111111111"


class Golden(NamedTuple):
    """One recorded trace."""

    preset: str
    arguments: dict
    word: str
    scales: str


_8_4 = {"initial_scale": 8.0, "growth_interval": 4}
_LIKE_TORCH = {
    P1: "8 8 8 16 16 16 16 32 32 32 32 64 64",
    P2: "4 2 1 .5 .25",
    P3: "8 8 8 4 4 4 4 8 8 4 4 4 2 1 1 .5 .25 .25 .25 .25 .5 .5 .5 .5 1 1 1 1",
}
_FLOOR_1 = {
    P1: _LIKE_TORCH[P1],
    P2: "4 2 1 1 1",
    P3: "8 8 8 4 4 4 4 8 8 4 4 4 2 1 1 1 1 1 1 1 2 2 2 2 4 4 4 4",
}
_HYSTERESIS_2 = {
    P1: _LIKE_TORCH[P1],
    P2: "8 4 2 1 1",
    P3: "8 8 8 8 8 8 8 16 16 16 16 16 8 4 4 2 1 1 1 1 2 2 2 2 4 4 4 4",
}
_FLAX = {
    P1: "8 8 8 8 16 16 16 16 16 32 32 32 32",
    P2: "4 2 1 .5 .25",
    P3: "8 8 8 4 4 4 4 4 8 4 4 4 2 1 1 .5 .25 .25 .25 .25 .25 .5 .5 .5 .5 .5 1 1",
}
_FAIRSEQ_04 = {
    P1: _LIKE_TORCH[P1],
    P2: _LIKE_TORCH[P2],
    P3: "8 8 8 8 8 8 8 16 16 8 8 8 8 4 4 2 1 1 1 1 2 2 2 2 4 4 4 4",
}
_METASEQ = {
    P1: "8 8 8 16 16 16 16 32 32 32 32 32 32",
    P2: _LIKE_TORCH[P2],
    P3: "8 8 8 4 4 8 8 16 16 8 8 8 4 2 4 2 1 2 4 4 8 8 8 8 16 16 16 16",
}
_8_4_BY_4 = {**_8_4, "growth_factor": 4.0}
_BY_4_P1 = "8 8 8 32 32 32 32 128 128 128 128 512 512"
_16_3, _32_9, _64_27 = 5.333333333333333, 3.5555555555555554, 2.3703703703703702
_DEEPSPEED_P1 = "8 8 8 8 16 16 16 16 32 32 32 32 64"

GOLDEN = [
    *(Golden("pytorch", _8_4, word, scales) for word, scales in _LIKE_TORCH.items()),
    *(Golden("fairscale", _8_4, word, scales) for word, scales in _LIKE_TORCH.items()),
    *(Golden("nemo", _8_4, word, scales) for word, scales in _LIKE_TORCH.items()),
    *(Golden("jmp", _8_4, word, scales) for word, scales in _FLOOR_1.items()),
    *(Golden("megatron", {**_8_4, "hysteresis": 1}, word, scales) for word, scales in _FLOOR_1.items()),
    *(Golden("megatron", _8_4, word, scales) for word, scales in _HYSTERESIS_2.items()),
    Golden("megatron", _8_4, "010", "8 8 4"),
    *(
        Golden("colossalai", {**_8_4, "hysteresis": 1, "min_scale": 1.0}, word, scales)
        for word, scales in _FLOOR_1.items()
    ),
    *(Golden("colossalai", {**_8_4, "min_scale": 1.0}, word, scales) for word, scales in _HYSTERESIS_2.items()),
    *(Golden("flax", _8_4, word, scales) for word, scales in _FLAX.items()),
    Golden("flax", {"initial_scale": 8.0, "growth_interval": 3}, "111111111111", "8 8 8 16 16 16 16 32 32 32 32 64"),
    *(Golden("fairseq", _8_4, word, scales) for word, scales in _LIKE_TORCH.items()),
    *(Golden("fairseq", {**_8_4, "tolerance": 0.4}, word, scales) for word, scales in _FAIRSEQ_04.items()),
    # Sixteen overflows to 1.2207e-4; at the next one fairseq raises and leaves the scale.
    Golden("fairseq", _8_4, "0" * 17, " ".join(str(2.0 ** (2 - k)) for k in range(16)) + " raises"),
    *(Golden("metaseq", _8_4, word, scales) for word, scales in _METASEQ.items()),
    Golden("deepspeed", {**_8_4, "hysteresis": 1}, P1, _DEEPSPEED_P1),
    Golden("deepspeed", {**_8_4, "hysteresis": 1}, "0000", "4 2 1 raises"),
    Golden("deepspeed", {**_8_4, "hysteresis": 1}, "1110111110110010", "8 8 8 4 4 4 4 4 8 4 4 4 2 1 1 raises"),
    Golden("deepspeed", _8_4, P1, _DEEPSPEED_P1),
    Golden("deepspeed", _8_4, P2, "8 4 2 1 raises"),
    Golden("deepspeed", _8_4, P3, "8 8 8 8 8 8 8 8 16 16 16 16 8 4 4 2 1 1 1 1 1 2 2 2 2 4 4 4"),
    Golden(
        "deepspeed",
        {**_8_4, "consecutive_hysteresis": True},
        P3,
        "8 8 8 8 8 8 8 8 16 16 16 16 16 8 8 8 4 4 4 4 4 8 8 8 8 16 16 16",
    ),
    Golden("deepspeed_2025_02", _8_4, P1, _HYSTERESIS_2[P1]),
    Golden("deepspeed_2025_02", _8_4, P2, "8 4 2 1 raises"),
    Golden("deepspeed_2025_02", _8_4, P3, _HYSTERESIS_2[P3]),
    Golden(
        "deepspeed_2025_02",
        {**_8_4, "consecutive_hysteresis": True},
        P3,
        "8 8 8 8 8 8 8 16 16 16 16 16 16 8 8 8 4 4 4 4 8 8 8 8 16 16 16 16",
    ),
    Golden("deepspeed", _8_4_BY_4, P1, "8 8 8 8 32 32 32 32 128 128 128 128 512"),
    Golden("deepspeed", _8_4_BY_4, "11101111101100100", "8 8 8 8 8 8 8 8 32 32 32 32 8 2 2 1 raises"),
    Golden("deepspeed", {**_8_4_BY_4, "min_scale": 0.1}, P2, "8 2 .5 .125 .1"),
    Golden(
        "deepspeed",
        {**_8_4, "growth_factor": 1.5},
        P3,
        f"{'8 ' * 8}12 12 12 12 8 {_16_3} {_16_3} {_32_9} {f'{_64_27} ' * 5}{f'{_32_9} ' * 4}{_16_3} {_16_3} {_16_3}",
    ),
    Golden(
        "deepspeed",
        {**_8_4_BY_4, "consecutive_hysteresis": True},
        P3,
        "8 8 8 8 8 8 8 8 32 32 32 32 32 8 8 8 2 2 2 2 2 8 8 8 8 32 32 32",
    ),
    Golden("deepspeed_2025_02", _8_4_BY_4, P1, _BY_4_P1),
    Golden("deepspeed_2025_02", _8_4_BY_4, "11101111101100100", "8 8 8 8 8 8 8 32 32 32 32 32 8 2 2 1 raises"),
    Golden(
        "deepspeed_2025_02",
        {**_8_4_BY_4, "consecutive_hysteresis": True},
        P3,
        "8 8 8 8 8 8 8 32 32 32 32 32 32 8 8 8 2 2 2 2 8 8 8 8 32 32 32 32",
    ),
    # TensorFlow 1's DynamicLossScale, whose `multiplier` tf_keras sets to 2.
    *(Golden("tf_keras", _8_4, word, scales) for word, scales in _FLOOR_1.items()),
    Golden("tf_keras", _8_4_BY_4, P1, _BY_4_P1),
    Golden("tf_keras", _8_4_BY_4, P3, "8 8 8 2 2 2 2 8 8 2 2 2 1 1 1 1 1 1 1 1 4 4 4 4 16 16 16 16"),
    Golden(
        "openseq2seq_backoff",
        {"growth_interval": 4},
        "1111111110110010011111111111",
        "16384 " * 9 + "8192 8192 8192 4096 2048 2048 1024 512 512 512 512 1024 1024 1024 1024 2048 2048 2048 2048",
    ),
    # Overflow exactly when the scale in use is above 4: 8 8 4 2 2 2 2 4 are used, of which the first is the start.
    Golden("mxnet", _8_4, "0011111", "8 4 2 2 2 2 4"),
]
