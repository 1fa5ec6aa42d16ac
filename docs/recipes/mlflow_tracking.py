"""Log the loss scale, each skip with its cause, and the report of a run to MLflow."""

import keras
import mlflow
import numpy as np
import tensorflow as tf

import halfstep as hs

keras.utils.set_random_seed(0)
x = tf.random.stateless_normal((512, 16), seed=(0, 1))
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(32)
layers = [keras.layers.Dense(32, "relu", dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")]
model = keras.Sequential([keras.Input((16,)), *layers])
loss_scaler = hs.LossScaler(hs.Dynamic(2.0**24))  # far too high, to have skips
step = hs.TrainStep(model, keras.losses.MeanSquaredError(), keras.optimizers.Adam(1e-2), loss_scaler=loss_scaler)


def track(visit):
    """An action: it gets the values of each step since the last visit."""
    last, causes = visit.counters.data, visit.outputs["cause"]
    for place in np.flatnonzero(causes):
        mlflow.log_metric(f"skip/{hs.Cause(causes[place]).name}", 1, step=visit.first + int(place))
    if causes.any():
        mlflow.set_tag("last skip", loss_scaler.explain())
    values = {name: float(visit.outputs[name][-1]) for name in ("loss", "loss_scale", "grad_norm")}
    mlflow.log_metrics({**values, "skipped": visit.counters.skipped}, step=last)


mlflow.set_experiment("halfstep")
with mlflow.start_run() as run:
    mlflow.log_params({"strategy": "Dynamic", "initial_scale": 2.0**24, "learning_rate": 1e-2})
    hs.Loop(step, dataset, steps_per_call=20, actions=[track, hs.JsonLines("run/steps.jsonl")]).run(200)
    hs.observe.report(["run"], "run/report.html")
    mlflow.log_artifact("run/report.html")

logged = mlflow.get_run(run.info.run_id).data
print(f"scale 2^{np.log2(logged.metrics['loss_scale']):.0f}, {logged.metrics['skipped']:.0f} steps skipped")
print("causes:", ", ".join(name for name in logged.metrics if name.startswith("skip/")))
print(logged.tags["last skip"])
