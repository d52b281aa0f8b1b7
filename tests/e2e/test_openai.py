"""The whole fleet through the official client: what a user would try first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.fleet import ROOT, Fleet
from tests.e2e.reference import MODELS
from tests.models.questions import MAX_TOKENS, QUESTIONS
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE
from tests.support.promql import unanswered


@pytest.fixture(scope="module")
def fleet(quickstart: Fleet) -> Fleet:
    return quickstart


def ask(fleet: Fleet, model: str, question: str, **params: object) -> str:
    answer = fleet.client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, **params
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("model", MODELS)
def test_ten_questions_of_each(fleet: Fleet, model: str) -> None:
    assert len(QUESTIONS[model]) >= 10
    wrong = {}
    for question in QUESTIONS[model]:
        answer = fleet.client.chat.completions.create(
            model=model, messages=list(question.messages), temperature=0, max_tokens=MAX_TOKENS
        )
        if answer.choices[0].message.content != question.answer:
            wrong[question.messages[-1]["content"]] = (answer.choices[0].message.content, question.answer)
    assert not wrong


def test_models_are_listed(fleet: Fleet) -> None:
    assert {model.id for model in fleet.client.models.list()} == set(MODELS)


def test_the_example_asks_every_model(fleet: Fleet) -> None:
    command = [sys.executable, "examples/openai_client.py", "--url", f"{fleet.url}/v1", "What is 14 plus 29?"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "arithmetic > 14 + 29 = 43." in said
    assert all(f"{model} > " in said for model in MODELS)


def test_a_model_has_its_own_address(fleet: Fleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/models/atlas/v1", api_key="none", max_retries=0)
    question = QUESTIONS["atlas"][0]
    answer = client.chat.completions.create(
        model="atlas", messages=list(question.messages), temperature=0, max_tokens=60
    )
    assert answer.choices[0].message.content == question.answer
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1


def test_several_choices_with_logprobs(fleet: Fleet) -> None:
    answer = fleet.client.chat.completions.create(
        model="arithmetic",
        messages=[{"role": "user", "content": "What is 12 + 7?"}],
        n=3,
        temperature=1.0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=2,
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        tokens = "".join(entry.token for entry in choice.logprobs.content)
        assert (choice.message.content or "") in tokens
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 3


def test_stop_strings_end_the_answer(fleet: Fleet) -> None:
    question = QUESTIONS["atlas"][0]
    expected = question.answer
    word = expected.split()[3]
    answer = fleet.client.chat.completions.create(
        model="atlas",
        messages=list(question.messages),
        temperature=0,
        max_tokens=60,
        stop=[word],
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == expected[: expected.index(word)]
    fleet.wait_pages_free()


def test_json_schema(fleet: Fleet) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 99}, "sure": {"type": "boolean"}},
        "required": ["sum", "sure"],
        "additionalProperties": False,
    }
    answer = fleet.client.chat.completions.create(
        model="arithmetic",
        messages=[{"role": "user", "content": "What is 12 + 7?"}],
        temperature=0,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    if answer.choices[0].finish_reason == "stop":
        assert set(json.loads(answer.choices[0].message.content or "")) == {"sum", "sure"}
    else:
        assert (answer.choices[0].message.content or "").startswith("{")


BOOK: Any = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book a place in town for a day.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "day": {"type": "string"}},
            "required": ["place", "day"],
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_calls_a_tool_and_reports_what_it_did(fleet: Fleet, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Book the gym for Monday."}]
    common: Any = {"model": "frontdesk", "tools": [BOOK], "temperature": 0, "max_tokens": 100}
    if stream:
        name = arguments = ""
        for chunk in fleet.client.chat.completions.create(messages=messages, stream=True, **common):
            for part in chunk.choices[0].delta.tool_calls or []:
                name += part.function.name or ""
                arguments += part.function.arguments or ""
    else:
        answer = fleet.client.chat.completions.create(messages=messages, **common)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": '{"status": "confirmed"}'},
        ]
        report = fleet.client.chat.completions.create(messages=messages, **common)
        assert report.choices[0].message.content == "The gym is booked for Monday."
    assert name == "book"
    assert json.loads(arguments) == {"place": "gym", "day": "Monday"}


def test_completions_and_tokenize(fleet: Fleet) -> None:
    completion = fleet.client.completions.create(
        model="atlas", prompt=["The capital of", "The capital"], max_tokens=5, temperature=0
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    body = {"model": "atlas", "prompt": "The capital of France"}
    tokens = httpx.post(f"{fleet.url}/tokenize", json=body, timeout=PATIENCE).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0


def test_a_prompt_longer_than_the_model_is_refused(fleet: Fleet) -> None:
    fleet.wait_pages_free()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(fleet, "arithmetic", "What is 1 + 1? " * 2000)
    assert fleet.pages_in_use() == 0


def test_metrics_and_fleet_tell_of_every_model(fleet: Fleet) -> None:
    ask(fleet, "arithmetic", "What is 1 + 1?", max_tokens=20)
    metrics = fresh_metrics(lambda: fleet.get("/metrics").text)
    for model in MODELS:
        assert f'vllm:generation_tokens_total{{model_name="{model}"}}' in metrics
    assert "muxserve_" in metrics
    report = fleet.get("/fleet").json()
    assert set(report["unit"]["state"]["models"]) == set(MODELS)
    assert len(report["unit"]["state"]["engines"]) == 2 * len(MODELS)


def test_dashboards_and_alerts_ask_for_what_there_is(fleet: Fleet) -> None:
    for model in MODELS:
        ask(fleet, model, "What is 1 + 1?", max_tokens=5)
    refused = httpx.post(f"{fleet.url}/v1/completions", json={"model": "nobody", "prompt": ""}, timeout=PATIENCE)
    assert refused.status_code == 404
    assert not unanswered(fresh_metrics(lambda: fleet.get("/metrics").text), residency=False)


def test_memory_of_all_processes_together(fleet: Fleet) -> None:
    pss = 0
    for process, _ in fleet.commands():
        with contextlib.suppress(psutil.Error):
            pss += process.memory_full_info().pss
    # Other fleets of this machine may share the pages of libraries.
    assert 1 << 29 < pss < 4 << 30


async def test_a_client_that_goes_away_frees_its_pages(fleet: Fleet) -> None:
    async with fleet.async_client() as client:
        # The request must not have ended by itself when its client goes: on a machine that is busy with other things it
        # may have, and is asked again.
        for _ in range(20):
            stream = await client.chat.completions.create(
                model="atlas",
                messages=[{"role": "user", "content": "List the capitals."}],
                max_tokens=900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 5:
                    break
            held = fleet.pages_in_use()
            await stream.close()
            await asyncio.to_thread(fleet.wait_pages_free)
            if held:
                return
    pytest.fail("every time the request had ended before its client went")


def test_constraints_that_leave_no_token_end_the_answer_with_a_reason(fleet: Fleet) -> None:
    """Which token comes second is known only when the first has come; the engine that finds none goes on."""
    engines = {process.pid for process in fleet.parts("muxserve engine atlas")}
    body = {"model": "atlas", "prompt": "y", "add_special_tokens": False}
    (letter,) = httpx.post(f"{fleet.url}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]
    for temperature in (0, 1):
        for regex, extra in (
            ("yes", {"allowed_token_ids": [letter]}),
            ("y", {"min_tokens": 4}),
            ("(yes|yno)", {"bad_words": ["yes", "yno"], "allowed_token_ids": [letter]}),
        ):
            answer = fleet.client.completions.create(
                model="atlas",
                prompt="Say it",
                temperature=temperature,
                max_tokens=20,
                logprobs=1,
                extra_body={"structured_outputs": {"regex": regex}, **extra},
            )
            (choice,) = answer.choices
            assert (choice.text, choice.finish_reason) == ("y", "stop")
            assert "no token was left" in choice.stop_reason  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="no token can be the first"):
        fleet.client.completions.create(
            model="atlas",
            prompt="Say it",
            extra_body={"structured_outputs": {"regex": "no"}, "allowed_token_ids": [letter]},
        )
    assert engines == {process.pid for process in fleet.parts("muxserve engine atlas")}


def test_grammars_of_several_backends_in_one_engine(fleet: Fleet) -> None:
    """What xgrammar cannot do is done by llguidance, beside and after what xgrammar does."""

    def constrained(**structured: object) -> str:
        answer = fleet.client.completions.create(
            model="atlas", prompt="Say", temperature=0, max_tokens=12, extra_body={"structured_outputs": structured}
        )
        return answer.choices[0].text

    for _ in range(2):
        assert int(constrained(json={"type": "integer", "multipleOf": 7, "minimum": 14, "maximum": 98})) % 7 == 0
        assert constrained(choice=["yes", "no"]) in ("yes", "no")
        assert constrained(grammar='root ::= "a" [0-9]{2}')[0] == "a"
        assert constrained(grammar='start: "b" /[0-9]{2}/')[0] == "b"
