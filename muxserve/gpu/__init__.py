"""The control path's side of GPUs: discovery, the MPS server, SM shares, the memory budget. No torch, no vLLM."""
