"""Guards that a run which is at its goal already says so, once."""

import io

import rich.console
import tensorflow as tf

import loops


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


def test_a_terminal_does_not_go_on_compiling(tmp_path):
    loop_in(tmp_path, io.StringIO()).run(4)
    out = io.StringIO()
    loop_in(tmp_path, out, terminal=True).run(4)
    shown = out.getvalue()
    assert shown.rfind("already at step 4 of 4: nothing to do") > shown.rfind("compiling")


class Stopped:
    stopped = "enough was seen at step 4"

    def __call__(self, visit):
        """It has ended the run before."""


def test_a_run_that_an_action_has_ended_says_why(tmp_path):
    loop_in(tmp_path, io.StringIO()).run(4)
    out = io.StringIO()
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
