"""What is known of the pinned vLLM: its version, the arguments of engines and front ends, every internal relied on."""
