"""The steps of the trial, most decisive first. Times are estimates from the first fleets on an H200 (a fleet was ready
after 38 s, half of it the import of vLLM) and from what the commands wait for; no trial has run on a GPU yet."""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu.run import ENABLED
from tests.gpu.stock import MODELS
from tests.gpu.trial.runner import Rehearsal, Step

_STOCK = ("gpu", "vllm", "compiler", "models")
_FLEET = (*_STOCK, "native", "fleet")
_TESTS = f"{ENABLED}=1 {{python}} -m pytest -x -q -rP -p no:cacheprovider -o timeout=600"
_MODULE = "{python} -m tests.gpu.trial"
_SERVING = (
    "{python} benchmarks/gpu/serving.py --out {state}/serving.json --alphas 2.1 --kv-gib 24 --rates 8 24 --duration 10"
)
_SHAPES = "--shapes llama-1b llama-3b llama-8b"
_LITTLE_SERVING = Rehearsal(
    f"--shapes configs/models/{MODELS[0]} configs/models/{MODELS[1]} --kv-gib 0.25 --rates 4 --duration 4 --longest 256"
    " --eager",
    unseen="how fast anything is: which way of serving is best",
)
_LITTLE_FLEET = Rehearsal("--start 900", unseen="whether an answer is wrong")
# What is compared on the device is the same then, and numbers that come from there are small.
_RIGHT = {"CUDA_STUB_TRUE": "1", "CUDA_STUB_FLOAT": "0.001"}


def _serving(name: str, system: str, decides: str, estimate: float, *needs: str) -> Step:
    return Step(
        name, "c", decides, f"{_SERVING} --systems {system} {_SHAPES}", estimate, 180, (*_FLEET, *needs),
        rehearsal=_LITTLE_SERVING, results=("serving.json",),
    )  # fmt: skip


STEPS: Sequence[Step] = (
    Step(
        "stock-percent", "a", "whether stock vLLM alone answers wrongly with 70 % or 10 % of the SMs",
        f"{_MODULE}.stock_percent --out {{out}}", 110, 150, (*_STOCK, "mps"),
        rehearsal=Rehearsal(
            f"--models {MODELS[0]} --ways none 70+10 --limit 300", unseen="whether an answer is wrong"
        ),
    ),
    Step(
        "operators", "a", "the first operator of a prefill that computes otherwise on 70 % of the SMs",
        f"{_MODULE}.operators record {{state}}/operators ${{TRIAL_MODELS:-{' '.join(MODELS)}}}"
        f" && {_MODULE}.under_mps 70 {_MODULE}.operators replay {{state}}/operators {{out}}", 60, 100, (*_STOCK, "mps"),
        rehearsal=Rehearsal(environment={"TRIAL_MODELS": MODELS[0]}, unseen="which operator is wrong"),
    ),
    Step(
        "attention-shapes", "a", "FlashAttention of the quickstart's heads on 70 % and 10 %, and on our pages",
        f"for part in ${{TRIAL_PARTS:-none 70 10}}; do"
        f" {_MODULE}.under_mps $part {_MODULE}.flash {{out}} || exit 1; done;"
        f" for part in ${{TRIAL_PARTS:-70 10}}; do {ENABLED}=1 {_MODULE}.under_mps $part {{python}} -m pytest -q"
        " -p no:cacheprovider tests/gpu/test_attention.py -k \"${TRIAL_CASES:-quickstart}\" || code=1; done;"
        " exit ${code:-0}", 70, 110,
        ("gpu", "vllm", "compiler", "mps", "pytest"),
        rehearsal=Rehearsal(
            environment={**_RIGHT, "TRIAL_PARTS": "70", "TRIAL_CASES": "quickstart-4-2-128 and prompts"},
            unseen="whether attention is right: they say that it is",
        ),
    ),
    Step(
        "fleet-percent", "a", "wrong answers of a fleet with percentages, alone on the GPU, by model and prompt",
        f"{_MODULE}.fleets --out {{out}} percentages", 75, 130, (*_FLEET, "mps"), rehearsal=_LITTLE_FLEET,
    ),
    Step(
        "doctor", "b", "what the probes find, for every fleet after this one; whether they find wrong percentages",
        f"{_MODULE}.doctor {{out}}", 125, 180, ("gpu", "vllm", "compiler", "native", "fleet", "models"),
        rehearsal=Rehearsal(environment=_RIGHT, unseen="what works: they say that nearly all does"),
    ),
    _serving("serving-alone", "stock-alone", "latencies alone, and one model's server with the GPU for itself", 75),
    _serving("serving-stock-mps", "stock-mps", "what stock servers beside each other serve", 75, "mps"),
    _serving("serving-one-free", "one-free", "one engine per model that nobody holds back", 75, "mps"),
    _serving("serving-split-green", "split-green", "two engines per model on SMs of their own", 80, "mps"),
    _serving("serving-one-turns", "one-turns", "one engine per model, one at a time", 70),
    Step(
        "fleet-graphs", "d", "tokens of stock vLLM from a fleet with CUDA graphs, to its end",
        f"{_MODULE}.fleets --out {{out}} graphs", 110, 160, (*_FLEET, "mps"),
        # Each model's graphs are compiled, which takes a minute over stand-ins.
        rehearsal=Rehearsal(f"{_LITTLE_FLEET.arguments} --models {MODELS[0]}", unseen=_LITTLE_FLEET.unseen),
    ),
    Step(
        "deaths", "d", "requests survive kills of an engine, the memory manager and the MPS server",
        f"{_TESTS} tests/gpu/test_fleet.py -k 'requests_survive and (decode or memory or MPS)'",
        110, 180, (*_FLEET, "mps", "pytest"),
        rehearsal=Rehearsal(unseen="whether an answer is wrong"),
    ),
    Step(
        "wakes", "e", "seconds until a sleeping model answers: copied back, with engines that stay and without",
        "{python} benchmarks/gpu/wakes.py --models 4 --limit 22GiB --resting 8GiB --rounds 2 --eager --out {out}", 110,
        160, _FLEET, rehearsal=Rehearsal(f"--shape configs/models/{MODELS[0]} --models 3 --limit 10GiB --resting 4GiB"),
    ),
    Step(
        "attention-speed", "f", "bandwidth of attention on one-head pages beside stock FlashAttention",
        "{python} benchmarks/gpu/attention.py --batches 1 32 256 --contexts 512 4096 --out {out}", 40, 80,
        ("gpu", "vllm", "compiler"), rehearsal=Rehearsal("--batches 1 --contexts 128"),
    ),
    Step(
        "steps-by-share", "f", "seconds of prefill and decode steps by share of the SMs, as a profile for plans",
        "{python} benchmarks/gpu/sharing.py --shape llama-8b --shares 10 40 70 100 --seconds 1 --out {out}", 90, 150,
        (*_STOCK, "mps"),
        rehearsal=Rehearsal(f"--shape configs/models/{MODELS[0]} --shares 40 60 --seconds 0.2 --kv-gib 0.5 --eager"),
    ),
)  # fmt: skip
