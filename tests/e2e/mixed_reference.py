"""What stock vLLM answers for a fleet of several kinds: `python -m tests.e2e.mixed_reference OUT_DIR MODEL...`.

Vectors of the texts of `test_pooling`, with `GENERATING` the texts of `test_adapters` with each adapter, and with
`SEEING` the chats of `test_images`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.fleet import ROOT
from tests.engine.stock import write_each
from tests.support.tiny_adapter import write_adapter
from tests.support.tiny_checkpoint import CACHE, Kind, data_url, tiny_checkpoint
from tests.support.tiny_seeing import tiny_seeing

# By name in the fleet. The first three keep KV while they compute, the others do not.
KINDS: dict[str, Kind] = {
    "embedder": "qwen3",
    "tokens": "qwen3",
    "judge": "qwen3-classifier",
    "encoder": "bert",
    "reranker": "bert-reranker",
}
# These would generate text if they were not asked for something else.
OPTIONS: dict[str, dict[str, Any]] = {
    "embedder": {"runner": "pooling"},
    "tokens": {"runner": "pooling", "pooler_config": {"task": "token_embed"}},
}
# Short, of several blocks, and longer than a step where prompts are computed in chunks.
TEXTS = ["a", "The cat sat on the mat.", "Where does the river end? " * 8, "all work and no play " * 15]
QUERY = "Where does the river end?"
DOCUMENTS = ["In the sea.", "It ends in the sea, as rivers do.", "Nobody knows."]
CHUNK, MAX_LEN = 128, 512


def checkpoint(model: str) -> Path:
    """Where the model of that name is."""
    return tiny_checkpoint(KINDS[model])


# The model that generates, and the seeds of its adapters by name.
GENERATING = "arithmetic"
ADAPTERS = {"one": 1, "two": 2, "three": 3}
# The last ones have a prefix of several blocks in common.
_LONG = "User: What is 12 + 7? Assistant: 19. " * 6
PROMPTS = ["What is 12 + 7?", "What is 3 + 4?", "Tell me", _LONG, f"{_LONG}User: What is 8 + 8?", f"{_LONG}User: And"]
MAX_TOKENS = 24


# Models that see images, the second with a cache of its own only, and what they are asked: a text and the sizes of
# pictures before it.
SEEING, SEEING_ALONE = "viewer", "reader"
SEES: dict[str, Callable[[], Path]] = {
    SEEING: partial(tiny_checkpoint, "idefics3"),
    SEEING_ALONE: partial(tiny_seeing, "aria"),
}
CHATS: list[tuple[str, list[tuple[int, int]]]] = [
    ("What is it?", [(100, 80)]),
    ("What is it?", [(60, 110)]),
    ("Which is larger?", [(100, 80), (40, 30)]),
    ("Tell me something.", []),
]


def messages(index: int) -> list[dict[str, Any]]:
    """Chat `index` as OpenAI's client sends it: pictures come as data URLs."""
    text, sizes = CHATS[index]
    parts: list[dict[str, Any]] = []
    for size in sizes:
        parts.append({"type": "image_url", "image_url": {"url": data_url(*size)}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def stock(path: Path, **options: Any) -> Any:
    """Stock vLLM with that model."""
    from vllm import LLM

    sizes = {"max_model_len": MAX_LEN, "kv_cache_memory_bytes": 64 << 20}
    return LLM(str(path), dtype="float32", enforce_eager=True, **sizes, **options)


def seen(model: str) -> list[str]:
    """What it answers to each chat."""
    from vllm import SamplingParams

    images = {"limit_mm_per_prompt": {"image": 2}}
    llm = stock(SEES[model](), max_num_batched_tokens=MAX_LEN, **images)
    found = []
    for index in range(len(CHATS)):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **sampling(index))
        (answer,) = llm.chat(messages(index), params, use_tqdm=False)
        found.append(answer.outputs[0].text)
    return found


def sampling(index: int) -> dict[str, Any]:
    """How prompt `index` is answered: greedily, or seeded."""
    return {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0.0}


def adapter(name: str) -> Path:
    """Where the adapter of that name is; written once."""
    path = CACHE / f"adapter-{GENERATING}-{name}-v1"
    if not path.is_dir():
        scratch = path.with_name(f".{path.name}-{os.getpid()}")
        write_adapter(scratch, ROOT / "configs/models" / GENERATING, seed=ADAPTERS[name])
        try:
            os.rename(scratch, path)
        except OSError:  # another process was first
            shutil.rmtree(scratch)
    return path


def generated() -> dict[str, Any]:
    """The texts of all prompts, by adapter; "": with none. Each by itself."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    llm = stock(ROOT / "configs/models" / GENERATING, enable_lora=True, max_loras=2, max_lora_rank=16)
    found = {}
    for number, name in enumerate(["", *ADAPTERS]):
        lora = LoRARequest(name, number, str(adapter(name))) if name else None
        found[name] = [
            llm.generate(
                [prompt],
                SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **sampling(index)),
                use_tqdm=False,
                lora_request=lora,
            )[0]
            .outputs[0]
            .text
            for index, prompt in enumerate(PROMPTS)
        ]
    return found


def answers(path: Path) -> dict[str, Any]:
    """Each text by itself, as nothing but its own tokens decides what comes of it. `path` is a model's name."""
    model = path.name
    if model == GENERATING:
        return generated()
    if model in SEES:
        return {"texts": seen(model)}
    options = {"runner": "pooling", **OPTIONS.get(model, {})}
    llm = stock(checkpoint(model), max_num_batched_tokens=MAX_LEN, **options)
    task = llm.pooling_task
    pooled = [llm.encode([text], pooling_task=task, use_tqdm=False)[0].outputs.data.tolist() for text in TEXTS]
    if model == "judge":  # it has no one score
        return {"data": pooled}
    scores = [llm.score([QUERY], [each], use_tqdm=False)[0].outputs.score for each in DOCUMENTS]
    return {"data": pooled, "score": scores}


def main() -> None:
    write_each(answers, Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])


if __name__ == "__main__":
    main()
