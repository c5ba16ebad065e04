"""vllm_run.py on a CPU, with ranks that share the tokens of each request; run by test_vllm_engine.py.

python served_ranks.py CHOICE is as vllm_run.py, with its settings on standard input. Ranks exchange over gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path

import vllm_on_cpu

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "engines"))
import vllm_run

if __name__ == "__main__":
    vllm_on_cpu.prepare()
    vllm_on_cpu.prepare_ranks()
    vllm_on_cpu.prepare_latents()
    vllm_run.main()
