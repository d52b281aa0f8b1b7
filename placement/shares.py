"""Dividing whole things in proportion, with minimums."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(total: int, weights: Sequence[float], minimums: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, none below its minimum; they add up to `total`.

    Whoever would get less than the minimum gets the minimum, and the others share what is left.

    Raises:
        ValueError: the minimums do not fit, or a weight is not positive.
    """
    if len(weights) != len(minimums) or not weights:
        raise ValueError("weights and minimums must be equally many, and at least one")
    if any(weight <= 0 for weight in weights):
        raise ValueError("weights must be positive")
    if sum(minimums) > total:
        raise ValueError(f"minimums of {sum(minimums)} do not fit into {total}")
    free = set(range(len(weights)))
    left = total
    parts = [float(minimum) for minimum in minimums]
    while free:
        scale = left / sum(weights[i] for i in free)
        pinned = {i for i in free if weights[i] * scale < minimums[i]}
        if not pinned:
            for i in free:
                parts[i] = weights[i] * scale
            break
        free -= pinned
        left -= sum(minimums[i] for i in pinned)
    whole = [max(int(part), minimum) for part, minimum in zip(parts, minimums, strict=True)]
    by_remainder = sorted(range(len(parts)), key=lambda i: (whole[i] - parts[i], i))
    rest = total - sum(whole)
    for n in range(abs(rest)):
        # Rounding of floats may have given one too much as well as too little.
        i = by_remainder[n % len(parts)] if rest > 0 else max(range(len(parts)), key=lambda i: whole[i] - minimums[i])
        whole[i] += 1 if rest > 0 else -1
    return whole
