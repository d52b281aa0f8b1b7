"""Stock vLLM's answers to the cases: `python -m tests.engine.stock OUT_DIR MODEL_DIR...` writes OUT_DIR/NAME.json.

Each model alone in a process, with vLLM's own block pool, scheduler, worker and attention.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def answers(path: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    from muxserve.engine.vllm_args import frontend_args
    from tests.engine.cases import CASES, sampling
    from tests.engine.harness import deployed_model

    args = frontend_args(deployed_model(path.name, path, max_num_batched_tokens=1024))
    del args["served_model_name"]
    llm = LLM(**args, kv_cache_memory_bytes=64 << 20)
    found = {}
    for case, (text, params) in CASES.items():
        keywords = sampling(params)
        structured = keywords.get("structured_outputs")
        if structured is not None:
            structured._backend = None  # the front end chooses, as it does behind the gateway
        (result,) = llm.generate([text], SamplingParams(**keywords), use_tqdm=False)
        output = result.outputs[0]
        found[case] = {
            "eos": llm.get_tokenizer().eos_token_id,
            "prompt": list(result.prompt_token_ids),
            "tokens": list(output.token_ids),
            "finish": output.finish_reason,
            "logprobs": [
                {token: entry.logprob for token, entry in position.items()} for position in output.logprobs or []
            ],
        }
    return found


def write_each(answer: Callable[[Path], Any], out: Path, models: list[Path]) -> None:
    """`answer` of each model into `out`, each in a fork of this process, so that vLLM is imported once.

    Raises:
        SystemExit: one failed.
    """
    os.environ.update(SETTINGS)
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for path in models:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (out / f"{path.name}.json").write_text(json.dumps(answer(path)))
                status = 0
            finally:
                os._exit(status)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"stock vLLM failed on {path.name}")


if __name__ == "__main__":
    write_each(answers, Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
