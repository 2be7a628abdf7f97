"""The DSSP controller: how many extra iterations a worker may run before it stops.

One pure function, Algorithm 2 of Zhao et al. (ICDCS 2019, arXiv 1908.11848) with defined ties and a defined
answer to a late slowest worker. It keeps no table: the coordinator shifts push times, once per push.
"""

from __future__ import annotations

import math


def extension(
    latest: float,
    interval: float,
    slowest_next: float,
    slowest_interval: float,
    r_max: int,
    now: float,
    clamp: bool = True,
) -> int:
    """The number of extra iterations after which the worker would stop with the least wait.

    Compares the worker's predicted pushes ``latest + r*interval`` with those of the slowest worker,
    ``slowest_next + k*slowest_interval`` (r and k from 0 to r_max), and returns the r of the closest pair. r
    = 0 is the push that just happened: stop now. Differences within rounding count as ties, and the smallest
    r wins. Only the two k nearest to each r can be closest, so the cost is O(r_max).

    Args:
        latest: Time of the worker's latest push, seconds from the start of the run.
        interval: The worker's last interval, seconds; not positive gives 0.
        slowest_next: When the slowest worker's next push is expected, seconds from the start of the run.
        slowest_interval: The slowest worker's last interval, seconds; not positive: all its pushes are
            predicted at ``slowest_next``.
        r_max: Largest extension, ``s_upper - s_lower``, >= 0.
        now: Time of the decision, seconds from the start of the run, >= ``latest``.
        clamp: A slowest worker whose push is overdue (``slowest_next < now``) gives 0, i.e. hold until it
            pushes. False, as printed: its overdue pushes are compared like any other.

    Returns:
        r*, from 0 to r_max.
    """
    if r_max <= 0 or interval <= 0 or (clamp and slowest_next < now):
        return 0
    gap = latest - slowest_next
    distances = []
    if slowest_interval > 0:
        for r in range(r_max + 1):
            ahead = gap + r * interval
            position = ahead / slowest_interval
            if position <= 0:
                distances.append(-ahead)
            elif position >= r_max:
                distances.append(ahead - r_max * slowest_interval)
            else:
                after_k = ahead - int(position) * slowest_interval
                before_next = slowest_interval - after_k
                distances.append(after_k if after_k < before_next else before_next)
    else:
        distances = [abs(gap + r * interval) for r in range(r_max + 1)]
    # Pairs that are equal on paper differ in floats by a few ulp of the times subtracted.
    longest = interval if interval > slowest_interval else slowest_interval
    bound = min(distances) + 1e-9 * longest + 4 * r_max * math.ulp(now)
    r = 0
    while distances[r] > bound:
        r += 1
    return r
