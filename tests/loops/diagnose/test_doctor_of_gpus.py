"""Guards what the doctor says of GPUs, on recorded descriptions of a build and of six generations of cards."""

import pytest

from loops.diagnose.doctor import machine as looked
from loops.diagnose.doctor.machine import Gpu, Surroundings, about_gpus

BUILD = {
    "cpu_compiler": "clang",
    "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "is_cuda_build": True,
    "is_rocm_build": False,
    "is_tensorrt_build": False,
}
"""Of TensorFlow 2.21's wheel for Linux."""
CARDS = {
    "Tesla P100-PCIE-16GB": ((6, 0), "machine code", "no tensor cores; float16 has twice the rate"),
    "NVIDIA GeForce GTX 1080": ((6, 1), "machine code", "no tensor cores: float16 saves memory"),
    "Tesla V100-SXM2-16GB": ((7, 0), "machine code", "float16; none for bfloat16"),
    "Tesla T4": ((7, 5), "machine code", "float16; none for bfloat16"),
    "NVIDIA A100-SXM4-40GB": ((8, 0), "machine code", "float16 and bfloat16."),
    "NVIDIA GeForce RTX 4090": ((8, 9), "machine code", "bfloat16 and float8."),
    "NVIDIA H200": ((9, 0), "PTX alone", "bfloat16 and float8."),
    "NVIDIA B200": ((10, 0), "CUDA_ERROR_INVALID_PTX", "bfloat16 and float8."),
    "NVIDIA GeForce RTX 5090": ((12, 0), "CUDA_ERROR_INVALID_PTX", "bfloat16 and float8."),
}


def with_card(name="Tesla T4", capability=(7, 5), **others):
    facts = {"build": BUILD, "version": "2.21.0", "card": True, "driver": "580.95.05", "cudnn": "9.3.0.75"}
    return Surroundings(**{**facts, "gpus": [Gpu(name, capability)], **others})


@pytest.mark.parametrize("name", CARDS)
def test_every_generation_of_cards(name):
    capability, runs, formats = CARDS[name]
    said = about_gpus(with_card(name, capability))
    assert said[0].startswith(f"{name}: compute capability {capability[0]}.{capability[1]}")
    assert runs in said[0]
    assert formats in said[1]
    assert said[2] == "driver 580.95.05, CUDA 12.5.1 in this build: they fit."
    assert ("INVALID_PTX" in said[0]) == (capability >= (10, 0))


def test_a_card_older_than_the_build_does_not_run():
    assert "it does not run there" in about_gpus(with_card("Tesla K80", (3, 7)))[0]


def test_a_build_without_machine_code_or_ptx_for_a_newer_card():
    build = {**BUILD, "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80"]}
    assert "it does not run there" in about_gpus(with_card("NVIDIA H200", (9, 0), build=build))[0]


@pytest.mark.parametrize(
    ("driver", "capability", "said"),
    [
        ("470.82.01", (8, 0), "driver 470.82.01: too old for CUDA 12.5.1 and this card. Install 525.60 or newer."),
        ("525.60.13", (8, 0), "they fit"),
        ("525.60.13", (9, 0), "Install 555 or newer."),  # It has to compile PTX.
        ("555.42.02", (9, 0), "they fit"),
        ("555.42.02", (12, 0), "Install 570 or newer."),
    ],
)
def test_the_driver(driver, capability, said):
    assert any(said in line for line in about_gpus(with_card("a card", capability, driver=driver)))


def test_memory_cudnn_and_xla():
    said = about_gpus(with_card(cudnn=None, clusters=True))
    assert any("needs version 9" in line and "tensorflow[and-cuda]==2.21.0" in line for line in said)
    assert any("TF_FORCE_GPU_ALLOW_GROWTH" in line for line in said)
    assert said[-1].startswith("XLA: ")
    assert "clusters are on" in said[-1]
    grows = with_card(gpus=[Gpu("Tesla T4", (7, 5), grows=True)])
    assert not any("TF_FORCE_GPU_ALLOW_GROWTH" in line for line in about_gpus(grows))


def test_cards_of_one_kind_are_told_once():
    said = about_gpus(with_card(gpus=[Gpu("NVIDIA H200", (9, 0))] * 8))
    assert sum("compute capability" in line for line in said) == 1


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"build": {"is_cuda_build": False}}, "built without CUDA: pip install"),
        ({"driver": None}, "no driver: install NVIDIA's driver"),
        ({"driver": "470.82.01"}, "too old for CUDA 12.5.1"),
        ({}, 'pip install "tensorflow[and-cuda]==2.21.0"'),
    ],
)
def test_a_card_that_tensorflow_does_not_see(others, said):
    (line,) = about_gpus(with_card(**{"gpus": [], **others}))
    assert said in line


def test_nothing_is_said_without_a_card():
    assert about_gpus(Surroundings(build=BUILD, version="2.21.0")) == []


def test_this_machine_is_looked_at():
    found = looked.surroundings()
    assert found.build["is_cuda_build"] in (True, False)
    assert isinstance(about_gpus(found), list)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        ("something else", None),
    ],
)
def test_the_version_of_the_driver_is_read(text, version, tmp_path, monkeypatch):
    path = tmp_path / "version"
    path.write_text(text)
    monkeypatch.setattr(looked, "_DRIVER", path)
    assert looked.surroundings().driver == version
