"""`halfstep train`: one run."""

from __future__ import annotations

import argparse
from typing import Any

from halfstep.commands.shared import FORMS, POLICIES, TASKS, count, seed


def add_parser(commands: Any) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("train", help="train one task and write DIR/summary.json and DIR/steps.jsonl")
    parser.add_argument("task", metavar="TASK", help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}")
    parser.add_argument(
        "--policy", default="mixed_float16", help=f"Keras dtype policy: {', '.join(POLICIES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy",
        default="dynamic",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{FORMS} (default: %(default)s)",
    )
    parser.add_argument("--steps", type=count, default=400, help="batches to take (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", default="run", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="N",
        help="save DIR/checkpoints every N steps (default: never)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint; start from the beginning if there is none",
    )
    parser.add_argument(
        "--changed",
        action="append",
        default=[],
        metavar="NAME",
        help="with --resume: go on although this setting differs from the run's, such as loss_scaler after another "
        "--strategy; may be given several times",
    )
    parser.add_argument(
        "--trace",
        type=count,
        nargs="?",
        const=100,
        metavar="EVERY",
        help="record DIR/trace.arrow for halfstep lab replay, with the histograms of every EVERY-th step (100)",
    )
    parser.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="train in N processes on the CPUs of this machine, each with an equal share of every batch; on several "
        "machines start the command on each, without this option and with TF_CONFIG set (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=count,
        default=300,
        metavar="SECONDS",
        help="how long workers wait for each other at the start (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    import scaler
    from halfstep.launch import launch, leave_with_the_launcher
    from halfstep.terminal import progress
    from loops import tasks
    from loops.loop.workers import addresses, join_workers
    from loops.record.files import to_json
    from loops.run.train import RunOptions, train

    if options.resume and not options.checkpoint_every:
        raise scaler.InvalidArgument(
            "--resume continues from checkpoints and saves more: also give --checkpoint-every N."
        )
    if options.changed and not options.resume:
        raise scaler.InvalidArgument("--changed says what differs from the run that goes on: also give --resume.")
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
                f"--workers {options.workers}: {options.task} has batches of {task.batch_size}, which cannot be "
                "divided equally among them."
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
        changed=options.changed,
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
