"""The trial on a GPU: its runner with steps that only pretend, and its list as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from muxserve.gpu.nvml import Gpu, GpuMachine, GpuModes
from tests.gpu.trial import fleets, needs, operators, runner, stock_percent
from tests.gpu.trial.runner import ROOT, Rehearsal, Step, Trial, listing, summary
from tests.gpu.trial.steps import STEPS
from tests.support.patience import PATIENCE, eventually


class Time:
    """A clock that goes on when a step has ended, by a second."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, process: subprocess.Popen[bytes], _: float) -> int:
        self.now += 1.0
        return process.wait(PATIENCE)


def step(name: str, command: str, **more: object) -> Step:
    found = f"echo 'finding: {name} ran'; {command}"
    return Step(name, "a", f"what {name} decides", found, 10.0, 20.0, **more)  # type: ignore[arg-type]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return again(tmp_path)


def again(directory: Path, seconds: float = 60.0, **more: object) -> Trial:
    time = Time()
    made = Trial(directory / "trial.json", {"gpus": ["H200"]}, seconds, clock=time, wait=time.wait, **more)  # type: ignore[arg-type]
    made.resume()
    return made


def outcomes(trial: Trial) -> dict[str, str]:
    return {name: row["outcome"] for name, row in json.loads(trial.file.read_text())["steps"].items()}


FIGURES = """echo '{"figure": 7}' > {out}"""


def test_figures_of_each_step_are_in_the_one_file(trial: Trial) -> None:
    shared = step("second", "mkdir -p {state} && echo '[1]' > {state}/shared.json", results=("shared.json",))
    assert trial.run([step("first", FIGURES), shared])
    report = json.loads(trial.file.read_text())
    assert report["gpus"] == ["H200"]
    assert report["steps"]["first"]["results"] == {"first.json": {"figure": 7}}
    assert report["steps"]["second"]["results"] == {"shared.json": [1]}


def test_a_step_that_fails_says_its_last_lines_and_the_next_one_runs(trial: Trial) -> None:
    said: list[str] = []
    trial.say = said.append
    assert not trial.run([step("broken", f"{FIGURES}; echo no kernel image >&2; exit 3"), step("next", "true")])
    row = json.loads(trial.file.read_text())["steps"]["broken"]
    assert (row["outcome"], row["code"], row["last_lines"][-1]) == ("failed", 3, "no kernel image")
    assert row["results"] == {"broken.json": {"figure": 7}}
    assert any("no kernel image" in line for line in said)
    assert outcomes(trial)["next"] == "done"


def test_a_step_out_of_time_is_asked_to_end_and_keeps_its_figures(trial: Trial) -> None:
    asked: list[int] = []

    def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
        asked.append(int(seconds))
        eventually((trial.state / "slow.json").exists, "figures are there")

    trial.wait = wait
    ends = "trap 'echo ended > {state}/ended; exit 143' TERM; " + FIGURES + "; sleep 1000 & wait"
    assert not trial.run([step("slow", ends)])
    row = json.loads(trial.file.read_text())["steps"]["slow"]
    assert (row["outcome"], row["results"]) == ("out of time", {"slow.json": {"figure": 7}})
    assert (trial.state / "ended").exists()
    assert asked == [20]


def test_what_a_step_has_started_in_another_session_ends_with_it(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose benchmark is too slow to end it would keep its memory of the GPU."""
    monkeypatch.setattr(runner, "GRACE", 0.0)

    def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
        eventually((trial.state / "stays.json").exists, "it has started")

    trial.wait = wait
    assert not trial.run([step("stays", "trap '' TERM; setsid sleep 1000 & echo $! > {out}; wait; wait")])
    pid = trial.results["stays"]["results"]["stays.json"]

    def gone() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    eventually(gone, "it has ended")


def test_what_has_no_time_left_is_left_out_with_the_reason(tmp_path: Path) -> None:
    trial = again(tmp_path, seconds=5.5)
    assert not trial.run([step("first", "true"), step("second", "true")])
    row = json.loads(trial.file.read_text())["steps"]["second"]
    assert (row["outcome"], row["why"]) == ("left out", "4 s are left, and it takes about 10 s")


def test_a_trial_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    marker = tmp_path / "mended"
    steps = [step("good", "echo once >> {state}/good"), step("bad", f"test -e {marker}"), step("rest", "true")]
    first = again(tmp_path)
    first.run(steps[:2])
    marker.touch()
    second = again(tmp_path)
    assert second.run(steps)
    assert (second.state / "good").read_text() == "once\n", "what is done is not done again"
    assert set(outcomes(second).values()) == {"done"}


def test_without_a_toolkit_stock_vllm_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "without_compiler", lambda: {"VLLM_USE_FLASHINFER_SAMPLER": "0"})
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert runner.environment(tmp_path)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert runner.environment(tmp_path)["VLLM_USE_FLASHINFER_SAMPLER"] == "1", "who says so is followed"


def test_what_was_interrupted_is_done_again(tmp_path: Path) -> None:
    trial = again(tmp_path)

    def wait(process: subprocess.Popen[bytes], _: float) -> int:
        raise KeyboardInterrupt

    trial.wait = wait
    with pytest.raises(KeyboardInterrupt):
        trial.run([step("first", "sleep 1000")])
    assert outcomes(trial) == {"first": "running"}
    assert again(tmp_path).run([step("first", "true")])


def test_another_file_is_not_taken_for_results(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text('{"results": {}}')
    with pytest.raises(ValueError, match=r"trial\.json has no results of a trial; give another file with --out"):
        again(tmp_path)


def test_steps_whose_needs_are_missing_are_left_out(tmp_path: Path) -> None:
    trial = again(tmp_path, missing={"mps": "MPS is not installed"})
    steps = [step("under-mps", "true", needs=("gpu", "mps")), step("other", "true")]
    assert not trial.run(steps)
    assert outcomes(trial) == {"under-mps": "left out", "other": "done"}
    assert "(left out: mps)" in listing(steps, trial.missing)[0]
    assert listing(steps, trial.missing)[-1] == "0.2 minutes in all, by these estimates"


def test_a_rehearsal_has_little_work_and_says_what_it_does_not_show(tmp_path: Path) -> None:
    trial = again(tmp_path, rehearses=True)
    said: list[str] = []
    trial.say = said.append
    little = Rehearsal("$SAID", {"SAID": "7"}, unseen="how fast it is")
    assert trial.run([step("said", "printf '[%s]' > {out}", rehearsal=little), step("as it is", "true")])
    assert trial.results["said"]["results"] == {"said.json": [7]}
    assert trial.results["said"]["unseen"] == "how fast it is"
    assert any("stand-ins do not show how fast it is" in line for line in said)


def test_what_steps_find_is_printed_and_kept(trial: Trial) -> None:
    said: list[str] = []
    trial.say = said.append
    assert trial.run([step("first", "echo 'finding: all is well'; echo 'something else'")])
    assert trial.results["first"]["findings"] == ["first ran", "all is well"]
    assert said[-1] == "first: done after 1 s\n  first ran\n  all is well"


def test_a_step_without_a_finding_has_decided_nothing(trial: Trial) -> None:
    assert not trial.run([Step("silent", "a", "nothing", "true", 10.0, 20.0)])
    assert outcomes(trial) == {"silent": "no finding"}


def test_a_new_trial_begins_without_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    first = again(tmp_path)
    assert first.run([step("left", "touch {state}/left")])
    second = again(tmp_path)
    second.begin()
    assert not (second.state / "left").exists()


def test_the_summary_has_a_line_for_each_step(trial: Trial) -> None:
    assert not trial.run([step("good", "true"), step("bad", "false")])
    assert [line.split() for line in summary(trial.results)] == [
        ["good", "done", "1", "s"],
        ["bad", "failed", "1", "s"],
        ["1", "of", "2", "steps", "done,", "0.0", "minutes"],
    ]


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_found", lambda module: module not in ("vllm", "openai", "pytest"))
    found = needs.missing({"vllm", "fleet", "pytest", "native"})
    assert found["vllm"].startswith("vLLM is not installed; carry its wheels")
    assert found["fleet"] == "not installed, and fleets need them: openai"
    assert "native" not in found


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (Gpu(0, "GPU-0", "NVIDIA H200"), ""),
        (Gpu(0, "GPU-0", "NVIDIA H200", modes=GpuModes(mig=True)), "no GPU is whole and sound"),
        (Gpu(0, "GPU-0", "NVIDIA H200", fault="lost"), "no GPU is whole and sound"),
    ],
)
def test_a_gpu_is_there_if_it_is_whole_and_sound(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, why: str) -> None:
    monkeypatch.setattr(needs, "this_machines_gpus", lambda: GpuMachine((gpu,)))
    assert needs.missing({"gpu"}).get("gpu", "").startswith(why)
    assert bool(needs.missing({"gpu"})) == bool(why)


def test_every_step_has_its_own_name_a_limit_and_known_needs() -> None:
    assert len({each.name for each in STEPS}) == len(STEPS)
    assert [each.section for each in STEPS] == sorted(each.section for each in STEPS)
    for each in STEPS:
        assert each.estimate < each.limit
        assert set(each.needs) <= needs.NEEDS.keys()


@pytest.mark.parametrize("each", STEPS, ids=lambda step: step.name)
def test_what_steps_run_is_there(each: Step) -> None:
    words = each.command.split()
    for module in (word for word in words if word.startswith("tests.gpu.trial.")):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists()
    for file in (word for word in words if word.startswith(("benchmarks/", "tests/"))):
        assert (ROOT / file).exists()
    assert not subprocess.run(["bash", "-n", "-c", each.command]).returncode
    ours = [name for name in each.rehearsal.environment if name.startswith("TRIAL_")]
    assert all(name in each.command for name in ours), "a rehearsal has no less work"


def test_without_a_gpu_the_list_says_so_and_nothing_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.trial", "--out", str(tmp_path / "trial.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "nothing was tried" in done.stdout
    assert "missing, gpu: " in done.stdout
    assert all(each.name in done.stdout for each in STEPS)
    assert not (tmp_path / "trial.json").exists()


def answer(tokens: int, top: dict[str, float]) -> dict[str, object]:
    """A reference whose prompt has that many tokens, and whose one answered token is 5."""
    return {"prompt": list(range(tokens)), "tokens": [5], "top": [{"5": -0.1, **top}]}


def test_wrong_answers_are_counted_by_model_and_length_of_the_prompt() -> None:
    reference = {
        "atlas": [answer(20, {"6": -2.0}), answer(40, {"6": -0.2})],
        "frontdesk": [answer(130, {}), answer(64, {})],
    }
    found = fleets.judged(
        [("atlas", 0, [6]), ("atlas", 1, [6]), ("frontdesk", 0, [7]), ("frontdesk", 1, [5])], reference
    )
    assert (found["answers"], found["wrong"], found["at_first_token"]) == (4, 2, 2), "a near tie is not wrong"
    assert found["by_model"] == {"atlas": 1, "frontdesk": 1}
    assert found["by_prompt_tokens"] == {"below 32": 1, "128 and more": 1}


def test_a_fleet_is_summed_up_over_its_passes() -> None:
    wrong = {"answers": 72, "wrong": 2, "by_model": {"atlas": 2}, "by_prompt_tokens": {"below 32": 2}}
    row = {"sharing": "mps", **{name: wrong for name, _ in fleets.PASSES}}
    assert "wrong answers: 2 of 72 in batches, 2 of 72 one at a time, " in fleets.said_of("percentages", row)
    assert "{'atlas': 6}; by tokens of the prompt: {'below 32': 6}" in fleets.said_of("percentages", row)
    assert fleets.said_of("percentages", {"error": "no"}) == "percentages: it did not serve"


def test_tensors_are_kept_with_their_strides_and_expanded_ones_as_numbers() -> None:
    numbers = torch.arange(6.0).view(2, 3)
    turned, expanded = operators.kept(numbers.t()), operators.kept(numbers[:, :1].expand(2, 3))
    assert turned.values.stride() == (1, 3)
    assert torch.equal(turned.values, numbers.t())
    assert expanded.values.tolist() == [[0.0] * 3, [3.0] * 3]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"wrong": 0, "wrong_alone": 1}, {"wrong": 0, "wrong_alone": 0}], "stock vLLM is wrong by itself"),
        ([{"wrong": 0, "wrong_alone": 0}, {"error": "no"}], "stock vLLM was right as far as it answered"),
        ([{"wrong": 0, "wrong_alone": 0}], "stock vLLM is right with percentages"),
    ],
)
def test_stock_answers_say_whose_fault_it_is(rows: list[dict[str, object]], words: str) -> None:
    assert stock_percent.verdict({str(n): row for n, row in enumerate(rows)}).startswith(words)
