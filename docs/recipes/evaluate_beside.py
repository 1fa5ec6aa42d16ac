"""Evaluate the checkpoints of a run while `halfstep train` trains it in another process."""

import pathlib
import subprocess
import sys

import halfstep as hs

pathlib.Path("run").mkdir()
options = "--policy mixed_float16 --steps 90 --checkpoint-every 30 --out run"
training = subprocess.Popen([sys.executable, "-m", "halfstep", "train", "digits", *options.split()])

digits = hs.loops.tasks.load("digits")
model = digits.model("mixed_float16")  # built as in the run


def evaluate(step):
    scores = digits.scores(model)  # on the held-out images: a dict of numbers
    print(f"step {step}: accuracy {scores['accuracy']:.2f}")
    return scores


found = hs.evaluate_checkpoints("run", evaluate, model)  # ends when the run is complete
training.wait()
best = max(found, key=lambda step: found[step]["accuracy"])
print(f"best of {len(found)} checkpoints: {found[best]['accuracy']:.2f}")
hs.observe.report(["run"], "report.html")
