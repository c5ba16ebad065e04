"""vLLM with its own attention and with attnplug's, on one model with made-up weights: one table of their speeds.

python examples/engines/vllm_demo.py

It needs vLLM and an NVIDIA GPU. Each choice runs in a process of its own, one after another; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import comparison

RUN = Path(__file__).with_name("vllm_run.py")
CHOICES = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "ATTNPLUG")
SETTINGS = ("layers", "dense", "max_tokens", "rounds", "memory", "eager", "ranks", "at_once")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 2 where it cannot run or no choice did, 1 where a choice failed."""
    parser = comparison.parser(__doc__.splitlines()[0])
    comparison.add_choices(parser, CHOICES, "attention backends of vLLM")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    at_once = "start all choices together, and measure one after another; the GPU holds the weights of all"
    parser.add_argument("--at-once", action="store_true", help=at_once)
    about = "so many GPUs share the tokens of each request, and each has a part of the query heads"
    parser.add_argument(
        "--ranks",
        type=comparison.count,
        default=1,
        help=f"{about}; the model then has one KV head (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    return comparison.compare("vllm", options, run_file=RUN, names=SETTINGS, missing=missing(options.ranks))


def missing(ranks: int = 1) -> str | None:
    """A sentence that says what this machine lacks; None if the demo can run."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed; pip install vllm, on a machine with an NVIDIA GPU"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU here, and vLLM's own backends need one"
    if torch.cuda.device_count() < ranks:
        return f"--ranks {ranks} needs as many GPUs, and torch finds {torch.cuda.device_count()} here"
    return None


if __name__ == "__main__":
    sys.exit(main())
