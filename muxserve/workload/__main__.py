"""`python -m muxserve.workload`: generate a trace.

Rates fall over the models by a power law, in the order in which they are named; arrivals are Poisson.
"""

from __future__ import annotations

import argparse
import sys

from muxserve.workload import LogNormalLengths, ModelLoad, TraceError, generate, power_law_rates, write_trace


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muxserve.workload", description="Generate a request trace.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names, most popular first")
    parser.add_argument("--out", required=True, help="file to write (.jsonl, or .jsonl.gz)")
    parser.add_argument("--rate", type=float, required=True, help="requests per second of all models together")
    parser.add_argument("--alpha", type=float, default=0.9, help="exponent of the power law (default 0.9)")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    for side, default in (("prompt", (60.0, 0.8, 8, 512)), ("output", (48.0, 0.6, 8, 192))):
        parser.add_argument(f"--{side}-median", type=float, default=default[0], help="tokens")
        parser.add_argument(f"--{side}-sigma", type=float, default=default[1], help="of the log-normal")
        parser.add_argument(f"--{side}-min", type=int, default=default[2], help="tokens")
        parser.add_argument(f"--{side}-max", type=int, default=default[3], help="tokens")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 for arguments that make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        rates = power_law_rates(options.models, options.rate, options.alpha)
        prompt = LogNormalLengths(options.prompt_median, options.prompt_sigma, options.prompt_min, options.prompt_max)
        output = LogNormalLengths(options.output_median, options.output_sigma, options.output_min, options.output_max)
        loads = {model: ModelLoad(rate, prompt, output) for model, rate in rates.items()}
        parameters: dict[str, object] = {
            "rates": {model: round(rate, 6) for model, rate in rates.items()},
            "alpha": options.alpha,
            "prompt": [prompt.median, prompt.sigma, prompt.low, prompt.high],
            "output": [output.median, output.sigma, output.low, output.high],
        }
        count = write_trace(
            options.out,
            options.models,
            generate(loads, options.duration, options.seed),
            duration=options.duration,
            about="Poisson arrivals, power-law rates, log-normal lengths (median, sigma, min, max)",
            seed=options.seed,
            parameters=parameters,
        )
    except TraceError as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write {options.out}: {error.strerror}")
    print(f"{count} requests over {options.duration:g} s in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
