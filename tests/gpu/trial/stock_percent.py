"""Stock vLLM with a percentage of the SMs, and nothing of MuxServe in its path: are its greedy tokens those without?

    python -m tests.gpu.trial.stock_percent --out FILE.json [--ways none 70 10 70+10+10+10 100] [--models ...]

If it answers wrongly, the cause is a kernel's or the driver's. A way is a percentage; `none` is outside MPS;
`70+10+10+10` is 70 % beside three others that decode all the time with 10 %. All prompts are asked at once, and then
each alone for its first token. vLLM is imported once, and every measurement is a fork with an environment of its own,
made before CUDA is initialised. What the file has by now is not measured again. vLLM runs the model runner that
engines of fleets use with this version.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from muxserve.gpu.environment import PIPE
from muxserve.gpu.sm import PERCENTAGE
from tests.gpu import stock
from tests.gpu.load import NEAR_TIE
from tests.gpu.trial.runner import finding
from tests.gpu.trial.under_mps import mps_server

WAYS = ("none", "70", "10", "70+10+10+10", "100")


def forked(job: Callable[[], None]) -> int:
    """The pid of a process that does a job and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        job()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int, seconds: float) -> str:
    """Wait for a process, and end it when the time is over; why it did not end well, empty if it did."""
    end = time.monotonic() + seconds
    done = 0
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return f"ended with status {os.waitstatus_to_exitcode(status)}" if status else ""
            time.sleep(0.02)
        return f"took more than {seconds:.0f} s"
    finally:
        if not done:
            kill(pid)


def kill(pid: int) -> None:
    """End a process of `forked` with all that it has started."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def settle(percent: str, client: dict[str, str]) -> None:
    """Make this process a client of MPS with a percentage, or none."""
    os.environ.update(client)
    os.environ.pop(PERCENTAGE, None)
    if percent == "none":
        os.environ[PIPE] = f"{client.get(PIPE, tempfile.gettempdir())}-none"
    else:
        os.environ[PERCENTAGE] = percent


def measure(model: str, percent: str, client: dict[str, str], out: Path) -> None:
    """Write a model's answers, the first tokens of its prompts one at a time, and how many SMs torch saw."""
    settle(percent, client)
    llm, prompts, params = stock.engine(stock.checkpoint(model))
    rows = stock.answered(llm, prompts, params)
    llm.reset_prefix_cache()
    params.max_tokens = 1
    alone = [stock.answered(llm, [prompt], params)[0]["tokens"][0] for prompt in prompts]
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0
    out.write_text(json.dumps({"sms": sms, "rows": rows, "alone": alone}))


@contextlib.contextmanager
def busy(percents: Sequence[str], client: dict[str, str], models: Sequence[str]) -> Iterator[None]:
    """Others with those percentages, that decode for the length of the block; they have answered once before it."""
    pids, pipes = [], []
    for place, percent in enumerate(percents):
        reading, writing = os.pipe()

        def job(model: str = models[(place + 1) % len(models)], percent: str = percent, writing: int = writing) -> None:
            settle(percent, client)
            llm, prompts, params = stock.engine(stock.checkpoint(model))
            llm.generate(prompts, params, use_tqdm=False)
            os.close(writing)
            while True:
                llm.generate(prompts, params, use_tqdm=False)

        pids.append(forked(job))
        os.close(writing)
        pipes.append(reading)
    try:
        for reading in pipes:
            os.read(reading, 1)  # until it has answered, or ended
            os.close(reading)
        yield
    finally:
        for pid in pids:
            kill(pid)


@contextlib.contextmanager
def no_server() -> Iterator[dict[str, str]]:
    """In place of `mps_server`, where there is no GPU."""
    yield {}


def compared(
    rows: Sequence[dict[str, Any]], alone: Sequence[int], reference: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Which answers are wrong, where, and whose tokens they have in place of their own; how many first tokens are of
    prompts that were computed `alone`."""
    wrong = []
    for index, (ours, theirs) in enumerate(zip(rows, reference, strict=True)):
        difference = stock.first_difference(ours["tokens"], theirs)
        if difference is not None and difference[1] > NEAR_TIE:
            wrong.append({"index": index, **stock.words_of(ours["tokens"], theirs, difference, reference)})
    differences = [
        stock.first_difference([token], {"tokens": theirs["tokens"][:1], "top": theirs["top"][:1]})
        for token, theirs in zip(alone, reference, strict=True)
    ]
    first = [
        abs(ours["top"][0][token] - theirs["top"][0][token])
        for ours, theirs in zip(rows, reference, strict=True)
        if ours["top"] and theirs["top"] and (token := str(theirs["tokens"][0])) in ours["top"][0]
    ]
    return {
        "wrong": len(wrong),
        "of": len(rows),
        "wrong_alone": sum(each is not None and each[1] > NEAR_TIE for each in differences),
        "identical": sum(a["tokens"] == b["tokens"] for a, b in zip(rows, reference, strict=True)),
        "largest_change_of_first_logprob": max(first, default=None),
        "answers": wrong,
    }


def main() -> int:
    """Exit code 1 if a measurement failed; wrong answers are a result."""
    parser = argparse.ArgumentParser(description="Greedy answers of stock vLLM with percentages of the SMs.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="the first is what the others are compared with")
    parser.add_argument("--models", nargs="+", default=list(stock.MODELS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a measurement")
    parser.add_argument("--without-mps", action="store_true", help="try the way only, on a machine without a GPU")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Imported here, what takes seconds in every fork otherwise.
    for module in (stock.choose_runner(), "vllm.v1.engine.core"):
        importlib.import_module(module)

    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept = options.out.with_suffix("")
    kept.mkdir(parents=True, exist_ok=True)
    with no_server() if options.without_mps else mps_server() as client:
        for way in options.ways:
            percent, *others = way.split("+")
            for model in options.models:
                key, out = f"{way}/{model}", kept / f"{way}-{model}.json"
                if "error" not in report.get(key, {"error": ""}):
                    continue
                began = time.monotonic()
                with busy(others, client, options.models):
                    why = ended(forked(partial(measure, model, percent, client, out)), options.limit)
                report[key] = {"seconds": round(time.monotonic() - began, 1)}
                if why:
                    report[key]["error"] = why
                else:
                    found = json.loads(out.read_text())
                    reference = json.loads((kept / f"{options.ways[0]}-{model}.json").read_text())["rows"]
                    report[key] |= {"sms": found["sms"], **compared(found["rows"], found["alone"], reference)}
                options.out.write_text(json.dumps(report, indent=1))
                print(key, {k: v for k, v in report[key].items() if k != "answers"}, flush=True)
            if way != options.ways[0]:
                finding(said_of(way, {model: report[f"{way}/{model}"] for model in options.models}))
        finding(verdict({key: row for key, row in report.items() if not key.startswith(f"{options.ways[0]}/")}))
    return 1 if any("error" in each for each in report.values()) else 0


def said_of(way: str, rows: Mapping[str, dict[str, Any]]) -> str:
    """What came of a way, by model."""
    each = [
        f"{model} {row['wrong']} of {row['of']}, alone {row['wrong_alone']}" if "wrong" in row else f"{model} no result"
        for model, row in rows.items()
    ]
    return f"stock vLLM with {way} % of the SMs, wrong answers: {'; '.join(each)}"


def verdict(report: Mapping[str, dict[str, Any]]) -> str:
    """Whose fault wrong answers of fleets are by that."""
    if any(row.get("wrong") or row.get("wrong_alone") for row in report.values()):
        return "stock vLLM is wrong by itself: a kernel or the driver is at fault, and vLLM should have a report"
    if any("wrong" not in row for row in report.values()):
        return "stock vLLM was right as far as it answered"
    return "stock vLLM is right with percentages: what fleets add to it is at fault (pages, metadata)"


if __name__ == "__main__":
    sys.exit(main())
