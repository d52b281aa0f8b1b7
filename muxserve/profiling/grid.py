"""Which steps are measured of a model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from muxserve.spec import ModelSpec

# Decode steps measured per cell at most; a sequence grows by as many tokens meanwhile.
DECODE_STEPS = 48


@dataclass(frozen=True)
class Grid:
    """Values of each axis; what a model or its pool cannot hold is left out.

    `tokens` are the prompt tokens of one sequence in a prefill step of `sequences` of them. `chunk` is the size of the
    prefill steps that are measured after earlier ones of the same prompt. `batches` and `contexts` (tokens of KV per
    sequence) are of decode steps.
    """

    tokens: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    sequences: tuple[int, ...] = (1, 4, 16)
    chunk: int = 256
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (64, 256, 1024)


@dataclass(frozen=True)
class Chunked:
    """A prompt of `chunks` chunks of `tokens` tokens each, which gives a cell per chunk."""

    tokens: int
    chunks: int


@dataclass(frozen=True)
class ModelGrid:
    """What is measured of one model: prefill steps (sequences, tokens), chunked prompts, decode steps by context with
    the batches in falling order."""

    prefill: tuple[tuple[int, int], ...]
    chunked: Chunked | None
    decode: tuple[tuple[int, tuple[int, ...]], ...] = field(default=())

    @property
    def cells(self) -> int:
        """How many cells that are."""
        later = self.chunked.chunks - 1 if self.chunked else 0
        return len(self.prefill) + later + sum(len(batches) for _, batches in self.decode)


def grid_for(grid: Grid, model: ModelSpec, pages: int) -> ModelGrid:
    """The cells of `grid` that `model` can run with `pages` pages."""
    prefill = tuple(
        (sequences, tokens)
        for tokens in sorted(set(grid.tokens))
        for sequences in sorted(set(grid.sequences))
        if sequences <= model.max_num_seqs
        and sequences * tokens <= model.max_num_batched_tokens
        and tokens + 2 <= model.max_len
        and fits(model, pages, sequences, tokens + 2)
    )
    longest = min(model.max_len - 2, max(grid.contexts, default=0) + grid.chunk)
    chunk = min(grid.chunk, model.max_num_batched_tokens)
    chunks = longest // chunk
    while chunks > 1 and not fits(model, pages, 1, chunks * chunk + 2):
        chunks -= 1
    decode = []
    for context in sorted(set(grid.contexts)):
        batches = tuple(
            batch
            for batch in sorted(set(grid.batches), reverse=True)
            if batch <= model.max_num_seqs and fits(model, pages, batch, context + DECODE_STEPS)
        )
        if batches and context + DECODE_STEPS <= model.max_len:
            decode.append((context, batches))
    return ModelGrid(prefill, Chunked(chunk, chunks) if chunks > 1 else None, tuple(decode))


def fits(model: ModelSpec, pages: int, sequences: int, tokens: int) -> bool:
    """Whether `sequences` of `tokens` tokens have room in the pages, with a tenth to spare."""
    blocks = sequences * -(-tokens // model.block_tokens)
    return blocks * model.pages_per_block <= pages * 0.9 and blocks < model.num_blocks


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """`1,2,8` as numbers of at least 1.

    Raises:
        ValueError: it is something else.
    """
    try:
        values: Sequence[int] = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ValueError(
            f"{what} must be whole numbers of at least 1 with commas between, such as 1,4,16, not {text!r}"
        )
    return tuple(dict.fromkeys(values))
