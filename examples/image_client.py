"""OpenAI's own client asks a model of the fleet about a picture, which goes with the request as a data URL.

python examples/image_client.py [--url http://127.0.0.1:8000/v1] [--api-key KEY] [--model NAME] FILE [QUESTION]
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Ask about the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default=os.environ.get("MUXSERVE_KEY", "none"))
    parser.add_argument("--model", default="viewer")
    parser.add_argument("file", type=Path)
    parser.add_argument("question", nargs="?", default="What is it?")
    options = parser.parse_args()

    kind = mimetypes.guess_type(options.file)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(options.file.read_bytes()).decode()}"
    client = OpenAI(base_url=options.url, api_key=options.api_key)
    answer = client.chat.completions.create(
        model=options.model,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": options.question},
                ],
            }
        ],
        max_tokens=64,
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
