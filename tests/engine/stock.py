"""Stock vLLM's answers to the cases, as JSON: `python -m tests.engine.stock NAME MODEL_DIR OUT`.

Alone in its process, with vLLM's own block pool, scheduler, worker and attention.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(name: str, path: str, out: str) -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    from muxserve.engine.vllm_args import frontend_args
    from tests.engine.cases import CASES, sampling
    from tests.engine.harness import deployed_model

    args = frontend_args(deployed_model(name, Path(path), max_num_batched_tokens=1024))
    del args["served_model_name"]
    llm = LLM(**args, kv_cache_memory_bytes=64 << 20)
    answers = {}
    for case, (text, params) in CASES.items():
        keywords = sampling(params)
        structured = keywords.get("structured_outputs")
        if structured is not None:
            structured._backend = None  # the front end chooses, as it does behind the gateway
        (result,) = llm.generate([text], SamplingParams(**keywords), use_tqdm=False)
        output = result.outputs[0]
        answers[case] = {
            "eos": llm.get_tokenizer().eos_token_id,
            "prompt": list(result.prompt_token_ids),
            "tokens": list(output.token_ids),
            "finish": output.finish_reason,
            "logprobs": [
                {token: entry.logprob for token, entry in position.items()} for position in output.logprobs or []
            ],
        }
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
