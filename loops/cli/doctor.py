"""`halfstep doctor`: what this machine does with float16."""

from __future__ import annotations

import argparse
import json
from typing import Any

from loops.machine import examine


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("doctor", help="versions, devices, measured matmul rates, and whether float16 pays")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
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
