"""What `muxserve deploy` shows when the fleet is up: the table, the answers, and lines to copy."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

from muxserve.cli.http import HTTPFailure, get_json, stream_chat, trusted
from muxserve.cli.output import console, errors, escape, models_table
from muxserve.config import Fleet
from muxserve.spec import FleetSpec, GatewaySpec

_HEALTH_SECONDS = 30.0


async def announce(declared: Fleet, fleet: FleetSpec, demo: bool) -> None:
    """Wait until the endpoint says it is healthy, then print everything."""
    url = endpoint(fleet.gateway)
    trust(fleet.gateway)
    if not await _wait_healthy(url):
        errors.print(f"[yellow]{url}/health does not answer 200 yet[/]; `muxserve status --url {url}` says more")
    for unit in fleet.units:
        console.print(f"\n[bold]{escape(unit.name)}[/]" if len(fleet.units) > 1 else "")
        console.print(models_table(unit.unit_spec))
    if demo:
        console.print()
        pooling = {model.name for model in fleet.models if model.pooling}
        for model in declared.models:
            if model.demo and model.name not in pooling:
                await asyncio.to_thread(_ask, url, model.name, model.demo, _key_for(model.name, declared))
    console.print()
    console.print(_how_to(declared, fleet, url), markup=False)
    console.print(f"\n[bold]serving at {url}/v1[/]  (Ctrl-C to stop)")
    if fleet.gateway.http.ui:
        console.print(f"in a browser: {url}/ui has the fleet, {url}/ui#chat a chat")
    console.print(f"in another terminal: {_activation()}`muxserve status`, `muxserve top`, `muxserve stop`")


def _activation() -> str:
    """What makes the command `muxserve` known to a shell, where it is not."""
    script = Path(sys.prefix) / "bin/activate"
    if shutil.which("muxserve") is not None or not script.exists():
        return ""
    here = Path.cwd()
    return f"`source {script.relative_to(here) if script.is_relative_to(here) else script}`, then "


def _key_for(model: str, declared: Fleet) -> str | None:
    """A key that opens `model`; None if there is none."""
    keys = list(declared.gateway.keys)
    for tenant in declared.tenants.values():
        if tenant.models is None or model in tenant.models:
            keys += tenant.keys
    return keys[0] if keys else None


def endpoint(gateway: GatewaySpec) -> str:
    """The URL at which a client on this machine reaches the gateways."""
    host = gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{gateway.scheme}://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def trust(gateway: GatewaySpec) -> None:
    """Let this process ask the gateways of a fleet of this machine whatever host their certificate is for."""
    if gateway.tls is not None:
        trusted[endpoint(gateway)] = gateway.tls.cert


async def _wait_healthy(url: str) -> bool:
    deadline = time.monotonic() + _HEALTH_SECONDS
    while time.monotonic() < deadline:
        try:
            # One question per thread, so that being stopped meanwhile never waits for more than one answer.
            if (await asyncio.to_thread(get_json, url, "/health", timeout=5))[0] == 200:
                return True
        except HTTPFailure:
            pass
        await asyncio.sleep(0.05)
    return False


def _ask(url: str, model: str, question: str, key: str | None) -> None:
    """Print one answer as it streams in."""
    console.print(f"[bold]{escape(model)}[/] > {escape(question)}")
    try:
        for piece in stream_chat(url, model, question, key):
            sys.stdout.write(_printable(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    except HTTPFailure as error:
        errors.print(f"[red]no answer:[/] {escape(str(error))}")


def _printable(text: str) -> str:
    """`text` without control characters: what a model says must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _how_to(declared: Fleet, fleet: FleetSpec, url: str) -> str:
    """A curl line and a client snippet that work when pasted."""
    pooling = {model.name for model in fleet.models if model.pooling}
    model = next((model for model in declared.models if model.name not in pooling), declared.models[0])
    question = model.demo or "Hello!"
    keys = fleet.needs_key
    if model.name in pooling:
        path = "pooling"
        content: dict[str, object] = {"model": model.name, "input": question}
    else:
        path = "v1/chat/completions"
        content = {"model": model.name, "messages": [{"role": "user", "content": question}]}
    quoted = json.dumps(content, ensure_ascii=False).replace("'", "'\\''")
    header = ' -H "Authorization: Bearer $MUXSERVE_API_KEY"' if keys else ""
    key = 'os.environ["MUXSERVE_API_KEY"]' if keys else '"none"'
    imports = "import os\nfrom openai import OpenAI" if keys else "from openai import OpenAI"
    curl = f"curl {url}/{path} -H 'Content-Type: application/json'{header} -d '{quoted}'"
    if model.name in pooling:  # of its routes the one that each has; the client knows embeddings alone
        return curl
    return f"""{curl}

{imports}
client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(
    model={json.dumps(model.name)}, messages=[{{"role": "user", "content": {json.dumps(question)}}}]
)
print(answer.choices[0].message.content)"""
