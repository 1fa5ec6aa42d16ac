"""`halfstep train`: one run."""

from __future__ import annotations

import argparse

import scaler
from halfstep.launch import launch, leave_with_the_launcher
from halfstep.terminal import progress
from loops import tasks
from loops.loop.workers.join import addresses, join_workers
from loops.record.files import to_json
from loops.run.train import RunOptions, train


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    if options.resume and not options.checkpoint_every:
        raise scaler.InvalidArgument(
            "--resume goes on from checkpoints and saves more: give --checkpoint-every N, too."
        )
    named = addresses()
    if options.workers > 1 and named:
        raise scaler.InvalidArgument(
            "--workers starts the workers of one machine, and TF_CONFIG says that this process is a worker already. "
            "Leave out one of them."
        )
    leave_with_the_launcher()
    # Before TensorFlow is used for anything else.
    strategy = join_workers(options.wait) if len(named) > 1 else None
    task = tasks.load(options.task)
    run = RunOptions(
        options.policy,
        options.strategy,
        options.steps,
        options.seed,
        learning_rate=task.learning_rate,
        batch_size=task.batch_size,
    )
    if options.workers > 1:
        if task.batch_size % options.workers:
            raise scaler.InvalidArgument(
                f"--workers {options.workers}: {options.task} has batches of {task.batch_size}, which so many cannot "
                "share equally."
            )
        launch(options.arguments, options.workers)
        return
    summary = train(
        task,
        run,
        options.out,
        lambda model: [progress(options.task)],
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        trace_every=options.trace,
        strategy=strategy,
    )
    if strategy and strategy.cluster_resolver.task_id:
        return
    if options.json:
        print(to_json(summary))
    else:
        score = (
            f"accuracy {summary['accuracy']:.1%}"
            if "accuracy" in summary
            else f"perplexity {summary['perplexity']:.3f}"
        )
        print(
            f"{score}  loss {summary['final_loss']:.4g}  applied {summary['applied']}  "
            f"skipped {summary['skipped']}  loss scale {summary['loss_scale']:g}\n"
            f"weights {summary['weights_digest']}\nwrote {options.out}/summary.json"
        )
