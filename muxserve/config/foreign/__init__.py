"""Configuration files of other gateways, read into a fleet file: `muxserve import`.

- `reading`: a file whose every key is said to be taken or not
- `command_line`: the command that starts an engine
- `llama_swap`, `litellm`: one reader for each format
- `imported`: which format a file has, and the fleet file
"""
