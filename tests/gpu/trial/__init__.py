"""What fifteen minutes on a GPU are used for: `python -m tests.gpu.trial`, or `make gpu-trial`."""
