"""The research strategies a second time, from their descriptions, in plain Python: one word, one number at a time.

A function takes the events of one word, each `(finite, amax)` or `(finite, counts)`, and the strategy's numbers, and
gives the state after each step as a dict.
"""

import math

import numpy as np

INFINITY = math.inf


def f32(x):
    """Rounded to float32, with 0 for what would be subnormal."""
    with np.errstate(over="ignore", invalid="ignore"):
        return 0.0 if abs(x) < 2.0**-126 else float(np.float32(x))


def clip(x, low, high):
    return min(max(x, float(np.float32(low))), float(np.float32(high)))


def grid_log2(x):
    """The logarithm to the nearest 2^-16; -inf for zero and subnormal numbers."""
    if x < 2.0**-126:
        return -INFINITY
    mantissa, exponent = math.frexp(x)
    return round(math.log2(2 * mantissa) * 65536) / 65536 + exponent - 1


def power(x):
    """2^x in float32, x held in [-126, 127]."""
    return float(np.float32(2.0 ** min(max(x, -126.0), 127.0)))


def floor_power(x):
    if x == INFINITY:
        return x
    return 0.0 if x < 2.0**-126 else 2.0 ** (math.frexp(x)[1] - 1)


def log_normal(
    events, *, initial_scale, log_max, mean_decay, variance_decay, deviations, min_scale, max_scale, repaired
):
    scale = clip(initial_scale, min_scale, max_scale)
    m, s, q, c1, c2 = 0.0, 0.0, 0.0, 1.0, 1.0
    b1, b2, k, top = (float(np.float32(v)) for v in (mean_decay, variance_decay, deviations, log_max))
    rest1, rest2 = (float(np.float32(1) - np.float32(b)) for b in (b1, b2))
    trace = []
    for finite, amax in events:
        finite = finite and amax < INFINITY
        x = grid_log2(amax) if finite else top if repaired else power(top)
        if x > -INFINITY or not repaired:
            m, c1 = ema(b1, m, rest1, x), f32(c1 * b1)
            s, q, c2 = ema(b2, s, rest2, x), ema(b2, q, rest2, float(np.float32(x * x))), f32(c2 * b2)
            with np.errstate(all="ignore"):
                mu, slow, square = (f32(np.float64(a) / (1 - c)) for a, c in ((m, c1), (s, c2), (q, c2)))
                variance = square - np.float64(slow) * slow
            # As float64 does, and unlike Python's max, a NaN stays one.
            sigma = f32(math.sqrt(variance)) if variance > 0 else 0.0 if variance <= 0 else math.nan
            logarithm = (top if repaired else 16.0) - (mu + k * sigma)
            if not math.isnan(logarithm):
                if repaired:
                    new = power(math.floor(logarithm) if math.isfinite(logarithm) else logarithm)
                    scale = new if finite else min(new, scale)
                else:
                    scale = power(logarithm)
                scale = clip(scale, min_scale, max_scale)
        names = ("loss_scale", "mean", "mean_weight", "slow_mean", "slow_square", "slow_weight")
        trace.append(dict(zip(names, (scale, m, c1, s, q, c2), strict=True)))
    return trace


def ema(decay, average, rest, x):
    with np.errstate(all="ignore"):
        return f32(np.float64(decay) * average + np.float64(rest) * x)


def histogram(events, *, initial_scale, threshold, period, dead_band, min_scale, max_scale):
    scale, steps, total, large, middle = clip(initial_scale, min_scale, max_scale), 0, 0, 0, 0
    threshold = float(np.float32(threshold))
    trace = []
    for finite, counts in events:
        if not finite:
            scale, steps, total, large, middle = clip(scale / 2, min_scale, max_scale), 0, 0, 0, 0
        else:
            steps, total, large = steps + 1, total + sum(counts), large + counts[-1]
            middle += counts[1] if dead_band else 0
            if steps == period:
                if total and large / total > threshold:
                    scale = clip(scale / 2, min_scale, max_scale)
                elif total and (large + middle) / total <= threshold:
                    scale = clip(scale * 2, min_scale, max_scale)
                steps, total, large, middle = 0, 0, 0, 0
        trace.append({"loss_scale": scale, "steps": steps, "total": total, "large": large, "middle": middle})
    return trace


def delayed_amax(events, *, initial_scale, limit, margin, length, algorithm, power_of_two, min_scale, max_scale):
    scale, history, trace = clip(initial_scale, min_scale, max_scale), [0.0] * length, []
    for finite, amax in events:
        finite = finite and amax < INFINITY
        if finite:
            seen = 0.0 if amax < 2.0**-126 else amax
        else:
            seen = min(f32(limit / scale) * 2.0 ** (1 - margin), 2.0**127)
        history = [*history[1:], seen]
        largest = max(history) if algorithm == "max" else seen
        if largest > 0:
            new = f32(limit / largest) * 2.0**-margin
            new = floor_power(new) if power_of_two else new
            scale = clip(new if finite else min(new, scale), min_scale, max_scale)
        trace.append({"loss_scale": scale, "history": np.array(history, np.float32)})
    return trace


def smooth(events, *, initial_scale, growth_interval, backoff_factor, backoff_interval, search, min_scale, max_scale):
    low, high, backoff = grid_log2(min_scale), grid_log2(max_scale), grid_log2(backoff_factor)
    scale, lg, since, trace = clip(initial_scale, min_scale, max_scale), grid_log2(initial_scale), backoff_interval, []
    for finite, _ in events:
        if clip(power(lg), min_scale, max_scale) != scale:
            lg = grid_log2(scale)
        backs_off = not finite and since >= backoff_interval
        if finite:
            lg += 1.0 if search else 1.0 / growth_interval
        elif backs_off:
            lg += backoff
        lg = min(max(lg, low), high)
        search = search and finite
        since = 1 if backs_off else min(since + 1, backoff_interval)
        scale = clip(power(lg), min_scale, max_scale)
        trace.append({"loss_scale": scale, "log2_scale": lg, "since_backoff": since, "searching": search})
    return trace


def headroom(events, *, initial_scale, headroom, memory, relax_interval, top, min_scale, max_scale):
    scale, peak, below = clip(floor_power(initial_scale), min_scale, max_scale), None, 0
    distance, calm, trace = headroom, 0, []
    for finite, amax in events:
        if not (finite and amax < INFINITY):
            scale, calm = clip(scale / 2, min_scale, max_scale), 0
            if peak is not None:
                distance = max(top - peak - int(math.log2(floor_power(scale))), headroom)
        else:
            if amax >= 2.0**-126:
                height = math.frexp(amax)[1]
                below += 1
                if peak is None or height >= peak:
                    peak, below = height, 0
                elif below == memory:
                    peak, below = peak - 1, 0
            calm += 1
            if calm == relax_interval:
                distance, calm = max(distance - 1, headroom), 0
            if peak is not None:
                scale = clip(power(top - peak - distance), min_scale, max_scale)
        trace.append(
            {
                "loss_scale": scale,
                "peak": -1000 if peak is None else peak,
                "below_peak": below,
                "distance": distance,
                "calm": calm,
            }
        )
    return trace
