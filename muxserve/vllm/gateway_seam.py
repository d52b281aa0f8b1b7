"""What the gateway does in one way with one version of vLLM and in another way with the next."""

from __future__ import annotations

from muxserve.vllm.since import since

if since("0.33.0"):
    from vllm.entrypoints.common.cli_args import FrontendArgs, make_arg_parser
    from vllm.renderers.chat_utils.chat_template import _cached_load_chat_template as chat_templates
else:
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
    from vllm.renderers.chat_utils import _cached_load_chat_template as chat_templates

__all__ = ["FrontendArgs", "chat_templates", "make_arg_parser"]
