"""An OpenAI-compatible server of its own process, whose models behave as their names say. Run it: it prints its URL.

`exact*` takes everything, as vLLM does; `text` refuses token ids and `ignore_eos`; `chat` has no completions; `short`
ignores `ignore_eos`; `refuse`, `break`, `mute`, `garbage` and `error` fail every request but the first, each in its own
way; `hang` never ends one but the first; `uncounted` says why it ended in an empty piece, and counts no
tokens. GET /seen tells what was asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from typing import Any

from aiohttp import web

MODELS = [
    "exact",
    "exact-2",
    "text",
    "chat",
    "short",
    "refuse",
    "break",
    "mute",
    "garbage",
    "error",
    "hang",
    "uncounted",
]
seen: list[dict[str, Any]] = []
asked: Counter[str] = Counter()


def refusal(body: dict[str, Any], chat: bool) -> str:
    """Why this model does not take this request; empty if it does."""
    model = body["model"]
    if model == "chat" and not chat:
        return "no completions here"
    if model in ("text", "chat"):
        if "ignore_eos" in body:
            return "unknown field ignore_eos"
        if isinstance(body.get("prompt"), list):
            return "prompt must be a string"
    return ""


def prompt_tokens(body: dict[str, Any], chat: bool) -> int:
    if chat:
        # Two tokens a word and a template, so that a client must adapt.
        return 2 * len(body["messages"][0]["content"].split()) + 4
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


async def answer(request: web.Request) -> web.StreamResponse:
    if KEY and request.headers.get("Authorization") != f"Bearer {KEY}":
        return web.json_response({"error": {"message": "wrong key"}}, status=401)
    body = await request.json()
    chat = request.path.endswith("chat/completions")
    model = body["model"]
    asked[model] += 1
    seen.append({**body, "path": request.path, "at": asyncio.get_running_loop().time()})
    if words := refusal(body, chat):
        return web.json_response({"error": {"message": words}}, status=400)
    first = asked[model] == 1
    if model == "refuse" and not first:
        return web.json_response({"error": {"message": "too many requests"}}, status=429)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def event(data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await response.write(f"data: {text}\n\n".encode())

    tokens = min(body["max_tokens"], 3) if model in ("short", "text") else body["max_tokens"]
    if chat:
        await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    await asyncio.sleep(STEP)
    for number in range(tokens):
        if number:
            await asyncio.sleep(STEP)
        if number == 1 and not first:
            if model == "hang":
                await asyncio.sleep(3600)
            if model == "break":
                request.transport.close()
                return response
            if model == "garbage":
                await event("{nonsense")
            if model == "mute":
                break
        piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
        await event({"choices": [{**piece, "index": 0, "finish_reason": None}], "usage": None})
    if model == "error" and not first:
        await event({"error": {"message": "the engine died"}})
    if model == "uncounted":
        last = {"delta": {}} if chat else {"text": ""}
        await event({"choices": [{**last, "index": 0, "finish_reason": "length"}]})
        await event("[DONE]")
    elif model != "mute" or first:
        usage = {"prompt_tokens": prompt_tokens(body, chat), "completion_tokens": tokens}
        await event({"choices": [], "usage": usage})
        await event("[DONE]")
    return response


async def models(request: web.Request) -> web.Response:
    if KEY and request.headers.get("Authorization") != f"Bearer {KEY}":
        return web.json_response({"error": {"message": "wrong key"}}, status=401)
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})


async def tell(request: web.Request) -> web.Response:
    return web.json_response(seen)


async def main() -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/seen", tell)
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    # Its parent holds the other end of stdin: whatever becomes of it, this ends.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    STEP = float(sys.argv[1])
    KEY = sys.argv[2] if len(sys.argv) > 2 else ""
    asyncio.run(main())
