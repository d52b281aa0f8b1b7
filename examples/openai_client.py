"""OpenAI's own client on a fleet: every model is asked, and the answers stream.

python examples/openai_client.py [--url http://127.0.0.1:8000/v1] [--api-key KEY] [PROMPT]
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI


def main() -> None:
    """Ask each model of the fleet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default=os.environ.get("MUXSERVE_KEY", "none"))
    parser.add_argument("prompt", nargs="?", default="What can you do?")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key=options.api_key)
    for model in client.models.list():
        print(f"{model.id} > ", end="", flush=True)
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": options.prompt}],
            max_tokens=64,
            temperature=0,  # the likeliest answer; without it one is drawn
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n  {chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


if __name__ == "__main__":
    main()
