"""Guards that scaled gradients of an earlier call are never added to this call's in silence: refused, or warned of."""

import pytest
import tensorflow as tf
from scaler_cases import descent, gradients_of
from step_programs import trace_no_branches
from ways import graph

import scaler


class Step:
    """One weight of the gradient -1, and what a step keeps from call to call."""

    def __init__(self, loss_scaler=None, unscales=False):
        # What a step selects is traced in half the time of what it branches to.
        self.loss_scaler = loss_scaler or scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=1), select=True)
        self.weight, self.kept = tf.Variable([0.0], name="weight"), tf.Variable([0.0], name="kept")
        self.count, self.unscales = tf.Variable(0), unscales
        self.optimizer = descent(self.weight)

    def gradient(self):
        return gradients_of(self.loss_scaler, lambda: -tf.reduce_sum(self.weight), self.weight)

    def apply(self, grad, **options):
        if self.unscales:  # Which asks the same of gradients, and is traced sooner.
            return scaler.all_finite(self.loss_scaler.unscale([grad]))
        return self.loss_scaler.apply(self.optimizer, [grad], [self.weight], **options).finite

    def counted(self):
        """Whether this call is the first of a window of two."""
        return tf.equal(self.count.assign_add(1) % 2, 1)


REFUSED, WINDOWS, HEALTHY = {}, [], {}


def refused(words):
    return lambda step: REFUSED.setdefault(step, words) and step


def window(step):
    WINDOWS.append(step)
    return step


def healthy(given):
    """Each gives the gradient that is applied, and goes on after that."""
    return lambda step: HEALTHY.setdefault(given, []).append(step) or step


@refused("times a constant")
def momentum(own):
    own.kept.assign(0.9 * own.kept + own.gradient())
    return own.apply(own.kept.read_value())


@refused("times a constant")
def momentum_in_two_assignments(own):
    own.kept.assign(own.kept * 0.9)
    own.kept.assign_add(own.gradient())
    return own.apply(own.kept + 0.0)


@refused("times a constant")
def nesterov_that_is_stored_after_it_was_applied(own):
    grad = own.gradient()
    speed = 0.9 * own.kept + grad
    finite = own.apply(grad + 0.9 * speed)
    own.kept.assign(speed)
    return finite


@refused("times a constant")
def average(own):
    own.kept.assign_sub(0.1 * (own.kept - own.gradient()))
    return own.apply(own.kept / 0.5)


@refused("times a constant")
def average_that_a_branch_applies(own):
    own.kept.assign(0.5 * (own.kept + own.gradient()))
    return tf.cond(own.counted(), lambda: own.apply(own.kept.read_value()), lambda: True)


@refused("adds the last call's")
def last_gradient(own):
    grad = own.gradient()
    total = grad + own.kept
    own.kept.assign(grad)
    return own.apply(total)


@refused("adds the last call's")
def last_gradient_in_a_function(own):
    @graph
    def inner():
        return last_gradient(own)

    return inner()


@pytest.mark.parametrize("step", REFUSED)
def test_what_no_window_begins_anew_is_refused(step):
    own = Step(unscales=step not in (momentum, last_gradient, average_that_a_branch_applies))
    words = REFUSED[step]
    with pytest.raises(scaler.InvalidArgument, match=rf"the variable 'kept:0' keeps.*{words}.*unscaled=True"):
        graph(lambda: step(own))()
    assert own.weight.numpy() == [0.0]


def cleared_when_due(add):
    def step(own):
        due = tf.logical_not(own.counted())
        add(own.kept, own.gradient() / 2.0)
        finite = own.apply(own.kept.read_value(), when=due)
        own.kept.assign(tf.where(due, tf.zeros_like(own.kept), own.kept))
        return finite

    return step


WINDOWS += map(
    cleared_when_due,
    [
        lambda kept, grad: kept.assign_add(grad),
        lambda kept, grad: kept.scatter_nd_add([[0]], grad),
    ],
)


@window
def where(own):
    first, grad = own.counted(), own.gradient()
    own.kept.assign(tf.where(first, grad, own.kept + grad))
    return own.apply(own.kept / 2.0, when=tf.logical_not(first))


@window
def masked(own):
    first = own.counted()
    own.kept.assign(own.kept * tf.cast(tf.logical_not(first), tf.float32) + own.gradient() / 2.0)
    return own.apply(own.kept + 0.0, when=tf.logical_not(first))


@window
def sum_that_a_branch_applies_and_clears(own):
    own.kept.assign_add(own.gradient() * 0.5)

    def due():
        own.apply(own.kept.read_value())
        own.kept.assign([0.0])
        return True

    return tf.cond(own.counted(), lambda: False, due)


@window
def pairs(own):
    first, grad = own.counted(), own.gradient() / 2.0
    return tf.cond(first, lambda: own.kept.assign(grad)[0] > 0.0, lambda: own.apply(own.kept + grad))


@window
def clipped(own):
    first, grad = own.counted(), own.gradient() / 2.0
    own.kept.assign(tf.where(first, grad, own.kept + grad))
    (grad,), _ = tf.clip_by_global_norm([own.kept.read_value()], 2.0**20 * own.loss_scaler.scale_of_gradients)
    return own.apply(grad, when=tf.logical_not(first))


@pytest.mark.parametrize("step", WINDOWS)
def test_a_window_works_and_a_warning_says_what_it_needs(step):
    runs = step in (WINDOWS[0], where, sum_that_a_branch_applies_and_clears)
    own = Step(unscales=not runs)
    run = graph(lambda: step(own))
    with pytest.warns(
        scaler.ScaleWarning, match=r"'kept:0' sums.*does not move inside of a window.*unscaled=True"
    ) as said:
        run()
    for _ in range(7):
        run()
    assert len(said) == 1
    assert own.weight.numpy() == [4.0 if runs else 0.0]


def test_so_does_one_in_a_loop_of_the_graph():
    own = Step()

    def once(index):
        where(own)
        return [index + 1]

    run = graph(lambda count: tf.while_loop(lambda index: index < count, once, [0]))
    with pytest.warns(scaler.ScaleWarning, match="'kept:0' sums"):
        run(8)
    assert own.weight.numpy() == [4.0]


def test_a_scale_that_cannot_move_is_not_suspected(monkeypatch):
    trace_no_branches(monkeypatch)
    own = Step(scaler.LossScaler(scaler.Static(2.0**7)))
    graph(lambda: last_gradient(own)).get_concrete_function()


@healthy("scaled")
def unscaled_by_an_inverse_and_scaled_again(own):
    grad, scale = own.gradient(), own.loss_scaler.scale_of_gradients
    total = grad + own.kept * scale
    own.kept.assign(0.9 * own.kept + grad * (1.0 / scale))
    yield total


@healthy("scaled")
def sum_inside_of_one_call(own):
    own.kept.assign([0.0])
    tf.while_loop(lambda index: index < 4, lambda index: _added(own, index), [0])
    yield own.kept.read_value()


def _added(own, index):
    own.kept.assign_add(own.gradient() / 4.0)
    return [index + 1]


@healthy("scaled")
def sum_that_each_call_clears(own):
    for _ in range(2):
        own.kept.assign_add(own.gradient() / 2.0)
    yield own.kept.read_value()
    own.kept.assign([0.0])


@healthy("scaled")
def copy_of_the_gradient(own):
    grad = own.gradient()
    own.kept.assign(grad)
    yield own.kept + grad


@healthy("scaled")
def norm_for_a_log(own):
    grad = own.gradient()
    own.kept.assign(0.9 * own.kept + 0.1 * tf.norm(grad))
    yield grad


@healthy("scaled")
def sharpness_aware(own):
    def gradient():
        return gradients_of(
            own.loss_scaler, lambda: tf.reduce_sum((own.weight - 1.0) ** 2) + tf.nn.l2_loss(own.weight), own.weight
        )

    grad = gradient()
    away = 0.05 * grad / (tf.norm(grad) + 1e-12)
    own.weight.assign_add(away)
    grad = gradient()
    own.weight.assign_sub(away)
    yield grad


@healthy("scaled")
def state_of_the_forward_pass(own):
    with tf.GradientTape() as tape:
        state = tf.tanh(own.kept + own.weight)
        scaled = own.loss_scaler.scale(tf.reduce_sum(own.weight * tf.stop_gradient(own.kept) + state))
    own.kept.assign(state)
    yield tape.gradient(scaled, own.weight)


@healthy("scaled")
def average_of_the_weight(own):
    yield own.gradient() + 0.0 * own.kept
    own.kept.assign(0.9 * own.kept + 0.1 * own.weight)


@healthy("scaled")
def scale_that_is_kept(own):
    grad = own.gradient()
    own.kept.assign(tf.reshape(own.loss_scaler.scale_of_gradients, [1]))
    yield grad + 0.0 * own.kept


@healthy("unscaled")
def momentum_of_unscaled(own):
    (grad,) = own.loss_scaler.unscale([own.gradient()])
    own.kept.assign(0.9 * own.kept + grad)
    yield own.kept.read_value()


@pytest.mark.parametrize("given", HEALTHY)
def test_what_keeps_something_else_is_not_suspected(given, monkeypatch):
    trace_no_branches(monkeypatch)
    loss_scaler = scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=1), select=True)
    each = [Step(loss_scaler) for _ in HEALTHY[given]]
    weights = [own.weight for own in each]
    optimizer = descent(*weights)

    @graph
    def run():
        steps = [step(own) for step, own in zip(HEALTHY[given], each, strict=True)]
        grads = [next(step) for step in steps]
        finite = loss_scaler.apply(optimizer, grads, weights, unscaled=given == "unscaled").finite
        for step in steps:
            assert next(step, None) is None
        return finite

    assert run()
    assert run()


def with_its_own_scale(own):
    grad, scale = own.gradient(), own.loss_scaler.scale_of_gradients
    own.kept.assign(0.9 * own.kept + grad)
    return own.apply(own.kept.read_value(), loss_scale=scale)


def descent_with_momentum(own):
    def moved(grads, variables):
        own.kept.assign(0.9 * own.kept + grads[0])
        variables[0].assign_sub(own.kept)

    return own.loss_scaler.apply(moved, [own.gradient()], [own.weight]).finite


@pytest.mark.parametrize("step", [with_its_own_scale, descent_with_momentum])
def test_nor_are_these_steps(step, monkeypatch):
    trace_no_branches(monkeypatch)
    own = Step(scaler.LossScaler(scaler.Dynamic(2.0**10, growth_interval=1)))
    run = graph(lambda: step(own))
    run()
    run()


def test_a_limit_by_norms_of_other_scales_is_warned_of():
    own = Step()

    def step():
        grad = own.gradient()
        norm = tf.norm(grad)
        own.kept.assign(0.9 * own.kept + 0.1 * norm)
        return own.apply(grad * tf.minimum(1.0, own.kept[0] / norm))

    with pytest.warns(scaler.ScaleWarning, match=r"'kept:0' keeps what earlier calls computed from scaled gradients"):
        graph(step)()


@pytest.mark.parametrize("how", ["the last one", "a momentum", "a window", "one scale", "unscaled", "a norm"])
def test_what_a_loop_carries_from_pass_to_pass(how, monkeypatch):
    if how != "a window":  # The others move in each pass.
        trace_no_branches(monkeypatch)
    own = Step()

    def one_pass(index, carried):
        grad = own.gradient()
        taken, due, update, options = grad + carried, True, True, {}
        if how == "the last one":
            carried = grad
        elif how == "a momentum":
            taken = carried = 0.5 * carried + grad
        elif how == "a window":
            due = tf.equal(index % 2, 1)
            carried = tf.where(due, tf.zeros_like(grad), taken)
        elif how == "one scale":
            carried, update = grad, False
        elif how == "unscaled":
            (grad,) = own.loss_scaler.unscale([grad])
            taken, carried, options = grad + carried, grad, {"unscaled": True}
        else:
            taken = grad / tf.maximum(carried, 1.0)
            carried = tf.abs(grad) / own.loss_scaler.loss_scale
        own.apply(taken, when=due, update=update, **options)
        return index + 1, carried

    step = graph(lambda: tf.while_loop(lambda index, _: index < 4, one_pass, (0, tf.zeros([1]))))
    if how in ("the last one", "a momentum"):
        with pytest.raises(scaler.InvalidArgument, match="a loop carries scaled gradients from one pass"):
            step()
    else:
        step()
        assert own.weight.numpy().tolist() == [7.0 if how in ("one scale", "unscaled") else 4.0]


@pytest.mark.parametrize("how", ["late", "now and then late", "two passes late", "late and applied first", "by name"])
def test_gradients_that_a_loop_applies_late(how, monkeypatch):
    trace_no_branches(monkeypatch)
    own = Step()

    def one_pass(index, late, later, scale):
        if how == "late and applied first":  # The last loss is theirs.
            own.apply(late)
        grad = own.gradient()
        if how == "by name":
            own.apply(late, loss_scale=scale)
        elif how != "late and applied first":
            own.apply(late)
        if how == "two passes late":
            return index + 1, later, grad, scale
        if how == "now and then late":
            return index + 1, tf.cond(index % 2 == 0, lambda: grad, lambda: late), later, scale
        return index + 1, grad, later, own.loss_scaler.scale_of_gradients

    @graph
    def step():
        own.gradient()
        tf.while_loop(lambda index, *_: index < 4, one_pass, (0, tf.zeros([1]), tf.zeros([1]), 1.0))

    if how in ("late and applied first", "by name"):
        step()
        assert own.weight.numpy().tolist() == [3.0]
    else:
        with pytest.raises(scaler.InvalidArgument, match="a loop carries these gradients from an earlier pass"):
            step()
