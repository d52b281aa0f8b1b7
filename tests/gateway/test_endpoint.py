"""The real gateway with the real OpenAI client, over a unit that plays what the prompts say."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import PAGE
from tests.gateway.playing import asking, play, user
from tests.gateway.rig import Running
from tests.support.fresh_metrics import fresh_metrics
from tests.support.patience import PATIENCE, eventually


def test_vllm_is_the_one_that_the_gateway_was_written_for(gateway: Running) -> None:
    ready = gateway.rig.ready()
    assert ready["problems"] == []
    assert ready["moved"] == ["vLLM 0.34.0 is installed, MuxServe is written for 0.32.0 and 0.33.0"]


# ------------------------------------------------------------ what serves


@pytest.mark.parametrize("model", ["alpha", "beta"])
def test_chat(client: openai.OpenAI, gateway: Running, model: str) -> None:
    mark = gateway.mark()
    answer = client.chat.completions.create(model=model, messages=user("Hello, wörld!"))
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.model) == ("Hello, wörld!", "stop", model)
    submit = gateway.wait("submit", mark)
    assert submit["model"] == model
    assert submit["body_id"] == submit["id"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == submit["prompt_tokens"]
    assert answer.usage.completion_tokens == len("Hello, wörld!".encode()) + 1
    assert submit["max_tokens"] == 1024 - submit["prompt_tokens"]


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="alpha", messages=user("one two three"), stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "one two three"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("one two three") + 1


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="beta", prompt=play("abcdefgh"), max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcde", "length")
    streamed = client.completions.create(model="beta", prompt=play("abcdefgh"), max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abcde"


def test_several_prompts_and_echo(client: openai.OpenAI) -> None:
    prompts = [play("first"), play("second")]
    answer = client.completions.create(model="alpha", prompt=prompts)
    assert [choice.text for choice in answer.choices] == ["first", "second"]
    answer = client.completions.create(model="alpha", prompt=prompts[0], echo=True)
    assert answer.choices[0].text == prompts[0] + "first"


def test_prompt_of_token_ids(client: openai.OpenAI, http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"model": "alpha", "prompt": play("hi"), "add_special_tokens": False}).json()
    answer = client.completions.create(model="alpha", prompt=tokens["tokens"])
    assert answer.choices[0].text == "hi"


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client: openai.OpenAI, gateway: Running, stream: bool) -> None:
    mark = gateway.mark()
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in client.completions.create(model="alpha", prompt=play("thrice"), n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        for choice in client.completions.create(model="alpha", prompt=play("thrice"), n=3).choices:
            texts[choice.index] = choice.text
    assert set(texts.values()) == {"thrice"}
    assert len(gateway.events(mark, "submit")) == 3


def test_what_one_client_asks_for_at_once_is_one_group(client: openai.OpenAI, gateway: Running) -> None:
    mark = gateway.mark()
    client.completions.create(model="alpha", prompt=[play("one"), play("two")], n=2)
    client.completions.create(model="alpha", prompt=play("alone"))
    groups = [event["group"] for event in gateway.events(mark, "submit")]
    assert len(groups) == 5
    assert len(set(groups[:4])) == 1
    assert groups[4] not in ("", groups[0])


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="alpha", messages=user("abc"), logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content][:3] == ["a", "b", "c"]
    assert all(len(entry.top_logprobs) >= 2 for entry in logprobs.content)
    assert len({entry.logprob for entry in logprobs.content[:3]}) == 3


def test_logprobs_streamed_in_any_order_and_twice_are_whole(client: openai.OpenAI) -> None:
    def logprobs(**script: Any) -> list[float]:
        chunks = client.completions.create(model="alpha", prompt=play("abcdef", **script), logprobs=1, stream=True)
        return [p for c in chunks if c.choices[0].logprobs for p in c.choices[0].logprobs.token_logprobs or ()]

    plain = logprobs()
    assert len(plain) == 7
    assert logprobs(swap=True) == plain
    assert logprobs(overlap=True) == plain
    assert logprobs(lose=3) == plain


def test_prompt_logprobs(http: httpx.Client) -> None:
    body = {"model": "alpha", "prompt": play("abc", lose=2), "prompt_logprobs": 1, "max_tokens": 3}
    answer = http.post("/v1/completions", json=body).json()
    prompt_logprobs = answer["choices"][0]["prompt_logprobs"]
    assert len(prompt_logprobs) == answer["usage"]["prompt_tokens"]
    assert prompt_logprobs[0] is None


def test_stop_strings_cancel_the_rest(client: openai.OpenAI, gateway: Running) -> None:
    mark = gateway.mark()
    answer = client.chat.completions.create(model="alpha", messages=user("one. two. three.", hold=9), stop=["two"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one. ", "stop")
    submit = gateway.wait("submit", mark)
    assert gateway.wait("cancel", mark)["ids"] == [submit["id"]]


def test_tools_by_name_and_required(client: openai.OpenAI, gateway: Running) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
    for tool_choice in choices:
        mark = gateway.mark()
        answer = client.chat.completions.create(
            model="beta", messages=user(called), tools=[tool], tool_choice=tool_choice
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        assert gateway.wait("submit", mark)["structured"]


def test_tools_of_the_models_own_choice(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    answer = client.chat.completions.create(model="beta", messages=user(called), tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        client.chat.completions.create(model="alpha", messages=user(called), tools=[tool], tool_choice="auto")


def test_response_format(client: openai.OpenAI, gateway: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    mark = gateway.mark()
    answer = client.chat.completions.create(
        model="alpha",
        messages=user('{"n": 3}'),
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "") == {"n": 3}
    assert gateway.wait("submit", mark)["structured"]


def test_responses_and_messages_apis(client: openai.OpenAI, http: httpx.Client) -> None:
    response = client.responses.create(model="alpha", input=play("from responses"))
    assert response.output_text == "from responses"
    body = {"model": "beta", "max_tokens": 50, "messages": user("from messages")}
    answer = http.post("/v1/messages", json=body).json()
    assert answer["content"][0]["text"] == "from messages"


def test_tokenize_and_back(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"model": "beta", "prompt": "héllo", "add_special_tokens": False}).json()
    assert tokens["count"] == 6
    text = http.post("/detokenize", json={"model": "beta", "tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "héllo"
    chat = http.post("/models/alpha/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] > 2


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["alpha", "beta", "org/beta"]
    assert client.models.retrieve("org/beta").id == "org/beta"
    assert client.models.retrieve("beta").id == "beta"
    assert [m["id"] for m in http.get("/models/alpha/v1/models").json()["data"]] == ["alpha"]
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 1024


def test_mounted_models_need_no_model_field(gateway: Running) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/models/beta/v1", api_key="none", max_retries=0) as mounted:
        assert mounted.completions.create(model="beta", prompt=play("mounted")).choices[0].text == "mounted"
        with pytest.raises(openai.NotFoundError):
            mounted.completions.create(model="alpha", prompt=play("no"))
    answer = httpx.post(f"{gateway.url}/models/beta/v1/completions", json={"prompt": play("bare")}, timeout=PATIENCE)
    assert answer.json()["choices"][0]["text"] == "bare"


def test_a_model_has_other_names(client: openai.OpenAI, gateway: Running) -> None:
    answer = client.completions.create(model="org/beta", prompt=play("by another name"))
    assert (answer.choices[0].text, answer.model) == ("by another name", "beta")
    assert httpx.get(f"{gateway.url}/models/nobody/v1/models", timeout=PATIENCE).status_code == 404


def test_web_pages_of_the_origins_named_may_call(http: httpx.Client) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = http.options("/v1/chat/completions", headers={"origin": PAGE, **asks})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert http.options("/v1/chat/completions", headers={"origin": "https://else.where", **asks}).status_code == 400
    # An error as well, or the page could not read it.
    wrong = http.post("/v1/completions", json={"model": "nobody"}, headers={"origin": PAGE})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (404, PAGE)


def test_every_request_that_ended_is_in_the_access_log(client: openai.OpenAI, gateway: Running) -> None:
    asked = client.completions.with_raw_response.create(
        model="org/beta", prompt=play("logged"), extra_headers={"x-request-id": "mine-1"}
    )
    assert asked.headers["x-request-id"] == "mine-1"
    who = r"127.0.0.1:\d+ POST /v1/completions tenant=- model=beta"
    line = who + r" status=200 seconds=\d+\.\d{3} request=mine-1 served_as=\w"
    eventually(lambda: re.search(line, gateway.log) is not None, lambda: f"{line} in {gateway.log}")


def test_many_at_once_do_not_mix(client: openai.OpenAI) -> None:
    def ask(n: int) -> tuple[str, str]:
        stream = client.chat.completions.create(
            model=("alpha", "beta")[n % 2],
            messages=user(f"answer {n}", lose=n % 5 if n % 3 else 99, swap=n % 4 == 0),
            stream=True,
        )
        return f"answer {n}", "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        for expected, got in pool.map(ask, range(64)):
            assert got == expected


# ------------------------------------------------------------ what goes wrong below


@pytest.mark.parametrize(
    "script", [{"lose": 0}, {"lose": 4}, {"swap": True}, {"overlap": True}, {"skip": 0}, {"skip": 3}, {"abort": 2}]
)
def test_streams_go_on(client: openai.OpenAI, gateway: Running, script: dict[str, Any]) -> None:
    mark = gateway.mark()
    text = f"whole in spite of {script}"
    stream = client.completions.create(model="alpha", prompt=play(text, **script), stream=True, max_tokens=200)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"
    first, *again = gateway.events(mark, "submit")
    assert (first["attempt"], first["output_tokens"]) == (0, [])
    if "lose" in script:
        (second,) = again
        assert (second["id"], second["attempt"]) == (first["id"], 1)
        # The news of the death may overtake the last tokens.
        assert len(second["output_tokens"]) <= script["lose"]
    elif "skip" in script or "abort" in script:
        # An engine may still have the request under its first id.
        (second,) = again
        assert second["id"] != first["id"]
        assert (second["attempt"], len(second["output_tokens"])) == (1, script.get("skip", script.get("abort")))
        assert gateway.wait("cancel", mark)["ids"] == [first["id"]]
    else:
        assert again == []


def test_deaths_below_are_in_the_log(client: openai.OpenAI, gateway: Running) -> None:
    before = gateway.log.count("main lost 1 requests: the engine was killed")
    client.completions.create(model="alpha", prompt=play("logged", lose=1))
    assert gateway.log.count("main lost 1 requests: the engine was killed") == before + 1


def test_usage_counts_each_token_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="alpha", prompt=play("twelve chars", lose=5))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 13


def test_a_new_unit_scheduler_gets_everything_again(client: openai.OpenAI, gateway: Running) -> None:
    mark = gateway.mark()
    held = client.completions.create(model="beta", prompt=play("held back", hold=4), stream=True)
    texts = [next(held).choices[0].text]
    gateway.wait("held", mark)
    answer = client.completions.create(model="alpha", prompt=play("restarts it", restart=6))
    assert answer.choices[0].text == "restarts it"
    again = gateway.wait("submit", mark, lambda e: e["script"].get("hold") == 4 and e["attempt"] == 1)
    # The news of the death may overtake the last tokens.
    assert 1 <= len(again["output_tokens"]) <= 4
    gateway.wait("held", mark, lambda e: e["id"] == again["id"])
    gateway.tell_unit("go")
    texts += [chunk.choices[0].text for chunk in held]
    assert "".join(texts) == "held back"


def test_what_comes_while_there_is_no_unit_waits_for_it(client: openai.OpenAI, gateway: Running) -> None:
    gateway.tell_unit("down")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: client.completions.create(model="alpha", prompt=play("patience")))
        gateway.wait("down", 0)
        gateway.tell_unit("restart")
        assert answer.result(PATIENCE).choices[0].text == "patience"


def test_last_words_that_are_lost_are_asked_for(client: openai.OpenAI, gateway: Running) -> None:
    mark = gateway.mark()
    answer = client.completions.create(model="alpha", prompt=play("and so it", forget=6))
    assert answer.choices[0].text == "and so it"
    first, second = gateway.events(mark, "submit")
    assert (second["id"], second["attempt"], len(second["output_tokens"])) == (first["id"], 0, 6)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_the_clients_to_know(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.APIError, match="longer than the pool") as caught:
        list(
            client.completions.create(model="alpha", prompt=play("", refuse="longer than the pool"), stream=stream, n=2)
        )
    assert isinstance(caught.value, openai.BadRequestError)


def test_a_request_that_kills_every_engine_ends(client: openai.OpenAI, gateway: Running) -> None:
    mark = gateway.mark()
    with pytest.raises(openai.APIStatusError, match="died") as caught:
        client.completions.create(model="alpha", prompt=play("poison", always_lost=True))
    assert caught.value.status_code == 503
    assert [e["attempt"] for e in gateway.events(mark, "submit")] == list(range(8))


def test_engine_errors_are_server_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="alpha", prompt=play("boom", error=2))


def test_an_output_that_makes_no_sense_ends_the_requests_of_its_model_only(
    client: openai.OpenAI, gateway: Running
) -> None:
    mark = gateway.mark()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.completions.create, model="beta", prompt=play("nothing noticed", hold=4))
        gateway.wait("held", mark)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="alpha", prompt=play("odd words", odd=3), logprobs=1)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "InternalServerError"
        assert client.completions.create(model="alpha", prompt=play("as before")).choices[0].text == "as before"
        gateway.tell_unit("go")
        assert other.result(PATIENCE).choices[0].text == "nothing noticed"
    assert "the output loop of alpha failed" in gateway.log


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(gateway: Running, stream: bool) -> None:
    mark = gateway.mark()
    body = {"model": "alpha", "prompt": play("never ending", hold=3), "stream": stream, "n": 2}
    with asking(gateway, body):
        first = gateway.wait("held", mark)
        gateway.wait("held", mark, lambda e: e["id"] != first["id"])
    ids = {e["id"] for e in gateway.events(mark, "submit")}
    assert len(ids) == 2
    for request_id in ids:
        gateway.wait("cancel", mark, lambda e, wanted=request_id: wanted in e["ids"])


# ------------------------------------------------------------ the server about itself


def test_health_says_what_is_up(gateway: Running, http: httpx.Client) -> None:
    gateway.engines()
    answer = http.get("/health")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert answer.json()["models"]["beta"]["engines"] == {"prefill": "up", "decode": "up"}
    gateway.engines(beta=False)
    while (answer := http.get("/health")).json()["status"] == "ok":
        pass
    assert answer.status_code == 200
    assert answer.json()["status"] == "degraded"
    assert answer.json()["models"]["beta"]["status"] == "restarting"
    assert answer.json()["models"]["alpha"]["status"] == "up"
    gateway.engines()


def test_fleet(http: httpx.Client) -> None:
    fleet = http.get("/fleet").json()
    assert [m["name"] for m in fleet["models"]] == ["alpha", "beta"]
    assert fleet["models"][0]["limits"] == {"max_concurrency": 64, "max_queue": 64, "max_wait_seconds": 5.0}
    assert fleet["units"][0]["state"]["models"]["alpha"]["used_pages"] == 12
    eventually(lambda: http.get("/fleet").json()["gateway"]["requests_in_flight"] == 0, "all requests have ended")


def samples(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in found, f"{name} twice"
            found[name] = float(value)
    return found


def test_metrics(client: openai.OpenAI, http: httpx.Client) -> None:
    completed = 'muxserve_requests_total{model_name="beta",outcome="completed"}'
    before = samples(fresh_metrics(lambda: http.get("/metrics").text))
    client.completions.create(model="beta", prompt=play("count me", lose=3))
    # The text is rendered once a second at most.
    while (after := samples(text := http.get("/metrics").text))[completed] == before.get(completed, 0.0):
        pass

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    beta = '{model_name="beta"}'
    assert grown(f"vllm:generation_tokens_total{beta}") == 9
    assert grown(f"vllm:time_to_first_token_seconds_count{beta}") == 1
    assert 'vllm:time_to_first_token_seconds_count{engine="1",model_name="beta"} 0.0' in http.get("/metrics/full").text
    assert grown(f"vllm:prompt_tokens_total{beta}") > 10
    # What an engine sent with its last tokens, 0.5, is of the past; this is the unit's word.
    assert after[f"vllm:kv_cache_usage_perc{beta}"] == 12 / 1000
    assert 'vllm:num_requests_waiting{model_name="alpha"}' in text
    assert grown(completed) == 1
    assert grown('muxserve_requests_resubmitted_total{model_name="beta",reason="engine_lost"}') == 1
    assert grown('muxserve_time_to_first_token_seconds_count{model_name="beta"}') == 1
    assert grown('muxserve_slo_requests_total{met="true",model_name="beta",slo="ttft"}') == 1
    assert grown('muxserve_slo_requests_total{met="false",model_name="beta",slo="tpot"}') == 1
    assert grown('muxserve_slo_requests_total{met="false",model_name="beta",slo="all"}') == 1
    assert after['muxserve_pages_used{model_name="alpha",unit="main"}'] == 12
    assert after['muxserve_pages_quota{model_name="alpha",unit="main"}'] == 1000
    assert after['muxserve_jobs_total{model_name="alpha",phase="decode",unit="main"}'] == 7
    assert after['muxserve_sm_share{model_name="beta",phase="prefill",unit="main"}'] == 0.5
    assert after['muxserve_step_cost_ratio{model_name="alpha",phase="decode",unit="main"}'] == 2.25
    assert after['muxserve_step_cost_error{model_name="alpha",phase="decode",unit="main"}'] == 0.05
    assert after['muxserve_pool_pages_free{pool="main",unit="main"}'] == 100
    headers = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(headers) == len(set(headers))


def test_metrics_of_one_model(http: httpx.Client) -> None:
    text = http.get("/models/alpha/metrics").text
    assert http.get("/models/nobody/metrics").status_code == 404
    assert http.post("/models/alpha/metrics").status_code == 405
    found = samples(text)
    assert {'model_name="alpha"'} == set(re.findall('model_name="[^"]*"', text))
    assert "engine=" not in text
    assert found['vllm:kv_cache_usage_perc{model_name="alpha"}'] == 12 / 1000
    # What an engine says of its own queue leaves out those who wait for a lease.
    assert found['muxserve_unit_requests{model_name="alpha",place="queued",unit="main"}'] == 2
    assert found['vllm:num_requests_waiting{model_name="alpha"}'] == 2
    assert found['vllm:num_requests_running{model_name="alpha"}'] == 1


def test_pages_that_stock_servers_have(http: httpx.Client) -> None:
    eventually(lambda: http.get("/load").json() == {"server_load": 0}, "all requests have ended")
    assert http.get("/ping").json() == http.get("/health").json()
    assert "openapi.json" in http.get("/docs").text
    document = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/models", "/health", "/models/{model}/metrics"} <= {*document["paths"]}
    assert document["paths"]["/version"]["get"]["summary"].startswith("What serves here")
    assert "/metrics/own" not in document["paths"], "that is among gateways"
    assert "/start_profile" not in document["paths"], "vLLM's administration is not passed on"
    assert document["components"]["schemas"]["ChatCompletionRequest"]


def test_metrics_are_compressed_for_whom_they_may_be(http: httpx.Client) -> None:
    for path in ("/metrics", "/metrics/full", "/models/alpha/metrics", "/fleet", "/openapi.json"):
        packed, plain = http.get(path), http.get(path, headers={"accept-encoding": "identity"})
        assert packed.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert packed.text.splitlines()[0][:20] == plain.text.splitlines()[0][:20]


def test_pages_take_get_only(http: httpx.Client) -> None:
    assert http.post("/health").status_code == 405
    assert http.head("/health").status_code == 200
    assert http.get("/version").json()["version"] == "0.32.0"
