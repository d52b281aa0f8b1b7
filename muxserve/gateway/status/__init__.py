"""What the gateway shows: `/fleet`, `/health`, metrics, traces and the live page."""
