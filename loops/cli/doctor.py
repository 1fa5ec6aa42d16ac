"""`halfstep doctor`: what this machine does with float16."""

from __future__ import annotations

import argparse
import json

from loops.machine import examine


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    found = examine()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print("  ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for device in found["devices"]:
        capability = device["compute_capability"]
        print(device["name"] + (f"  compute capability {capability}" if capability else ""))
    for name, rate in found["matmul_gflops"].items():
        print(f"matmul {found['matmul_size']}x{found['matmul_size']} {name:9} {rate:10.1f} GFLOP/s")
    print(found["verdict"])
