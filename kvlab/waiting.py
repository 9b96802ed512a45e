"""How long a request waits for a busy link or accelerator, in units of the service time, and whom it makes wait.

Arrivals at random (Poisson), one server, first come, first served; for waits every request takes equally long (M/D/1).
Plain arithmetic; knows no machine.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["SEEN", "RecentRate", "delayed_requests", "mean_wait", "wait_quantile"]

SEEN = 64  # requests from which a load is judged

# Service times from which on the tail is its leading exponential: within 5e-4 of itself there for loads from 0.1 up.
_EXACT_BELOW = 8.0


def mean_wait(load: float) -> float:
    """Mean wait at utilisation `load` in [0, 1): load / 2(1 - load) service times (Pollaczek and Khinchine).

    Raises ValueError for another load: at 1 the queue grows without end.
    """
    _check_load(load)
    return load / (2 * (1 - load))


def wait_quantile(load: float, percentile: float) -> float:
    """The wait, in service times, that `percentile` % of requests do not exceed at utilisation `load` in [0, 1).

    Erlang's distribution (1909; Crommelin 1932), with r for the load and t in service times,
        P(wait <= t) = (1 - r) sum over k = 0 ... floor(t) of (r (k - t))^k / k! · exp(r (t - k)),
    is solved for t by bisection. Its terms alternate and cancel, so from 8 service times on the tail is its leading
    exponential, P(wait > t) = (1 - r) / (r e^c - 1) · e^(-c t) with c > 0 the root of r (e^c - 1) = c.
    Two deterministic servers in a row delay a request as the slower one alone would (Friedman 1965), so that a reload,
    which needs the link and then the accelerator, waits like M/D/1 with the longer of its two parts as service time.
    Raises ValueError for a load or a percentile out of range.
    """
    _check_load(load)
    if not 0 < percentile < 100:
        raise ValueError(f"percentile is {percentile:g}; expected more than 0 and less than 100")
    missed = 1 - percentile / 100
    if missed >= load:  # P(wait > 0) = load: so many find the server idle
        return 0.0
    decay = _decay(load)
    tail = math.log((1 - load) / (load * math.exp(decay) - 1) / missed) / decay
    if tail >= _EXACT_BELOW:
        return tail
    low, high = 0.0, _EXACT_BELOW
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - _share_within(load, middle) > missed else (low, middle)
    return high


def delayed_requests(waiting: int, unserved: int, load: float) -> float:
    """How many requests a second more of work delays by a second, at utilisation `load` of at least 0 of its server.

    Those `waiting` to be admitted, for the share of time in which it is this server that keeps them; and all who come
    before it is next idle. `unserved` requests, the one at work and those waiting included, keep it busy for
    unserved · S / (1 - load) on average, S being the mean service time (the busy period of M/G/1: Kleinrock, Queueing
    Systems I, 1975, 5.8), in which unserved · load / (1 - load) come. A load is seen over `SEEN` requests, so that no
    busy period is taken to let in more of them for each; also where it is 1 or above.
    """
    return waiting * min(load, 1.0) + unserved * (load / (1 - load) if load < SEEN / (SEEN + 1) else SEEN)


class RecentRate:
    """Something per second, since the last `SEEN` requests began. Mutable; is told instants, has no clock.

    Of 64 requests as different as exponential times are, the rate is known to about a fifth of itself.
    """

    def __init__(self, now_s: float) -> None:
        self._total = 0.0
        self._began = deque([(now_s, 0.0)], maxlen=SEEN)  # instants, and the total until then

    def add(self, amount: float) -> None:
        """So much more."""
        self._total += amount

    def begin(self, now_s: float) -> None:
        """A request begins to be served."""
        self._began.append((now_s, self._total))

    def per_second(self, now_s: float) -> float:
        """The rate; 0 before any time has passed."""
        since_s, before = self._began[0]
        return (self._total - before) / (now_s - since_s) if now_s > since_s else 0.0


def _share_within(load: float, t: float) -> float:
    """P(wait <= t service times)."""
    terms = ((load * (k - t)) ** k / math.factorial(k) * math.exp(load * (t - k)) for k in range(math.floor(t) + 1))
    return (1 - load) * math.fsum(terms)


def _decay(load: float) -> float:
    """The positive root of load (e^c - 1) = c. The left side starts below and, being convex, crosses once."""
    low = -math.log(load)  # where the difference is smallest
    high = low + 1.0
    while load * math.expm1(high) < high:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if load * math.expm1(middle) > middle else (middle, high)
    return high


def _check_load(load: float) -> None:
    if not 0 <= load < 1:
        raise ValueError(f"load is {load:g}; expected a utilisation of at least 0 and below 1")
