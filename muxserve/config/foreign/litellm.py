"""LiteLLM's proxy file: names of models, each of which is served by one or several endpoints."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from muxserve.config.foreign.command_line import GGUF
from muxserve.config.foreign.reading import Reading, Reasons, checkpoint
from muxserve.config.problems import KeyPath

_VLLM = ("hosted_vllm", "vllm")
_OPENAI = ("openai", "custom_openai", "openai_like", "text-completion-openai", "litellm_proxy")
_GGUF = ("ollama", "ollama_chat", "llamafile", "lm_studio")
_ELSEWHERE = "MuxServe serves it itself"
_LIMITS = "limits are of those who ask: `tenants.NAME.requests_per_minute` and `.tokens_per_minute`"
_SAMPLING = "requests say it, or the checkpoint's generation_config.json"
REASONS: Reasons = {
    ("model_list", "*", "litellm_params", "api_base"): _ELSEWHERE,
    ("model_list", "*", "litellm_params", "api_key"): _ELSEWHERE,
    ("model_list", "*", "litellm_params", "rpm"): _LIMITS,
    ("model_list", "*", "litellm_params", "tpm"): _LIMITS,
    ("model_list", "*", "rpm"): _LIMITS,
    ("model_list", "*", "tpm"): _LIMITS,
    ("model_list", "*", "litellm_params", "timeout"): "`limits.max_wait` bounds the wait for a first token",
    ("model_list", "*", "litellm_params", "stream_timeout"): "`limits.max_wait` bounds the wait for a first token",
    ("model_list", "*", "litellm_params", "temperature"): _SAMPLING,
    ("model_list", "*", "litellm_params", "top_p"): _SAMPLING,
    ("model_list", "*", "litellm_params", "max_tokens"): _SAMPLING,
    ("model_list", "*", "litellm_params", "weight"): "replicas of one checkpoint share its requests by their load",
    ("model_list", "*", "litellm_params", "*"): "is for LiteLLM's endpoints",
    ("model_list", "*", "model_info"): "the checkpoint says what a model can do",
    ("litellm_settings", "context_window_fallbacks"): "a request that is too long for a model is answered with 400",
    ("litellm_settings", "*"): "is LiteLLM's own",
    ("router_settings", "routing_strategy"): "`dispatch` chooses among replicas, by prefix and load",
    ("router_settings", "*"): "is LiteLLM's own",
    ("general_settings", "database_url"): "no database is needed; `gateway.usage_file` has the usage of tenants",
    ("general_settings", "*"): "is LiteLLM's own",
    ("environment_variables",): "export them before `muxserve deploy`",
    ("include",): "import each of these files, and let the fleet file include what came of it",
}
_OPENAI_URL = "https://api.openai.com/v1"
_ENV = re.compile(r"os\.environ/(\w+)")


class _Deployment(NamedTuple):
    """One entry of the list: what serves some of the requests for a name."""

    model: dict[str, Any]
    weight: float
    path: KeyPath

    @property
    def checkpoint(self) -> str:
        """Where its checkpoint is."""
        return str(self.model.get("hub") or self.model["path"])


def read_litellm(reading: Reading) -> dict[str, Any]:
    """The fleet of a LiteLLM file; each of its keys is said to be taken or not."""
    groups: dict[str, list[_Deployment]] = {}
    for index, entry in enumerate(reading.data["model_list"]):
        at: KeyPath = ("model_list", index)
        given = entry.get("litellm_params") if isinstance(entry, dict) else None
        params: dict[str, Any] = given if isinstance(given, dict) else {}
        name, model = entry.get("model_name") if params else None, params.get("model")
        if not isinstance(name, str) or not isinstance(model, str):
            reading.leave(at, "it names no model")
        elif isinstance(found := _place(model, params), str):
            reading.leave(at, f"{model}: {found}")
        else:
            groups.setdefault(name, []).append(_deployment(reading, at, params, found))
    shared: dict[str, dict[str, float]] = {}
    for name, deployments in groups.items():
        _add(reading, name, deployments, shared)
    fleet: dict[str, Any] = {}
    _keys(reading, fleet)
    _group_aliases(reading, shared)
    _fallbacks(reading)
    return fleet | ({"aliases": shared} if shared else {})


def _place(model: str, params: dict[str, Any]) -> dict[str, str] | str:
    """Where the checkpoint is; or why there is none."""
    provider, _, rest = model.partition("/")
    if "*" in model:
        return "all models of a provider; name each that you want"
    if provider in _GGUF:
        return GGUF
    if provider == "huggingface":
        rest = "/".join(rest.split("/")[-2:])
    elif provider not in (*_VLLM, *_OPENAI) or (provider in _OPENAI and not params.get("api_base")):
        return "a provider's service, and MuxServe serves models of its own machines; LiteLLM can stand before both"
    found = checkpoint(rest)
    return found or f"the file does not say which checkpoint `{rest}` is; add the model with `hub` or `path`"


def _deployment(reading: Reading, at: KeyPath, params: dict[str, Any], place: dict[str, str]) -> _Deployment:
    ((key, value),) = place.items()
    reading.take((*at, "litellm_params", "model"), f"{key}: {value}")
    result: dict[str, Any] = dict(place)
    most = params.get("max_parallel_requests")
    if isinstance(most, int) and most > 0:
        result["limits"] = {"max_concurrency": most}
        reading.take((*at, "litellm_params", "max_parallel_requests"), f"limits.max_concurrency: {most}; more wait")
    reading.take((*at, "model_name"), "name")
    weight = params.get("weight", 1)
    return _Deployment(result, weight if isinstance(weight, (int, float)) and weight > 0 else 1, at)


def _add(reading: Reading, name: str, deployments: list[_Deployment], shared: dict[str, dict[str, float]]) -> None:
    """Endpoints of one checkpoint are replicas of a model, and those of several are models that share the name."""
    checkpoints = dict.fromkeys(each.checkpoint for each in deployments)
    for place in checkpoints:
        own = [each for each in deployments if each.checkpoint == place]
        # Under another name it is there already.
        model = next((each for each in reading.models if place in (each.get("hub"), each.get("path"))), None)
        if model is None:
            called = name if len(checkpoints) == 1 else f"{name}-{place.rpartition('/')[2]}"
            model = reading.add(called, own[0].model | ({"replicas": len(own)} if len(own) > 1 else {}))
        if len(checkpoints) == 1:
            reading.call(model, name)
            continue
        shared.setdefault(name, {})[model["name"]] = sum(each.weight for each in own)
        for each in own:
            if "weight" in reading.data["model_list"][each.path[1]]["litellm_params"]:
                reading.take((*each.path, "litellm_params", "weight"), f"aliases.{name}")


def _keys(reading: Reading, fleet: dict[str, Any]) -> None:
    settings = reading.data.get("general_settings")
    key = settings.get("master_key") if isinstance(settings, dict) else None
    if isinstance(key, str) and key:
        fleet["gateway"] = {"api_keys": [_ENV.sub(r"env:\1", key)]}
        reading.take(("general_settings", "master_key"), "gateway.api_keys")


def _group_aliases(reading: Reading, shared: dict[str, dict[str, float]]) -> None:
    settings = reading.data.get("router_settings")
    given = settings.get("model_group_alias") if isinstance(settings, dict) else None
    for alias, target in given.items() if isinstance(given, dict) else ():
        at: KeyPath = ("router_settings", "model_group_alias", str(alias))
        name = target.get("model") if isinstance(target, dict) else target
        if name in reading.by_name:
            reading.call(reading.by_name[name], str(alias))
            reading.take(at, f"aliases of {reading.by_name[name]['name']}")
        elif name in shared:
            shared[str(alias)] = dict(shared[name])
            reading.take(at, "aliases")
        else:
            reading.leave(at, f"{name} was not taken")


def _fallbacks(reading: Reading) -> None:
    """The first fallback of each model that can be one: a model of the fleet, or an endpoint like OpenAI's."""
    for section in ("litellm_settings", "router_settings"):
        settings = reading.data.get(section)
        given = settings.get("fallbacks") if isinstance(settings, dict) else None
        for index, entry in enumerate(given if isinstance(given, list) else ()):
            for name, targets in entry.items() if isinstance(entry, dict) else ():
                at: KeyPath = (section, "fallbacks", index, str(name))
                model = reading.by_name.get(name)
                found = [each for target in targets or () if (each := _fallback(reading, target)) is not None]
                if model is None:
                    reading.leave(at, f"{name} is no model of the fleet")
                elif not found or found[0] == model["name"]:
                    reading.leave(at, "none of these is a model of the fleet, or an endpoint that speaks as OpenAI's")
                else:
                    model["fallback"] = found[0]
                    others = " (a model has one)" if len(targets) > 1 else ""
                    reading.take(at, f"fallback of {model['name']}{others}")


def _fallback(reading: Reading, target: object) -> str | dict[str, str] | None:
    if target in reading.by_name:
        return str(reading.by_name[str(target)]["name"])
    for entry in reading.data["model_list"]:
        params = entry.get("litellm_params") if isinstance(entry, dict) else None
        if not isinstance(params, dict) or entry.get("model_name") != target or "*" in str(params.get("model")):
            continue
        provider, given, model = str(params.get("model")).partition("/")
        url = params.get("api_base") or (_OPENAI_URL if provider == "openai" or not given else None)
        key = _ENV.fullmatch(str(params.get("api_key", "")))
        if isinstance(url, str) and (not given or provider in (*_VLLM, *_OPENAI)):
            # A key that stands in the file itself would stand in two.
            return {"url": url, "model": model or provider} | ({"key": f"env:{key[1]}"} if key else {})
    return None
