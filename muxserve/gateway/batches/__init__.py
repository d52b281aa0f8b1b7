"""Batches of requests in files (`/v1/files`, `/v1/batches`), which run when there is room."""
