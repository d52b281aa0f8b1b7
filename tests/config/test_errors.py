"""Every mistake is told with the line on which it stands, and all of them at once."""

# ruff: noqa: E501 -- one case, one line

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.config import Fleet, FleetError, parse_fleet
from tests.support.checkpoint_files import write_checkpoint, write_safetensors

CERT, OTHER = (Path(__file__).parents[1] / "support/certificates" / name for name in ("first", "second"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name)
    # One directory can be both.
    (tmp_path / "b/adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    write_safetensors(tmp_path / "b/adapter_model.safetensors")
    return tmp_path


def problems(text: str, base: Path, **environ: str) -> list[str]:
    with pytest.raises(FleetError) as caught:
        parse_fleet(text, "fleet.yaml", base, environ)
    return [str(problem) for problem in caught.value.problems]


def good(text: str, base: Path, **environ: str) -> Fleet:
    return parse_fleet(text, "fleet.yaml", base, environ)


ONE = "models:\n  - name: one\n    path: a\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "fleet.yaml:1: the file is empty; it needs at least `models:`"),
        ("- 1\n", "fleet.yaml:1: must be a mapping with `models:`, not a list"),
        ("just words\n", "fleet.yaml:1: must be a mapping with `models:`, not the text 'just words'"),
        ("models: [\n", "fleet.yaml:2: not valid YAML"),
        ("a: b: c\n", "fleet.yaml:1: not valid YAML"),
        ("models: *nothing\n", "fleet.yaml:1: not valid YAML"),
        ("models: !!python/object/apply:os.system ['true']\n", "fleet.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "fleet.yaml:2: not valid YAML"),
        ("policy: adbs\n", "fleet.yaml:1: models: is required"),
        (
            "models:\n  - name: no\n    hub: x/y\n",
            "fleet.yaml:2: models[0].name: is a text that YAML takes for true or false (as yes, no, on and off are): "
            "put it in quotes",
        ),
        (
            f"{ONE}    aliases: [gpt-4o, one]\n",
            "fleet.yaml:4: models[0].aliases[1]: 'one' is already the name of the model on line 2",
        ),
        (
            f"{ONE}    aliases: [a b]\n",
            "fleet.yaml:4: models[0].aliases[0]: must be letters, digits, '.', '_', ':', '/' and '-' only, at most "
            "128: 'a b'",
        ),
        (
            f"gateway:\n  cors_origins: [example.org]\n{ONE}",
            'fleet.yaml:2: gateway.cors_origins[0]: must be "*" or an origin such as "https://chat.example.org", without '
            "a path, not 'example.org'",
        ),
        ("models: []\n", "fleet.yaml:1: models: needs at least one entry"),
        ("models: one\n", "fleet.yaml:1: models: must be a list, not the text 'one'"),
        ("models:\n", "fleet.yaml:1: models: must be a list, not empty"),
        (f"policy: adsb\n{ONE}", "fleet.yaml:1: policy: must be one of adbs, slack, free, fcfs, not 'adsb'; did you mean \"adbs\"?"),
        (f"polizy: adbs\n{ONE}", 'fleet.yaml:1: polizy: unknown key; did you mean "policy"?'),
        (f"port: 80\n{ONE}", "fleet.yaml:1: port: unknown key; `port` belongs under `gateway`"),
        (
            "models:\n  - name: one\n    hub: https://huggingface.co/org/name\n",
            "fleet.yaml:3: models[0].hub: must be a hub id such as org/name, not the address "
            "'https://huggingface.co/org/name'; write `hub: org/name`",
        ),
        (
            "models:\n  - name: one\n    hub: ftp://x\n",
            "fleet.yaml:3: models[0].hub: must be a hub id such as org/name, not the address 'ftp://x'",
        ),
        (f"quux: 80\n{ONE}", "fleet.yaml:1: quux: unknown key; known here: cluster, policy, memory, kv_pool, gateway, tenants, aliases, priorities, migration, dispatch, watchdog, models, include, model_defaults"),
        (f"cluster:\n  gpu: 1\n{ONE}", 'fleet.yaml:2: cluster.gpu: unknown key; did you mean "gpus"?'),
        (f"cluster: many\n{ONE}", 'fleet.yaml:1: cluster: must be auto, or a mapping such as "{cores: 2}", not \'many\''),
        (f"cluster: {{cores: 0}}\n{ONE}", "fleet.yaml:1: cluster.cores: must be a whole number of at least 1, or auto, not 0"),
        (f"cluster: {{gpus: 1, gpu_ids: [0, 1]}}\n{ONE}", "fleet.yaml:1: cluster.gpu_ids: names 2, but `gpus` says 1; leave that out, or make it match"),
        (f"cluster: {{gpu_ids: [0, 0]}}\n{ONE}", "fleet.yaml:1: cluster.gpu_ids: names a GPU twice"),
        (f"cluster: {{gpu_ids: 0}}\n{ONE}", "fleet.yaml:1: cluster.gpu_ids: must be a list of GPUs by number or UUID, such as [0, 1]"),
        (f"cluster: {{gpu_ids: [GPU-1]}}\n{ONE}", "fleet.yaml:1: cluster.gpu_ids: must be a list of GPUs by number or UUID, such as [0, 1]"),
        (f"cluster: {{gpus: 2, ranks: 2}}\n{ONE}", "fleet.yaml:1: cluster.ranks: is for CPU; with GPUs every model of a unit is split over all of the unit's GPUs"),
        (f"cluster: {{gpus: 1, gpu_memory: 1.2}}\n{ONE}", "fleet.yaml:1: cluster.gpu_memory: must be at most 0.99, not 1.2"),
        (f"cluster: {{gpus: 1, mps: yes please}}\n{ONE}", "fleet.yaml:1: cluster.mps: must be one of auto, on, off, not 'yes please'"),
        (f"cluster: {{decode_first: true}}\n{ONE}", "fleet.yaml:1: cluster.decode_first: is no longer a key; remove it"),
        (f"cluster:\n  gpus: 1\n  sm_sharing: green_contexts\n  mps: off\n{ONE}", "fleet.yaml:4: cluster.mps: green contexts of different processes compute at the same time under MPS only"),
        (f"{ONE}    sm: {{decode: 0}}\n", "fleet.yaml:4: models[0].sm.decode: must be more than 0, not 0"),
        (f"{ONE}    sm: {{decode: 60}}\n", "fleet.yaml:4: models[0].sm.decode: must be at most 1, not 60"),
        (f"kv_pool: {{size: 12XB}}\n{ONE}", "fleet.yaml:1: kv_pool.size: must be a size such as 512MiB or 2GiB, not '12XB' (or auto)"),
        (f"kv_pool: {{size: -5}}\n{ONE}", "fleet.yaml:1: kv_pool.size: must be larger than zero, not -5 (or auto)"),
        (f"kv_pool: 1GiB\n{ONE}", "fleet.yaml:1: kv_pool: must be a mapping, not the text '1GiB'"),
        (f"gateway:\n  port: 70000\n{ONE}", "fleet.yaml:2: gateway.port: must be at most 65535, not 70000"),
        (f"gateway:\n  port: '8000'\n{ONE}", "fleet.yaml:2: gateway.port: must be a whole number, not the text '8000'"),
        (f"gateway:\n  drain_seconds: soon\n{ONE}", "fleet.yaml:2: gateway.drain_seconds: must be a number of s or a duration"),
        (f"gateway:\n  api_keys: [env:NOT_THERE]\n{ONE}", "fleet.yaml:2: gateway.api_keys[0]: the environment variable NOT_THERE is not set; export it, or remove the key"),
        (f"gateway:\n  api_keys: env:EMPTY\n{ONE}", "fleet.yaml:2: gateway.api_keys: the environment variable EMPTY is not set"),
        (f"gateway:\n  api_keys: ['']\n{ONE}", "fleet.yaml:2: gateway.api_keys[0]: must not be empty"),
        (f"gateway:\n  api_keys: [1234]\n{ONE}", "fleet.yaml:2: gateway.api_keys[0]: must be a text, or a mapping such as"),
        (f"gateway:\n  api_keys: ['a b ']\n{ONE}", "fleet.yaml:2: gateway.api_keys[0]: a key must be printable ASCII"),
        (f"gateway:\n  api_keys:\n    - {{key: ''}}\n{ONE}", "fleet.yaml:3: gateway.api_keys[0].key: must not be empty"),
        (f"gateway:\n  api_keys:\n    - {{priority: high}}\n{ONE}", "fleet.yaml:3: gateway.api_keys[0].key: is required"),
        (f"gateway:\n  api_keys:\n    - {{key: k, priority: hihg}}\n{ONE}", "fleet.yaml:3: gateway.api_keys[0].priority: there is no priority level 'hihg'; did you mean \"high\"?"),
        (f"gateway:\n  api_keys:\n    - k\n    - {{key: k, priority: high}}\n{ONE}", "fleet.yaml:4: gateway.api_keys[1].key: this key has another priority on line 3; keep one of the two"),
        (f"gateway:\n  api_keys: file:not-there\n{ONE}", "not-there has no key, or cannot be read; write one in each line"),
        (f"tenants:\n  a:\n    keys: [secret]\n{ONE}", "fleet.yaml:3: tenants.a.keys[0]: must say where the key is, \"env:NAME\" or \"file:PATH\", and never be the key itself"),
        (f"tenants:\n  a: {{keys: [env:NOT_THERE]}}\n{ONE}", "fleet.yaml:2: tenants.a.keys[0]: the environment variable NOT_THERE is not set"),
        (f"tenants:\n  a:\n    keys: []\n{ONE}", "fleet.yaml:2: tenants.a: has no keys, and nobody could make some"),
        (f"tenants:\n  a: {{keys: [env:SET], models: [oen]}}\n{ONE}", "fleet.yaml:2: tenants.a.models[0]: there is no model 'oen'; did you mean \"one\"?"),
        (f"tenants:\n  a: {{keys: [env:SET], priority: hihg}}\n{ONE}", "fleet.yaml:2: tenants.a.priority: there is no priority level 'hihg'; did you mean \"high\"?"),
        (f"tenants:\n  a: {{keys: [env:SET]}}\n  b: {{keys: [env:SET]}}\n{ONE}", "fleet.yaml:3: tenants.b.keys[0]: line 2 has this key, too; it can belong to one tenant only"),
        (f"aliases: {{chat: {{oen: 1}}}}\n{ONE}", "fleet.yaml:1: aliases.chat.oen: there is no model 'oen'; did you mean \"one\"?"),
        (f"aliases: {{chat: oen}}\n{ONE}", "fleet.yaml:1: aliases.chat: there is no model 'oen'; did you mean \"one\"?"),
        (f"aliases: {{one: {{one: 1}}}}\n{ONE}", "fleet.yaml:1: aliases.one: a model or an adapter has the name 'one' already"),
        (f"aliases: {{chat: {{one: 0}}}}\n{ONE}", "fleet.yaml:1: aliases.chat: no model has a part of its requests; one weight must be more than 0"),
        (f"aliases: {{chat: {{one: -1}}}}\n{ONE}", "fleet.yaml:1: aliases.chat.one: must be at least 0, not -1"),
        (f"aliases: {{chat: {{}}}}\n{ONE}", "fleet.yaml:1: aliases.chat: needs at least one entry"),
        (f"aliases: {{chat: 3}}\n{ONE}", "fleet.yaml:1: aliases.chat: must be a model's name, or models with weights such as"),
        (f"aliases: {{'a b': one}}\n{ONE}", "fleet.yaml:1: aliases.a b: must be letters, digits, '.', '_', ':', '/' and '-' only, at most 128: 'a b'"),
        (f"gateway: {{responses: /not/there}}\n{ONE}", "fleet.yaml:1: gateway.responses: responses cannot be kept in /not/there"),
        (f"gateway: {{tls: {{cert: {CERT}.pem}}}}\n{ONE}", "fleet.yaml:1: gateway.tls.key: is required"),
        (f"gateway: {{tls: {{cert: gone.pem, key: {CERT}.key}}}}\n{ONE}", "gone.pem is not there, or cannot be read"),
        (f"gateway: {{tls: {{cert: {CERT}.pem, key: {OTHER}.key}}}}\n{ONE}", "fleet.yaml:1: gateway.tls: the key is not that of the certificate"),
        (f"gateway: {{tls: {{cert: {CERT}.pem, key: a/config.json}}}}\n{ONE}", "fleet.yaml:1: gateway.tls: one of the two files is no PEM file"),
        (f"gateway: {{responses: 3}}\n{ONE}", "fleet.yaml:1: gateway.responses: must be on, off or a file, not 3"),
        (f"gateway: {{responses: {{file: a, keep: 2h}}}}\n{ONE}", "fleet.yaml:1: gateway.responses: is on, off or a file: write its `file` here; 256 MiB of answers are kept, for 30 days"),
        (f"gateway: {{structured_output: {{workers: 2}}}}\n{ONE}", "fleet.yaml:1: gateway.structured_output: is no longer a key; remove it"),
        (f"gateway: {{usage_file: /not/there}}\ntenants:\n  a: {{keys: [env:SET]}}\n{ONE}", "fleet.yaml:1: gateway.usage_file: what tenants used cannot be kept in /not/there"),
        (f"tenants: {{a b: {{keys: [env:SET]}}}}\n{ONE}", "fleet.yaml:1: tenants.a b: must be letters, digits"),
        (f"gateway: {{count: 0}}\n{ONE}", "fleet.yaml:1: gateway.count: must be at least 1, not 0"),
        (f"{ONE}    replicas: 0\n", "fleet.yaml:4: models[0].replicas: must be a whole number of at least 1, or a mapping such as \"{min: 1, max: 4}\", not 0; a model that may have none is {min: 0, max: 1}"),
        (f"{ONE}    replicas: many\n", "fleet.yaml:4: models[0].replicas: must be a whole number of at least 1, or a mapping"),
        (f"{ONE}    replicas: {{min: 1}}\n", "fleet.yaml:4: models[0].replicas.max: is required"),
        (f"{ONE}    replicas: {{min: 3, max: 2}}\n", "fleet.yaml:4: models[0].replicas.min: 3 are more than max (2)"),
        (f"{ONE}    replicas: {{max: 2, start: 3}}\n", "fleet.yaml:4: models[0].replicas.start: 3 is not between min (1) and max (2)"),
        (f"{ONE}    replicas: {{max: 2, high: 160}}\n", "fleet.yaml:4: models[0].replicas.high: is no longer a key; remove it: a replica goes above a freeness of 960 tokens per request"),
        (f"{ONE}    replicas: {{max: 2, wake: 0}}\n", "fleet.yaml:4: models[0].replicas.wake: must be more than 0, not 0"),
        (f"{ONE}    replicas: {{max: 2, mim: 0}}\n", 'fleet.yaml:4: models[0].replicas.mim: unknown key; did you mean "min"?'),
        (f"priorities: {{}}\n{ONE}", "fleet.yaml:1: priorities: needs at least one entry"),
        (f"priorities: {{a b: {{rank: 1}}, normal: {{rank: 0}}}}\n{ONE}", "fleet.yaml:1: priorities.a b: must be letters, digits"),
        (f"priorities:\n  normal: {{rank: 1}}\n  gold: {{rank: 1}}\n{ONE}", "fleet.yaml:3: priorities.gold.rank: 'normal' has rank 1, too; which of them goes first must be clear"),
        (f"priorities:\n  gold: {{rank: 1}}\n{ONE}", "fleet.yaml:1: priorities: needs `normal`, the level of requests that name none"),
        (f"model_defaults: {{batching: fixed}}\n{ONE}", "fleet.yaml:1: model_defaults.batching: is no longer a key; remove it"),
        (f"default_priority: gold\n{ONE}", "fleet.yaml:1: default_priority: is no longer a key; remove it, and call the level of requests that name none `normal`"),
        (f"priorities:\n  normal: {{rank: 1, target: 3}}\n{ONE}", 'fleet.yaml:2: priorities.normal.target: unknown key; did you mean "target_load"?'),
        (f"migration: maybe\n{ONE}", "fleet.yaml:1: migration: must be on, off, or a mapping"),
        (f"migration: {{source_below: 200}}\n{ONE}", "fleet.yaml:1: migration.source_below: is no longer a key; remove it"),
        (f"migration: {{models: on}}\n{ONE}", "fleet.yaml:1: migration.models: is no longer a key; remove it"),
        (f"memory: {{hibernate: auto}}\n{ONE}", "fleet.yaml:1: memory.hibernate: is no longer a key; remove it: a model that is woken is loaded again"),
        (f"memory: {{decode_niceness: 3}}\n{ONE}", "fleet.yaml:1: memory.decode_niceness: is no longer a key; remove it"),
        (f"watchdog: maybe\n{ONE}", "fleet.yaml:1: watchdog: must be on or off, not 'maybe'"),
        (f"watchdog: {{suspect: 20s}}\n{ONE}", "fleet.yaml:1: watchdog: is on or off; a silent process gets no work after 3 s and is killed after 10 s"),
        (f"migration: {{bandwidth: fast}}\n{ONE}", "fleet.yaml:1: migration.bandwidth: must be a size such as 512MiB or 2GiB, not 'fast'"),
        (f"cluster: {{launcher: slurm}}\n{ONE}", "fleet.yaml:1: cluster.launcher: must be one of local, ray, not 'slurm'"),
        (f"cluster: {{ray: {{address: auto}}}}\n{ONE}", "fleet.yaml:1: cluster.ray: is for `launcher: ray` only; set that, or leave this out"),
        ("models:\n  - path: a\n", "fleet.yaml:2: models[0].name: is required"),
        ("models:\n  - name: a/b\n    path: a\n", "fleet.yaml:2: models[0].name: must be letters, digits"),
        ("models:\n  - name: one\n", "fleet.yaml:2: models[0]: needs `path` (a checkpoint directory) or `hub` (a Hugging Face hub id)"),
        ("models:\n  - name: one\n    path: a\n    hub: x/y\n", "fleet.yaml:4: models[0].hub: give either `path` or `hub`, not both"),
        ("models:\n  - name: one\n    hub: x/y/z\n", "fleet.yaml:3: models[0].hub: must be a hub id such as org/name, not 'x/y/z'"),
        ("models:\n  - name: one\n    path: nowhere\n", "nowhere does not exist"),
        ("models:\n  - name: one\n    path: org/name\n", "org/name does not exist; if it is a hub id, write `hub: org/name`"),
        ("models:\n  - name: one\n    path: a/config.json\n", "is a file; give the directory that holds config.json"),
        (f"{ONE}    rate: 0\n", "fleet.yaml:4: models[0].rate: must be more than 0, not 0"),
        (f"{ONE}    rate: -1.5\n", "fleet.yaml:4: models[0].rate: must be more than 0, not -1.5"),
        (f"{ONE}    rate: .nan\n", "fleet.yaml:4: models[0].rate: must be a finite number, not nan"),
        (f"{ONE}    rate: often\n", "fleet.yaml:4: models[0].rate: must be a number, not the text 'often'"),
        (f"{ONE}    max_num_seqs: 2.5\n", "fleet.yaml:4: models[0].max_num_seqs: must be a whole number of at least 1, or auto, not 2.5"),
        (f"{ONE}    prefix_caching: 'on'\n", "fleet.yaml:4: models[0].prefix_caching: must be true or false, not the text 'on'"),
        (f"{ONE}    slo:\n      ttft_ms: 0\n", "fleet.yaml:5: models[0].slo.ttft_ms: must be more than 0, not 0"),
        (f"{ONE}    slo: {{ttft: 5}}\n", 'fleet.yaml:4: models[0].slo.ttft: unknown key; did you mean "ttft_ms"?'),
        (f"{ONE}    limits: {{max_wait: 0}}\n", "fleet.yaml:4: models[0].limits.max_wait: must be more than 0 (or auto, or none), not 0"),
        (f"{ONE}    limits: {{max_wait: soon}}\n", "fleet.yaml:4: models[0].limits.max_wait: must be a number of s or a duration such as 500ms, 30s or 2m, not 'soon' (or auto, or none)"),
        (f"{ONE}    max_queue: 5\n", "fleet.yaml:4: models[0].max_queue: unknown key; `max_queue` belongs under `models.limits`"),
        (f"{ONE}    max_num_seqs: 64\n    max_num_batched_tokens: 32\n", "fleet.yaml:5: models[0].max_num_batched_tokens: one step must have room"),
        (f"{ONE}    engine_args: {{max_model_len: 5}}\n", "fleet.yaml:4: models[0].engine_args.max_model_len: is set by `max_len` of the model; move it there"),
        (f"{ONE}    engine_args: {{speculative_config: {{method: ngram}}}}\n", 'fleet.yaml:4: models[0].engine_args.speculative_config: needs num_speculative_tokens'),
        (f"{ONE}    engine_args: {{speculative_config: ngram}}\n", "fleet.yaml:4: models[0].engine_args.speculative_config: must be a mapping like {method: ngram, num_speculative_tokens: 3}, not 'ngram'"),
        (f"{ONE}    kv: pool\n    engine_args: {{speculative_config: {{method: eagle, num_speculative_tokens: 2}}}}\n", "fleet.yaml:5: models[0].engine_args.speculative_config.method: method must be ngram with `kv: pool`, not 'eagle': a draft"),
        (f"{ONE}    kv: pool\n    engine_args: {{speculative_config: {{num_speculative_tokens: 2}}}}\n", 'fleet.yaml:5: models[0].engine_args.speculative_config: method must be ngram with `kv: pool`, not left out'),
        (f"{ONE}    engine_args: {{speculative_config: {{method: ngram, num_speculative_tokens: 0}}}}\n", 'fleet.yaml:4: models[0].engine_args.speculative_config.num_speculative_tokens: must be a whole number from 1 to 16, not 0'),
        (f"{ONE}    engine_args: {{speculative_config: {{method: ngram, num_speculative_tokens: 2, prompt_lookup_min: 5, prompt_lookup_max: 2}}}}\n", 'fleet.yaml:4: models[0].engine_args.speculative_config.prompt_lookup_min: must not be above prompt_lookup_max, 2'),
        (f"{ONE}    engine_args: {{speculative_config: {{method: ngram, num_speculative_tokens: 2, model: x}}}}\n", 'fleet.yaml:4: models[0].engine_args.speculative_config.model: is not known here; ngram has method, num_speculative_tokens'),
        (f"{ONE}    engine_args: {{async_scheduling: true, speculative_config: {{method: ngram, num_speculative_tokens: 2}}}}\n", 'fleet.yaml:4: models[0].engine_args.speculative_config: cannot be had together with async_scheduling'),
        (f"{ONE}    engine_args: {{spec_method: ngram}}\n", 'fleet.yaml:4: models[0].engine_args.spec_method: is part of `speculative_config: {method: ngram, ...}`; write that'),
        (f"{ONE}    stages: 2\n    engine_args: {{speculative_config: {{method: ngram, num_speculative_tokens: 2}}}}\n", "fleet.yaml:5: models[0].engine_args.speculative_config: cannot be had with several stages or `dispatch: rolling`, whose steps have one token of each sequence; remove one of the two"),
        (f"{ONE}    engine_args: {{enable_lora: true}}\n", "fleet.yaml:4: models[0].engine_args.enable_lora: is what `adapters` of the model is for"),
        (f"{ONE}    adapters: {{one: b}}\n", "fleet.yaml:4: models[0].adapters.one: 'one' is already the name of the model on line 2"),
        (f"{ONE}    engine_args: {{async_scheduling: 1}}\n", "fleet.yaml:4: models[0].engine_args.async_scheduling: must be true or false, not 1"),
        (f"{ONE}    stages: 2\n    engine_args: {{async_scheduling: true}}\n", "fleet.yaml:5: models[0].engine_args.async_scheduling: cannot be had with several stages"),
        (f"{ONE}    engine_args: {{worker_cls: x}}\n", "fleet.yaml:4: models[0].engine_args.worker_cls: is decided by MuxServe"),
        (f"{ONE}    engine_args: {{trust_remote_cod: x}}\n", 'vLLM has no such option; did you mean "trust_remote_code"?'),
        (f"{ONE}    engine_args: {{1: x}}\n", "fleet.yaml:4: models[0].engine_args.1: must be a text, not 1"),
        (f"{ONE}    rate: 1\n    rate: 2\n", "fleet.yaml:5: models[0].rate: given twice (first on line 4); keep one"),
    ],
)  # fmt: skip
def test_one_mistake(text: str, expected: str, base: Path) -> None:
    found = problems(text, base, EMPTY=" ", SET="a-key")
    assert len(found) == 1, found
    assert expected in found[0]


def test_all_mistakes_at_once_in_the_order_of_the_file(base: Path) -> None:
    text = """\
polici: adbs
gateway:
  prot: 80
models:
  - name: one
    path: a
    rate: none
  - name: one
    path: gone
  - 7
"""
    assert [problem.split(": ")[0] for problem in problems(text, base)] == [
        "fleet.yaml:1",
        "fleet.yaml:3",
        "fleet.yaml:7",
        "fleet.yaml:8",
        "fleet.yaml:9",
        "fleet.yaml:10",
    ]


def test_a_duplicate_name_points_to_the_first(base: Path) -> None:
    text = "models:\n  - {name: one, path: a}\n  - {name: two, path: b}\n  - name: one\n    path: b\n"
    assert problems(text, base) == ["fleet.yaml:4: models[2].name: 'one' is already the name of the model on line 2"]


def test_a_directory_without_weights(base: Path) -> None:
    (base / "a/model.safetensors").unlink()
    assert "has no weights (*.safetensors)" in problems(ONE, base)[0]
    assert good(f"{ONE}    engine_args: {{load_format: dummy}}\n", base).models[0].name == "one"


@pytest.mark.parametrize(
    ("file", "kind"), [("m.Q4_K_M.gguf", "GGUF"), ("consolidated.00.pth", "pth"), ("model.onnx", "ONNX")]
)
def test_weights_that_vllm_cannot_load(base: Path, file: str, kind: str) -> None:
    (base / "a/model.safetensors").unlink()
    (base / "a" / file).touch()
    (problem,) = problems(ONE, base)
    assert problem.startswith("fleet.yaml:")
    assert "models[0].path" in problem
    assert kind in problem
    assert "safetensors" in problem


def test_a_gguf_file_given_for_a_directory_or_a_format(base: Path) -> None:
    (base / "m.gguf").touch()
    assert "GGUF" in problems("models:\n  - {name: one, path: m.gguf}\n", base)[0]
    assert "GGUF" in problems("models:\n  - {name: one, hub: 'some/model:Q4_K_M'}\n", base)[0]
    for option in ("load_format", "quantization"):
        (problem,) = problems(f"{ONE}    engine_args: {{{option}: gguf}}\n", base)
        assert option in problem
        assert "cannot load gguf" in problem


def test_an_anchor_that_contains_itself_is_refused(base: Path) -> None:
    assert problems("models: &m\n  - *m\n", base)


def test_aliases_that_multiply_are_refused(base: Path) -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "repeated too often" in "".join(problems("\n".join(["l0: &l0 [1]", *levels]), base))


@pytest.mark.parametrize(
    "options",
    [
        "{async_scheduling: true}",
        "{speculative_config: {method: ngram, num_speculative_tokens: 2}}",
        "{async_scheduling: true, speculative_config: {method: mtp, num_speculative_tokens: 1}}",
    ],
)
def test_one_engine_with_a_cache_of_its_own_has_what_stock_vllm_has(options: str, base: Path) -> None:
    text = f"{ONE}    engines: one\n    kv: private\n    engine_args: {options}\n"
    assert good(text, base).models[0].engine_args


def test_a_kv_cache_of_a_type_that_pages_cannot_have(base: Path) -> None:
    assert good(f"{ONE}    engine_args: {{kv_cache_dtype: fp8}}\n", base).models[0].name == "one"
    (problem,) = problems(f"{ONE}    engine_args: {{kv_cache_dtype: nvfp4}}\n", base)
    assert "engine_args.kv_cache_dtype: must be one of auto, fp8, fp8_e4m3, fp8_e5m2, not 'nvfp4'" in problem
