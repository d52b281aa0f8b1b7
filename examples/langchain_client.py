"""LangChain on a fleet: one model drafts, another one checks. Needs `pip install langchain-openai`.

python examples/langchain_client.py [--url http://127.0.0.1:8000/v1] [--drafter MODEL] [--checker MODEL] [QUESTION]
"""

from __future__ import annotations

import argparse
import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    """Ask the drafter, and show its answer to the checker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--drafter", default="atlas")
    parser.add_argument("--checker", default="frontdesk")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    options = parser.parse_args()
    key = os.environ.get("MUXSERVE_KEY", "none")

    def chain(model: str, template: str):
        prompt = ChatPromptTemplate.from_messages([("user", template)])
        return prompt | ChatOpenAI(base_url=options.url, api_key=key, model=model, max_tokens=64) | StrOutputParser()

    draft = chain(options.drafter, "{question}").invoke({"question": options.question})
    print(f"{options.drafter} > {draft}")
    check = chain(options.checker, "{question} Somebody says: {draft} Is that right?")
    print(f"{options.checker} > ", end="", flush=True)
    for piece in check.stream({"question": options.question, "draft": draft}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
