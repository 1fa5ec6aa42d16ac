"""Guards the actions that ship: every line of JSON can be read by anyone, and progress is shown on any output."""

import contextlib
import io
import json
import re

import numpy as np
import pytest
import rich.console
import tensorflow as tf

import loops

# What an action writes does not depend on who takes the steps.
pytestmark = pytest.mark.usefixtures("eagerly")


def numbers():
    """1.0, 2.0, ..., without an end."""
    return tf.data.Dataset.from_tensor_slices(np.arange(1, 1000, dtype=np.float32)).repeat()


def looping(*actions, step=None, steps_per_call=2):
    def like_a_train_step(number):
        return {"loss": number / 2, "applied": number != 3.0, "loss_scale": tf.constant(2.0**15)}

    return loops.Loop(step or like_a_train_step, numbers(), steps_per_call=steps_per_call, actions=actions)


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_every_step_is_a_line_and_a_second_run_goes_on(tmp_path, steps_per_call):
    path = tmp_path / "made" / "for" / "it" / "steps.jsonl"
    loop = looping(loops.JsonLines(path), steps_per_call=steps_per_call)
    loop.run(3)
    assert [line["step"] for line in read(path)] == [1, 2, 3]
    loop.run(7)
    assert read(path) == [{"step": n, "loss": n / 2, "applied": n != 3, "loss_scale": 32768.0} for n in range(1, 8)]


def test_a_new_loop_replaces_the_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    for steps in (5, 2):
        looping(loops.JsonLines(str(path))).run(steps)
        assert len(read(path)) == steps


def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
    path, seen = tmp_path / "steps.jsonl", []
    looping(loops.JsonLines(path), lambda visit: seen.append(len(read(path)))).run(6)
    assert seen == [2, 4, 6]


KINDS = ("float16", "bfloat16", "float64", "int8", "int64", "bool")


def test_every_dtype_of_a_scalar_is_written_and_numbers_that_json_does_not_have_become_null(tmp_path):
    def step(number):
        bad = tf.where(number < 2.5, tf.where(number < 1.5, np.nan, np.inf), -np.inf)
        nulls = {"loss": bad, "half": tf.cast(bad, tf.float16), "brain": tf.cast(bad, tf.bfloat16)}
        return {**nulls, **{kind: tf.cast(number, kind) for kind in KINDS}}

    path = tmp_path / "steps.jsonl"
    looping(loops.JsonLines(path), step=step).run(3)
    nulls = dict.fromkeys(("loss", "half", "brain"))
    assert read(path) == [{"step": n, **nulls, **dict.fromkeys(KINDS[:-1], n), "bool": True} for n in (1, 2, 3)]


def test_an_output_named_step_does_not_hide_the_number_of_the_step(tmp_path):
    """A step may well return `optimizer.iterations` under this name, which stands still on a skip."""
    path = tmp_path / "steps.jsonl"
    loop = looping(loops.JsonLines(path), step=lambda number: {"step": tf.constant(0), "loss": number})
    # To refuse such a step is as good as to write it right.
    with contextlib.suppress(loops.LoopError):
        loop.run(2)
    assert [line["step"] for line in read(path)] in ([1, 2], [])


def shown(terminals, labels=("train",), every=1, step=None, steps=6):
    """What one run shows with a label on a terminal, or without one: a text for each of both."""
    asked = [(terminal, label, io.StringIO()) for terminal in terminals for label in labels]
    progress = [
        loops.Progress(
            label,
            every=every,
            console=rich.console.Console(file=text, force_terminal=terminal, width=120, color_system=None),
        )
        for terminal, label, text in asked
    ]
    looping(*progress, step=step).run(steps)
    return [re.sub(r"  [\d.e+]+ steps/s  [\d:]+ left", "  RATE", text.getvalue()) for _, _, text in asked]


BOTH = (False, True)


def test_progress_is_plain_lines_where_there_is_no_terminal():
    """Also where they are long."""
    text, long = shown([False], ["train", "x" * 300])
    assert len(long.splitlines()) == 3
    assert text.splitlines() == [
        "train  2/6  applied 2  skipped 0  scale 32768  loss 1",
        "train  4/6  applied 3  skipped 1  scale 32768  loss 2  RATE",
        "train  6/6  applied 5  skipped 1  scale 32768  loss 3  RATE",
    ]


def test_few_plain_lines_are_written_but_always_the_last():
    for every in (loops.Seconds(3600.0), 1000):
        (text,) = shown([False], every=every)
        assert text.splitlines() == ["train  6/6  applied 5  skipped 1  scale 32768  loss 3  RATE"]


def test_progress_is_a_bar_on_a_terminal():
    (text,) = shown([True])
    assert "6/6" in text
    assert "applied 5  skipped 1  scale 32768  loss 3" in text
    assert "\x1b[" in text


def test_a_label_is_shown_as_it_is():
    labels = ["run [bold] 3", "[/red]", "a [1/2] b", "plain"]
    for text, label in zip(shown(BOTH, labels), [*labels, *labels], strict=True):
        assert label in text


@pytest.mark.parametrize(("name", "dtype"), [("loss", "bfloat16"), ("loss", "int32"), ("reward", "float32")])
def test_a_loss_of_any_dtype_is_shown_and_nothing_else(name, dtype):
    for text in shown(BOTH, step=lambda number: {name: tf.cast(number, dtype)}):
        assert "6/6" in text
        assert "loss 6" in text if name == "loss" else "loss" not in text


def test_the_bar_is_taken_down_when_the_run_breaks():
    text = io.StringIO()
    console = rich.console.Console(file=text, force_terminal=True, width=100)
    progress = loops.Progress(console=console)

    def stop(visit):
        raise KeyboardInterrupt

    loop = looping(progress, stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            loop.run(6)
    # A second bar could not start on this console while the first one lives.
    with rich.console.Console(file=text).status("again"):
        pass
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 2


def step(x):
    return {"loss": tf.reduce_sum(x), "applied": tf.constant(True)}


def data():
    return tf.data.Dataset.from_tensors(tf.ones([2])).repeat()


def loop_in(folder, out, *, terminal=False, more=()):
    console = rich.console.Console(file=out, force_terminal=terminal, width=200)
    save = loops.Checkpoint(folder / "run", every=10, resume=True)
    return loops.Loop(step, data(), steps_per_call=1, actions=[loops.Progress(console=console), save, *more])


SAID = (
    "train  4/4  already at step 4 of 4: nothing to do. Ask for more steps, or start over with a new loop and a new "
    "folder for its checkpoints.\n"
)


def test_a_run_at_its_goal_says_so_once(tmp_path):
    loop_in(tmp_path, io.StringIO()).run(4)
    out = io.StringIO()
    again = loop_in(tmp_path, out)
    assert again.run(4).data == 4
    assert out.getvalue() == SAID
    again.run(4)
    assert out.getvalue() == SAID
    again.run(6)
    assert out.getvalue().startswith(f"{SAID}train  resumed from step 4\ntrain  6/6  applied 6")
    again.run(6)
    assert "already at step 6 of 6" in out.getvalue()


class Stopped:
    stopped = "enough was seen at step 4"

    def __call__(self, visit):
        """It has ended the run before."""


def test_a_run_that_has_ended_says_why(tmp_path):
    """A terminal does not go on compiling."""
    loop_in(tmp_path, io.StringIO()).run(4)
    out = io.StringIO()
    loop_in(tmp_path, out, terminal=True).run(4)
    shown, out = out.getvalue(), io.StringIO()
    assert shown.rfind("already at step 4 of 4: nothing to do") > shown.rfind("compiling")
    assert loop_in(tmp_path, out, more=[Stopped()]).run(9).data == 4
    assert out.getvalue() == "train  4/9  nothing to do: enough was seen at step 4.\n"


def test_an_own_action_is_told(tmp_path):
    told = []

    class Told:
        def nothing_to_do(self, done, goal, why):
            told.append((done, goal, why))

        def __call__(self, visit):
            told.append(visit.counters.data)

    loop = loops.Loop(step, data(), steps_per_call=1, actions=[Told()])
    loop.run(1)
    loop.run(1)
    assert told == [1, (1, 1, None)]
