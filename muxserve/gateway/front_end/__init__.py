"""vLLM's own front end of each model, over an engine client that hands requests to the units."""
