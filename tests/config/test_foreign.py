"""llama-swap's and LiteLLM's files become fleet files, and every key of them is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.config import FleetError, parse_fleet
from muxserve.config.foreign.imported import Imported, import_file

SWAP = """\
healthCheckTimeout: 500
macros:
  store: ${env.HOME}/models
  vllm: vllm serve --port ${PORT}
apiKeys: [sk-hunter2, "${env.API_KEY}"]
models:
  "qwen:7b":
    cmd: |
      # started by hand before
      ${vllm} --model Qwen/Qwen2.5-7B-Instruct --max-model-len 32k -tp 2 --gpu-memory-utilization 0.9
      --served-model-name chat qwen --trust-remote-code --dtype half --frobnicate
      --lora-modules sql=/loras/sql
    aliases: [gpt-4o]
    ttl: 60
    concurrencyLimit: 4
    oddity: {deep: [1, 2]}
  local:
    cmd: docker run --rm -v /mnt/models:/models vllm/vllm-openai:v0.11 --model /models/llama --no-enable-prefix-caching
  home: {cmd: "bash -c 'exec vllm serve ${store}/tiny --enforce-eager'"}
  where: {cmd: "python -m vllm.entrypoints.openai.api_server --model ${env.CHECKPOINT}"}
  gguf: {cmd: "llama-server -m x.gguf --port ${PORT}"}
  other: {cmd: some-server}
  unset: {cmd: "vllm serve ${env.NOWHERE}/x"}
groups:
  forever: {persistent: true, swap: false, members: [local, gguf]}
newThing: {a: {b: 1}}
"""
LITELLM = """\
model_list:
  - model_name: chat
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-8B, api_base: "http://a:8000/v1", rpm: 60, max_parallel_requests: 8}
  - model_name: chat
    litellm_params: {model: openai/Qwen/Qwen3-8B, api_base: "http://b:8000/v1", api_key: none}
  - model_name: team/mix
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-0.6B, api_base: "http://c", weight: 3}
  - model_name: team/mix
    litellm_params: {model: huggingface/together/org/other, weight: 1}
  - model_name: again
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-8B, api_base: "http://a:8000/v1"}
  - {model_name: gpt-4o, litellm_params: {model: gpt-4o, api_key: os.environ/OPENAI_API_KEY}}
  - {model_name: zephyr, litellm_params: {model: ollama/zephyr}}
  - {model_name: mine, litellm_params: {model: openai/mine, api_base: "http://d"}}
  - {model_name: "*", litellm_params: {model: "openai/*"}}
litellm_settings: {drop_params: true, fallbacks: [{chat: [gpt-4o, zephyr]}, {nobody: [chat]}]}
router_settings: {model_group_alias: {gpt-4: chat, best: {model: team/mix, hidden: true}, none: gpt-4o}}
general_settings: {master_key: os.environ/MASTER_KEY, database_url: "postgresql://x"}
environment_variables: {REDIS_HOST: localhost}
"""


def taken(text: str, **environ: str) -> tuple[dict[str, Any], Imported]:
    imported = import_file(text, "config.yaml", environ)
    return yaml.safe_load(imported.text), imported


def test_vllm_of_llama_swap_is_taken_with_its_options() -> None:
    fleet, imported = taken(SWAP, HOME="/home/me")
    assert imported.program == "llama-swap"
    assert fleet["memory"] == "auto"
    assert fleet["cluster"] == {"gpus": 2}
    assert fleet["gateway"] == {"api_keys": ["sk-hunter2", "env:API_KEY"]}
    qwen, local, home, where = fleet["models"]
    assert qwen == {
        "name": "qwen-7b",
        "hub": "Qwen/Qwen2.5-7B-Instruct",
        "max_len": 32000,
        "dtype": "float16",
        "aliases": ["chat", "qwen", "qwen:7b", "gpt-4o"],
        "engine_args": {"trust_remote_code": True},
        "adapters": {"sql": "/loras/sql"},
        "limits": {"max_concurrency": 4},
    }
    assert local == {"name": "local", "path": "/mnt/models/llama", "prefix_caching": False, "keep": "always"}
    assert home == {"name": "home", "path": "/home/me/models/tiny", "engine_args": {"enforce_eager": True}}
    assert where == {"name": "where", "path": "env:CHECKPOINT"}


def test_models_behind_litellm_are_taken_and_providers_are_not() -> None:
    fleet, imported = taken(LITELLM)
    assert imported.program == "LiteLLM"
    assert fleet["gateway"] == {"api_keys": ["env:MASTER_KEY"]}
    assert fleet["models"] == [
        {"name": "chat", "hub": "Qwen/Qwen3-8B", "limits": {"max_concurrency": 8}, "replicas": 2,
         "aliases": ["again", "gpt-4"],
         "fallback": {"url": "https://api.openai.com/v1", "model": "gpt-4o", "key": "env:OPENAI_API_KEY"}},
        {"name": "mix-Qwen3-0.6B", "hub": "Qwen/Qwen3-0.6B"},
        {"name": "mix-other", "hub": "org/other"},
    ]  # fmt: skip
    weights = {"mix-Qwen3-0.6B": 3, "mix-other": 1}
    assert fleet["aliases"] == {"team/mix": weights, "best": weights}
    assert parse_fleet(imported.text, "fleet.yaml", Path("/"), {"MASTER_KEY": "a", "OPENAI_API_KEY": "b"}).models


@pytest.mark.parametrize("text", [SWAP, LITELLM], ids=["llama-swap", "litellm"])
def test_every_key_is_accounted_for(text: str) -> None:
    _, imported = taken(text, HOME="/home/me")
    said = [note.key for note in imported.notes]

    def missing(data: object, at: str) -> list[str]:
        if any(key == at or key.startswith(f"{at} ") for key in said):
            return []
        items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        below = [(f"{at}[{key}]" if isinstance(data, list) else f"{at}.{key}".lstrip("."), each) for key, each in items]
        return [key for path, each in below for key in missing(each, path)] if below else [at]

    assert missing(yaml.safe_load(text), "") == []


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [
        (SWAP, 10, "models.qwen:7b.cmd --frobnicate", "this vLLM has no such option"),
        (SWAP, 14, "models.qwen:7b.ttl", "with `memory` a model sleeps when another one needs its memory"),
        (SWAP, 16, "models.qwen:7b.oddity", "MuxServe has no such setting"),
        (SWAP, 21, "models.gguf", "a GGUF file, which vLLM cannot load here"),
        (SWAP, 22, "models.other", "the command starts some-server"),
        (SWAP, 23, "models.unset", "the environment variable NOWHERE is not set"),
        (SWAP, 26, "newThing", "MuxServe has no such setting"),
        (LITELLM, 12, "model_list[5]", "gpt-4o: a provider's service"),
        (LITELLM, 13, "model_list[6]", "a GGUF file"),
        (LITELLM, 14, "model_list[7]", "openai/mine: the file does not say which checkpoint `mine` is"),
        (LITELLM, 15, "model_list[8]", "openai/*: all models of a provider"),
        (LITELLM, 17, "router_settings.model_group_alias.none", "gpt-4o was not taken"),
        (LITELLM, 16, "litellm_settings.fallbacks[1].nobody", "nobody is no model of the fleet"),
        (LITELLM, 18, "general_settings.database_url", "no database is needed"),
    ],
)
def test_what_is_not_taken_has_a_reason(text: str, line: int, key: str, words: str) -> None:
    _, imported = taken(text, HOME="/home/me")
    (note,) = [note for note in imported.notes if note.key == key]
    assert not note.taken
    assert words in note.words
    assert note.line in (line, line - 2)  # a command is where its key is


def test_other_files_are_refused() -> None:
    for text, words in (
        ("a: 1", "has neither"),
        ("models: [{name: a}]", "is a list, as in a fleet file"),
        ("[", "YAML"),
    ):
        with pytest.raises(FleetError, match=words):
            import_file(text, "x.yaml", {})


def test_the_command_writes_a_file_once(tmp_path: Path) -> None:
    file, out = tmp_path / "config.yaml", tmp_path / "fleet.yaml"
    file.write_text("models: {a: {cmd: vllm serve org/a}, b: {cmd: llama-server -m b.gguf}}\n")
    done = CliRunner().invoke(app, ["import", str(file), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert f"{file}:1: models.a.cmd org/a: hub: org/a" in done.output
    assert "models.b: not taken: a GGUF file" in done.output
    assert out.read_text().startswith("# yaml-language-server: $schema=fleet.schema.json\n")
    again = CliRunner().invoke(app, ["import", str(file), "-o", str(out)])
    assert again.exit_code == 2
    assert "is there already" in again.output
    out.unlink()
    file.write_text("models: {a: {cmd: vllm serve ./nowhere}}\n")
    broken = CliRunner().invoke(app, ["import", str(file), "-o", str(out)])
    assert broken.exit_code == 1, broken.output
    assert "models[0].path: " in broken.output
    assert out.exists()
    file.write_text("models: {b: {cmd: llama-server -m b.gguf}}\n")
    none = CliRunner().invoke(app, ["import", str(file), "-o", str(tmp_path / "none.yaml")])
    assert none.exit_code == 2
    assert not (tmp_path / "none.yaml").exists()
