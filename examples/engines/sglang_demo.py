"""SGLang with attnplug's attention and with its own, on one model with made-up weights: one table of their speeds.

python examples/engines/sglang_demo.py

It needs SGLang and an NVIDIA GPU, or small sizes and `--device cpu`. Each choice runs in a process of its own, one after
another; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import comparison

RUN = Path(__file__).with_name("sglang_run.py")
CHOICES = ("attnplug", "fa3", "triton")
SETTINGS = ("layers", "dense", "max_tokens", "rounds", "memory", "eager", "page_size", "device", "at_once")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 2 where it cannot run or no choice did, 1 where a choice failed."""
    parser = comparison.parser(__doc__.splitlines()[0])
    comparison.add_choices(
        parser, CHOICES, "attention backends of SGLang, such as flashinfer and attnplug_triton"
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--page-size", type=comparison.count, default=64, help="tokens of a page (default: %(default)s)"
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="start all choices together, and measure one after another; the GPU holds the weights of all",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.eager:
        parser.error("--device cpu has no CUDA graphs; give --eager too")
    names = {"run_file": RUN, "names": SETTINGS}
    return comparison.compare("sglang", options, **names, missing=missing(options))


def missing(options: argparse.Namespace) -> str | None:
    """A sentence that says what this machine lacks; None if the demo can run."""
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed; pip install sglang, on a machine with an NVIDIA GPU"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU here; give --device cpu --eager, and small sizes"
    return None


if __name__ == "__main__":
    sys.exit(main())
