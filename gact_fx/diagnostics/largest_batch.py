"""The largest batch that fits: memory as a line in the rows, tried where the line says that they fit."""

from collections.abc import Callable

# What is tried at most; each takes as long as the compiler takes to trace a step.
MOST_TRIALS = 8
# No device holds more.
MOST_ROWS = 2**24


def largest_batch(needs: Callable[[int], int], rows: int, memory: int) -> int | None:
    """The most rows that were tried and fit: of which ``needs(rows)`` is at most ``memory`` bytes.

    It begins with ``rows`` and twice as many. 0: not even one fits. None: what is needed does not grow with the rows.
    """
    known = {count: needs(count) for count in (rows, 2 * rows)}
    while len(known) < MOST_TRIALS:
        fits = max((count for count in known if known[count] <= memory), default=0)
        above = min((count for count in known if known[count] > memory and count > fits), default=MOST_ROWS + 1)
        # The line through the two nearest.
        near = sorted(known, key=lambda count: abs(known[count] - memory))[:2]
        low, high = min(near), max(near)
        slope = (known[high] - known[low]) / (high - low)
        if slope <= 0:
            return None
        guess = min(max(int(high + (memory - known[high]) / slope), fits), above - 1)
        if guess == fits:
            # The line says that one more is too many.
            return fits
        known[guess] = needs(guess)
    return max((count for count in known if known[count] <= memory), default=0)
