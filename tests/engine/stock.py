"""Stock vLLM's answers to the cases: `python -m tests.engine.stock OUT_DIR MODEL_DIR...` writes OUT_DIR/NAME.json.

Each model alone in a process, with vLLM's own block pool, scheduler, workers and attention. `--split MODEL_DIR` does
some of the cases also with that model split over two workers, into OUT_DIR/NAME-2.json. `--tiny KIND...` does some with
tiny checkpoints of these architectures as well, into OUT_DIR/KIND.json, and `--split-tiny KIND...` with two workers,
into OUT_DIR/KIND-2.json; `--private KIND...` with those whose cache the pool cannot hold. `--quantised MODEL_DIR...`
asks those models what they were trained on, and `--fp8 MODEL_DIR` that one with a cache in FP8, into
OUT_DIR/NAME-fp8.json.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.cases import CASES, GROWN, NOISE, SEEN, questions, sampling
from tests.support.kept import note

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def answers(
    path: Path,
    ranks: int = 1,
    cases: Sequence[str] = tuple(CASES),
    of: Mapping[str, Any] = CASES | GROWN,
    private: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.executor import multiproc_executor

    from muxserve.vllm.args import frontend_args
    from tests.engine.harness import deployed_model, private_model

    deployed = private_model if private else deployed_model
    args = frontend_args(deployed(path.name, path, max_num_batched_tokens=1024, engine_args=changes))
    del args["served_model_name"]
    if ranks > 1:
        args["distributed_executor_backend"] = "mp"
        # Workers that import vLLM anew would only take longer.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        torch.compiler.set_stance("force_eager")
        # vLLM names shared memory after it, and leaves it behind.
        store = Path(tempfile.mkdtemp()) / f"stock-{os.getpid()}"
        os.environ["VLLM_RPC_BASE_PATH"] = str(store.parent)
        multiproc_executor.get_file_store_init_method = lambda: f"file://{store}"
    llm = LLM(**args, tensor_parallel_size=ranks, kv_cache_memory_bytes=64 << 20)
    found = {}
    for case in cases:
        text, params = of[case]
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
    if ranks > 1:
        llm.llm_engine.engine_core.shutdown()
        for leftover in Path("/dev/shm").glob(f"{store.name}-*"):
            leftover.unlink()
        shutil.rmtree(store.parent)
    return found


def seen(path: Path, out: Path, cases: Mapping[str, Any] = SEEN, private: bool = False) -> dict[str, Any]:
    """Answers to prompts with images; and the requests as vLLM's front end makes them, whose images are in files in
    `out`, by model."""
    from vllm import LLM, SamplingParams
    from vllm.v1.serial_utils import MsgpackEncoder

    from muxserve.vllm.args import frontend_args
    from muxserve.vllm.image_files import without_pixels, write
    from tests.engine.harness import deployed_model, private_model
    from tests.support.tiny_checkpoint import picture

    deployed = partial(private_model, sees_images=True) if private else deployed_model
    args = frontend_args(deployed(path.name, path, max_num_batched_tokens=1024))
    del args["served_model_name"]
    llm = LLM(**{**args, "mm_processor_cache_gb": 0}, kv_cache_memory_bytes=64 << 20)
    core, requests = llm.llm_engine.engine_core, []
    add = core.add_request
    core.add_request = lambda request: (requests.append(request), add(request))[1]
    found = {}
    for case, (text, sizes, params) in cases.items():
        asked: dict[str, Any] = {"prompt": text}
        if sizes:
            asked["multi_modal_data"] = {"image": [picture(*size) for size in sizes]}
        (result,) = llm.generate([asked], SamplingParams(**sampling(params)), use_tqdm=False)
        features = requests.pop().mm_features or []
        files = [out / f"{path.name}-{case}-{index}.image" for index in range(len(features))]
        for file, feature in zip(files, features, strict=True):
            write(file, feature.data)
        (encoded,) = MsgpackEncoder(size_threshold=1 << 30).encode(without_pixels(features, files))
        found[case] = {
            "eos": llm.get_tokenizer().eos_token_id,
            "prompt": list(result.prompt_token_ids),
            "tokens": list(result.outputs[0].token_ids),
            "features": base64.b64encode(encoded).decode(),
        }
    return found


def prepare_forks() -> None:
    """Do once what vLLM would do in each process that loads a model. Half of such a process' time would go into looking
    for garbage; it ends when it has answered."""
    from muxserve.forks.warm_parent import prepare_workers

    prepare_workers()
    gc.freeze()
    vars(gc)["collect"] = lambda generation=2: 0


def write_each(answer: Callable[[Path], Any], out: Path, models: list[Path], suffix: str = "") -> None:
    """`answer` of each model into `out`, each in a fork of this process, so that vLLM is imported once.

    Raises:
        SystemExit: one failed.
    """
    os.environ.update(SETTINGS)
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from transformers import AutoTokenizer

    from muxserve.gateway.front_end import seam

    # Else vLLM imports itself anew for each architecture, the first time on a machine.
    seam.register_architectures({str(path): True for path in models})
    prepare_forks()
    for path in models[:1]:
        if path.is_dir():  # what reads its tokenizer is imported here
            AutoTokenizer.from_pretrained(path)
    for path in models:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (out / f"{path.name}{suffix}.json").write_text(json.dumps(answer(path)))
                note(out)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"stock vLLM failed on {path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--tiny", nargs="+", default=[])
    parser.add_argument("--private", nargs="+", default=[])
    parser.add_argument("--split-tiny", nargs="*", default=[])
    parser.add_argument("--split", type=Path)
    parser.add_argument("--quantised", type=Path, nargs="*", default=[])
    parser.add_argument("--fp8", type=Path)
    parser.add_argument("--seeing", nargs="*", default=[])
    parser.add_argument("--seeing-private", nargs="*", default=[])
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="of the model that is split")
    given = parser.parse_args()
    write_each(answers, given.out, given.models)
    for ranks, kinds, suffix in ((1, given.tiny, ""), (2, given.split_tiny, "-2")):
        from tests.engine.harness import FAMILIES, TINY

        paths = {(TINY | FAMILIES)[kind](): kind for kind in kinds}
        found = Path(tempfile.mkdtemp(dir=given.out))
        write_each(partial(answers, ranks=ranks, cases=NOISE), found, list(paths))
        for path, kind in paths.items():
            (found / f"{path.name}.json").rename(given.out / f"{kind}{suffix}.json")
    for kind in given.private:
        from tests.support.tiny_private import tiny_private

        found = tiny_private(kind)
        write_each(partial(answers, cases=NOISE, private=True), given.out, [found])
        (given.out / f"{found.name}.json").rename(given.out / f"{kind}.json")
    if given.split is not None:
        write_each(partial(answers, ranks=2, cases=given.cases), given.out, [given.split], "-2")
    for path in given.quantised:
        asked = questions(path.name.partition("-")[0])
        write_each(partial(answers, cases=tuple(asked), of=asked), given.out, [path])
    if given.seeing:
        from tests.engine.harness import SEEING

        for kind in given.seeing:
            write_each(partial(seen, out=given.out), given.out, [SEEING[kind]()])
    for kind in given.seeing_private:
        from tests.support.tiny_seeing import PLACES, tiny_seeing

        place = PLACES[kind]
        asked = {
            case: (text.replace("<image>", place), sizes, params)
            for case, (text, sizes, params) in SEEN.items()
            if place or len(sizes) < 2
        }
        write_each(partial(seen, out=given.out, cases=asked, private=True), given.out, [tiny_seeing(kind)])
    if given.fp8 is not None:
        asked = questions(given.fp8.name)
        cached = partial(answers, cases=tuple(asked), of=asked, kv_cache_dtype="fp8")
        write_each(cached, given.out, [given.fp8], "-fp8")


if __name__ == "__main__":
    main()
