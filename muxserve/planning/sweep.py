"""Plans for growing clusters: how many GPUs does a fleet need?"""

from __future__ import annotations

import math
import re

_SWEEP = re.compile(r"gpus=(\d+)\.\.(\d+)(?::(\d+))?")
_POINTS = 15


def parse_sweep(text: str) -> list[int]:
    """`gpus=8..64` or, with a step, `gpus=8..64:8` as numbers of GPUs. Without a step there are at most 15.

    Raises:
        ValueError: it is something else.
    """
    match = _SWEEP.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a sweep such as gpus=8..64, or gpus=8..64:8 with a step")
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise ValueError(f"a sweep goes from at least 1 GPU upwards, not from {first} to {last}")
    step = int(match[3]) if match[3] else _step(last - first)
    if step < 1:
        raise ValueError("the step of a sweep must be at least 1")
    numbers = list(range(first, last + 1, step))
    if numbers[-1] != last:
        numbers.append(last)
    if len(numbers) > 200:
        raise ValueError(
            f"{len(numbers)} plans are too many; give a larger step, e.g. gpus={first}..{last}:{step * 10}"
        )
    return numbers


def _step(span: int) -> int:
    """The smallest power of two with which there are not too many points."""
    least = span / (_POINTS - 1)
    return 1 if least <= 1 else 2 ** math.ceil(math.log2(least))
