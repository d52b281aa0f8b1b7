"""What stock vLLM answers on a GPU: `python -m tests.gpu.stock OUT.json MODEL_DIR`, one model per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.run import STAND_INS

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("arithmetic", "atlas", "frontdesk")
# Over stand-ins of the driver nothing is compared.
REQUESTS, TOKENS, TOP = 4 if STAND_INS else 24, 48, 8
KV_BYTES = 1 << 30
# vLLM has its engine in a process of its own otherwise.
IN_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def checkpoint(model: str) -> Path:
    """A trained model of the quickstart fleet."""
    return ROOT / "configs/models" / model


def reference_answers(out: Path) -> dict[str, Any]:
    """By model: requests with `prompt`, `tokens` and, for each of them, the likeliest with their log probabilities.
    What lies in `out` already is taken from there."""
    paths = {model: out / f"{model}.json" for model in MODELS}
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.stock", str(path), str(checkpoint(model))], cwd=ROOT)
        for model, path in paths.items()
        if not path.exists()
    ]
    try:
        for process in processes:
            assert process.wait(600) == 0, f"{process.args!r} failed"
    finally:
        for process in processes:
            process.kill()
    return {model: json.loads(path.read_text()) for model, path in paths.items()}


def choose_runner() -> str:
    """Have vLLM compute in this process, on the model runner that engines of fleets have with the installed version.

    Returns:
        The module of that runner.
    """
    os.environ.setdefault(*IN_PROCESS)
    from muxserve.vllm.engine_seam import runner_choice

    for name, value in runner_choice("cuda").items():
        os.environ.setdefault(name, value)
    second = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    return "vllm.v1.worker.gpu.model_runner" if second else "vllm.v1.worker.gpu_model_runner"


def engine(path: Path, **arguments: Any) -> tuple[Any, list[dict[str, list[int]]], Any]:
    """vLLM with a model, prompts for it, and how they are to be answered: greedily, at a fixed length.

    Args:
        arguments: other ones for vLLM.
    """
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.2,
        # Fixed: several of these run side by side, and vLLM's own way looks at what is free.
        "kv_cache_memory_bytes": KV_BYTES,
        "enforce_eager": True,
        "seed": 0,
    }
    llm = LLM(model=str(path), **{**settings, **arguments})
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=None if STAND_INS else TOP)
    return llm, [{"prompt_token_ids": each} for each in _prompts(llm.get_tokenizer(), path.name)], params


def _prompts(tokenizer: Any, model: str) -> list[list[int]]:
    from tests.models.questions import QUESTIONS

    prompts = []
    for index in range(REQUESTS):
        messages = [
            # Long and short prompts, with prefixes that others share.
            {"role": "user", "content": "Let me think about that for a moment. " * (index % 8)},
            {"role": "assistant", "content": "Go on."},
            *QUESTIONS[model][index % len(QUESTIONS[model])].messages,
        ]
        prompts.append(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True))
    return [prompt if isinstance(prompt, list) else prompt["input_ids"] for prompt in prompts]


def answers(path: Path) -> list[dict[str, Any]]:
    """Greedy answers of fixed length to chats of the model."""
    return answered(*engine(path))


def answered(llm: Any, prompts: list[dict[str, list[int]]], params: Any) -> list[dict[str, Any]]:
    """What vLLM answers to prompts in one batch: `prompt`, `tokens`, and log probabilities of the likeliest of each."""
    return [
        {
            "prompt": prompt["prompt_token_ids"],
            "tokens": list(result.outputs[0].token_ids),
            "top": [{str(t): each.logprob for t, each in step.items()} for step in result.outputs[0].logprobs or ()],
        }
        for prompt, result in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True)
    ]


def words_of(
    tokens: list[int], expected: dict[str, Any], difference: tuple[int, float], others: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What is to be known of a wrong answer: where it leaves stock vLLM's, and whose token came in place of its own, of
    the answers to `others` of the model's prompts or later ones of its own."""
    place, gap = difference
    token = tokens[place]
    return {
        "prompt_tokens": len(expected["prompt"]),
        "place": place,
        "gap": min(gap, 99.0),
        "token": token,
        "expected": expected["tokens"][place],
        "first_token_of": [index for index, each in enumerate(others) if each["tokens"][0] == token][:6],
        "is_the_next_one": expected["tokens"][place + 1 : place + 2] == [token],
        # A wrong first token on right pages is followed by others than one on wrong pages.
        "same_afterwards": sum(
            a == b for a, b in zip(tokens[place + 1 :], expected["tokens"][place + 1 :], strict=True)
        ),
    }


def first_difference(tokens: list[int], expected: dict[str, Any]) -> tuple[int, float] | None:
    """Where `tokens` leave stock vLLM's, and by how much stock held its own token likelier there, in nats; None if they
    never do. From there on the two answer different questions. Over stand-ins of the driver nothing is compared."""
    if STAND_INS:
        return None
    for place, (ours, theirs) in enumerate(zip(tokens, expected["tokens"], strict=True)):
        if ours != theirs:
            top = expected["top"][place]
            return place, top[str(theirs)] - top.get(str(ours), float("-inf"))
    return None


if __name__ == "__main__":
    os.environ.setdefault(*IN_PROCESS)
    Path(sys.argv[1]).write_text(json.dumps(answers(Path(sys.argv[2]))))
