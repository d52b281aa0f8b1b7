"""Pages for requests that need more than their model may count on: the other models of the pool make room for them.

A model's part of a pool follows from its demand and is enough for most requests. A longer request is not refused. It
waits until it has its pages, which come in this order:

1. A sequence that runs and is longer than its model's part keeps its pages.
2. The oldest requests of all models get what they need, by age. Both have room to grow. The first for which too little
   is left gets all of that, so that no younger request takes it.
3. What is left is for the floors of all models.

Models admit nothing beyond what they get, so that the pages come free as other requests end. So every request that the
pool could hold alone is served at last, whoever shares the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from muxserve.scheduling.state import LiveRequest, ModelState

# A long sequence has room for so many tokens more than it has, which it computes in a second or longer.
GROWTH_TOKENS = 128


def head_pages(model: ModelState) -> int:
    """Pages that the oldest request of the model takes; 0 when nobody waits."""
    return model.queue.head().blocks * model.pages_per_block if model.queue else 0


def prompt_pages(model: ModelState) -> int:
    """Pages of the longest prompt in an engine that prefills, whole: pages behind a window are given back only after
    the step that has computed beyond them."""
    longest = max((live.tokens for live in model.prefilling.values()), default=0)
    return model.whole_blocks_of(longest) * model.pages_per_block if longest else 0


def fitting(pages: int, wanted: Sequence[int]) -> list[int]:
    """What each gets of `pages`: what it wants, or where that is more than there is, less in proportion."""
    whole = sum(wanted)
    return list(wanted) if whole <= pages else [each * pages // whole for each in wanted]


def long_request_floors(pages: int, models: Sequence[ModelState], parts: Sequence[int]) -> list[int] | None:
    """The floors under which the models of a pool of so many `pages` make room for requests longer than `parts`, the
    pages that each would get otherwise; None: there is no such request."""
    running = [
        _longest_running(model, pages) if max(model.used + model.promised, prompt_pages(model)) > part else 0
        for model, part in zip(models, parts, strict=True)
    ]
    running = [longest if longest > part else 0 for longest, part in zip(running, parts, strict=True)]
    if not any(running) and all(head_pages(model) <= part for model, part in zip(models, parts, strict=True)):
        return None
    found = fitting(pages, running)
    left = pages - sum(found)
    heads = [(model.queue.head(), index) for index, model in enumerate(models) if model.queue]
    for head, index in sorted(heads, key=lambda each: each[0].arrival):
        more = min(left, max(0, _grown_pages(models[index], head, pages) - found[index]))
        found[index] += more
        left -= more
    rest = fitting(left, [max(0, model.profile.floor_pages - has) for model, has in zip(models, found, strict=True)])
    return [has + more for has, more in zip(found, rest, strict=True)]


def _longest_running(model: ModelState, pages: int) -> int:
    """Pages that the longest sequence with a seat takes when it has grown."""
    seated = (*model.prefilling.values(), *model.handed.values(), *model.decoding.values(), *model.moving.values())
    return min(pages, max((prompt_pages(model), *(_grown_pages(model, live, pages) for live in seated))))


def _grown_pages(model: ModelState, live: LiveRequest, pages: int) -> int:
    """Pages that a request takes when it has grown, at most all `pages`."""
    # Its last token is not computed upon.
    most = live.prompt_tokens + max(live.max_tokens, live.output_tokens) - 1
    grown = model.blocks_of(min(model.tokens_of(live) + GROWTH_TOKENS, most))
    return min(pages, max(grown, live.blocks) * model.pages_per_block)
