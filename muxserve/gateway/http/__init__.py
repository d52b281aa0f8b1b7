"""The endpoint: what clients send and what they are answered, over ASGI."""
