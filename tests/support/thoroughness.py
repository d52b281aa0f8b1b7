"""How much the tests try: MUXSERVE_TESTS is `quick`, `usual` (when it is not set) or `thorough`.

`usual` tries each property with a part of its examples, and what is the same of many models, options or processes with
some of them. `thorough` has them all: `make thorough`, and CI.
`quick` is the usual tests of the packages without I/O, with fewer examples again: `make quick`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
LEVELS = {"quick": 0.1, "usual": 0.2, "thorough": 1.0}
LEVEL = os.environ.get("MUXSERVE_TESTS", "usual")
if LEVEL not in LEVELS:
    raise ValueError(f"MUXSERVE_TESTS is {LEVEL!r}; it can be {', '.join(LEVELS)}")
THOROUGH = LEVEL == "thorough"


def examples(count: int) -> int:
    """With how many examples a property is tried that takes long for each, as where one is a whole simulated world:
    `count` when thorough. Properties are tried with the same examples every time: a change that breaks one breaks it
    in the first few as a rule. More of them are for who changes what they test."""
    return math.ceil(count * LEVELS[LEVEL])


def cases(every: Iterable[Case], some: Iterable[Case]) -> list[Case]:
    """Those that a test is parametrized with: `every` one when thorough, `some` otherwise, in the order of `every`.

    Raises:
        ValueError: one of `some` is not among them.
    """
    known, chosen = list(every), list(some)
    if strange := [case for case in chosen if case not in known]:
        raise ValueError(f"no such cases: {strange}")
    return known if THOROUGH else [case for case in known if case in chosen]
