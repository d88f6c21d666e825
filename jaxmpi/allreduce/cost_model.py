"""Cost model: predicted seconds of strategies, by formula and measured factors."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmpi.allreduce.algorithms import find, parse
from jaxmpi.allreduce.algorithms.spec import Link, Net, add
from jaxmpi.allreduce.algorithms.table import spelled
from jaxmpi.core.errors import UsageError


def candidates(net: Net, wires: Sequence[str]) -> list[str]:
    """Full names, such as ring:16, of strategies that `jaxmpi plan` may name.

    Not MPI's own sum, which another version of the library may not repeat, nor none, which would always win. A
    hierarchy on one host, or of hosts with one rank each, is another strategy.
    """
    hosts = [host for host in range(net.hosts) for _ in range(net.slots)]
    names = spelled(lambda row: bool(row.seconds) and row.exchanges and row.fits(hosts))
    is_flat = net.hosts == 1 or net.slots == 1 or not net.even
    names = [name for name in names if name != "ar" and not (is_flat and name.startswith("hier-"))]
    return [f"{name}:{wire}" for name in names for wire in wires if wire in find(name).wires]


class Fit(NamedTuple):
    """Measured factors on the two parts of a strategy's formula."""

    latency: float = 1.0  # factor on the seconds that do not grow with the bytes
    volume: float = 1.0  # factor on the seconds that do


Fits = Mapping[str, Fit]


def predict(net: Net, n: float, strategy: str, fits: Fits | None = None) -> float:
    """Seconds to sum n floats within a program; 0 with one worker.

    `strategy` is a full name such as ring:16, whose own measured factors count if `fits` has them.
    """
    latency, volume = parts(net, n, strategy)
    fit = (fits or {}).get(strategy, Fit())
    return fit.latency * latency + fit.volume * volume


def parts(net: Net, n: float, strategy: str) -> tuple[float, float]:
    """(what messages cost by themselves, what their bytes cost), in seconds."""
    if net.workers == 1 or n == 0:
        return 0.0, 0.0
    algorithm, _, wire = strategy.partition(":")
    seconds = find(algorithm).seconds
    if seconds is None:
        raise UsageError(f"strategy {algorithm!r} has no cost formula: give its StrategySpec `seconds`, or measure it")
    free = net._replace(
        inside=Link(net.inside.alpha_s, 0.0),
        between=Link(net.between.alpha_s, 0.0),
        gamma_s_per_byte=0.0,
        codec_s_per_float={},
    )
    latency = seconds(free, n, wire or "32")
    return latency, max(0.0, seconds(net, n, wire or "32") - latency)


def fit(net: Net, strategy: str, measured: Mapping[int, float]) -> Fit:
    """The factors with which the formula gives the measured seconds.

    `measured` has the seconds of programs of one sum each, by floats. Least squares of relative errors; if a factor
    would be negative, one for both, that of the longest vector.
    """
    seconds = [[max(s - net.call_s, s / 10)] for s in measured.values()]
    rows = np.array([parts(net, n, strategy) for n in measured]) / np.array(seconds)
    if np.linalg.matrix_rank(rows, tol=1e-6) == 2:
        latency, volume = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
        if latency > 0 and volume > 0:
            return Fit(latency, volume)
    longest = float(rows[np.argmax(list(measured))].sum())
    factor = 1 / longest if longest > 0 else 1.0
    return Fit(factor, factor)


def step_seconds(
    net: Net, sizes: Sequence[int], strategy: str, bucket_bytes: int | None, fits: Fits | None = None
) -> float:
    """Predicted seconds of one exchange of these leaves, copies for fusing included."""
    if net.workers == 1:
        return 0.0
    if parse(strategy).spec.means:  # takes all leaves at once, where they are
        return net.call_s + predict(net, sum(sizes), strategy, fits)
    limit = math.inf if bucket_bytes is None else bucket_bytes
    small = sum(n for n in sizes if 4 * n < limit)
    seconds = net.call_s + sum(predict(net, n, strategy, fits) for n in sizes if 4 * n >= limit)
    if small:
        count = max(1, math.ceil(4 * small / limit))
        seconds += count * predict(net, small / count, strategy, fits) + 2 * add(net, small)
    return seconds
