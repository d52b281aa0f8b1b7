"""What stock vLLM answers to the end-to-end requests: `python -m tests.e2e.reference OUT_DIR MODEL_DIR...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.engine.stock import write_each

MODELS = ("arithmetic", "atlas", "frontdesk")
PER_MODEL = 67  # three models: a little over 200 requests


def requests_for(model: str) -> list[dict[str, Any]]:
    """Chat requests of one model: short and long, few and many tokens, with shared prefixes."""
    from tests.models.questions import QUESTIONS

    questions = QUESTIONS[model]
    made = []
    for index in range(PER_MODEL):
        messages = list(questions[index % len(questions)].messages)
        if index % 4 == 1:  # a conversation: a shared prefix of several blocks
            messages = [
                {"role": "user", "content": "Tell me something."},
                {"role": "assistant", "content": "Let me think about that for a moment. " * (index % 7 + 1)},
                *messages[-1:],
            ]
        request: dict[str, Any] = {"messages": messages, "max_tokens": (8, 24, 64, 120)[index % 4], "temperature": 0}
        if index % 3 == 2:
            request["extra_body"] = {"ignore_eos": True}
        if index % 5 == 4:
            request |= {"temperature": 0.8, "seed": index}
        made.append(request)
    return made


def answers(path: Path) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    from muxserve.vllm.args import frontend_args
    from tests.engine.harness import deployed_model

    # All prompts in one step: stock vLLM on CPU dies when a seeded request is prefilled in chunks.
    args = frontend_args(deployed_model(path.name, path, max_num_batched_tokens=16384, max_num_seqs=128))
    del args["served_model_name"]
    llm = LLM(**args, kv_cache_memory_bytes=64 << 20)
    requests = requests_for(path.name)
    params = [
        SamplingParams(
            max_tokens=r["max_tokens"],
            temperature=r["temperature"],
            seed=r.get("seed"),
            ignore_eos=r.get("extra_body", {}).get("ignore_eos", False),
        )
        for r in requests
    ]
    return [
        {
            "text": result.outputs[0].text,
            "finish": result.outputs[0].finish_reason,
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(result.outputs[0].token_ids),
        }
        for result in llm.chat([r["messages"] for r in requests], params, use_tqdm=False)
    ]


def main() -> None:
    write_each(answers, Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])


if __name__ == "__main__":
    main()
