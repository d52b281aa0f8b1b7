"""Small files of every public format, written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 02:00:01.009930+02:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
130,GPT-4,400,0,400,API log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 472, "output_length": 26, "hash_ids": [46]}
"""
OURS = """{"muxserve_trace":1,"models":["a"]}
[0,"a",1,1]
[1,"a",1,1]
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "one two three"},
            {"from": "gpt", "value": "four five six seven eight nine"},
            {"from": "human", "value": "ten"},
            {"from": "gpt", "value": "eleven twelve thirteen"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
    {"id": "c", "conversations": []},
    {"id": "d", "conversations": [{"from": "system", "value": "x y z"}, {"from": "gpt", "value": "二十五"}]},
]
LMSYS = [
    {
        "conversation_id": "1",
        "model": "vicuna-13b",
        "conversation": [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d e f g h i"}],
        "turn": 1,
        "tstamp": 1682351591.13,
    },
    {
        "conversation_id": "2",
        "model": "koala-13b",
        "conversation": [
            {"role": "user", "content": "a", "num_tokens": 7},
            {"role": "assistant", "content": "b", "num_tokens": 9},
        ],
        "tstamp": 1682351601.13,
    },
]


def write(path: Path, content: str | bytes | list[object]) -> Path:
    """Text as it is, lists as a JSON array; compressed where the name ends in `.gz`."""
    data = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else None
    if data is None:
        data = json.dumps(content, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def with_keys(path: Path, **keys: object) -> str:
    """A workload as it is written: the file, with keys for reading it."""
    words = {True: "true", False: "false"}
    text = ",".join(f"{key}={words[of] if isinstance(of, bool) else of}" for key, of in keys.items())
    return f"{path}:{text}" if text else str(path)
