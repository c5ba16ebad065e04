"""Random specs, devices and policies through select, explain, plan and JSON; run with a seed and a count.

Prints one digest of all answers, which must not depend on the hash seed of the process.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import attnplug
from attnplug import AttentionType, Decision, LayerSpec, Phase
from attnplug.core import MLADims, SparseSpec
from attnplug.errors import AttnplugError

NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    24,
    64,
    80,
    96,
    128,
    192,
    256,
    320,
    512,
    576,
    8192,
    2**30,
    2**31,
    2**64,
    -1,
    True,
    1.5,
]
DEVICES = [None, "cpu", "cuda", "sm70", "sm80", "sm89", "sm90", "sm100", "sm120", "rocm:9.4", "rocm", "mps", "xpu:1.0",
           "tpu", "h100", "", 3]  # fmt: skip
RULES = [None, "TORCH", "TRITON", "FLASH_ATTN", "FLASHINFER", "TORCH+TRITON", "FLASH_ATTN_4+FLASHINFER", "NOBODY", "",
         "sliding=TORCH", "TORCH,decode=TRITON", "decode=FLASH_ATTN", "A+B+C", "TORCH@attnplug", "TORCH@nobody", "x,",
         {"*": "TORCH"}, {"full": "TRITON"}, {"model.*": "TORCH"}, 5]  # fmt: skip
OPTIONS = [
    None,
    None,
    None,
    {"TORCH": {}},
    {"TORCH": {"x": 1}},
    {"TRITON": {"x": []}},
    {"FLASHINFER": None},
    3,
]
ASSUMED = [
    None,
    None,
    "all",
    {"flash-attn": "2.8.0"},
    {"flashinfer-python": "0.6.13", "triton": "3.6"},
    {"x": "y"},
    3,
]
PHASES = [None, None, *Phase, "mixed", 7]


def random_fields(draw: random.Random) -> dict[str, Any]:
    """Arguments of a LayerSpec, a few of which are odd."""
    kv_heads = draw.choice([1, 2, 4, 8, 8, 8])
    fields: dict[str, Any] = {
        "num_heads": kv_heads * draw.choice([1, 2, 4, 7, 16]),
        "num_kv_heads": kv_heads,
        "head_size": draw.choice([64, 80, 96, 128, 128, 192, 256, 512]),
    }
    extra: dict[str, list[Any]] = {
        "head_size_v": [None, 64, 128, 512],
        "dtype": ["float16", "bfloat16", "float32", "float64", "half"],
        "kv_cache_dtype": ["auto", "fp8", "fp8_e5m2", "bfloat16", "int8", "nvfp4", ""],
        "block_size": [None, 1, 16, 24, 128, 256],
        "attn_type": [*AttentionType, "encoder"],
        "causal": [None, True, False],
        "scale": [None, 0.1, 0.0, -1, float("nan"), 1e300],
        "window": [(-1, -1), (0, 0), (1023, 0), (-1, 5), (40, 40), (-2, 0), (2**40, 0), 5],
        "sliding_window": [None, 1, 1024, 0],
        "chunk_size": [None, 24, 8192, 2**30, 2**31 - 1],
        "logits_soft_cap": [None, 30.0, 0, "x"],
        "mla": [None, MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                              v_head_dim=128), 3],
        "sparse": [None, SparseSpec("token_topk", 2048), SparseSpec("block", 16, 64), True],
        "has_sinks": [False, True],
        "has_alibi": [False, True],
        "mm_prefix": [False, True],
        "direct_kv": [False, True],
        "needs_lse": [False, True, 1],
    }  # fmt: skip
    odd = draw.random() < 0.3
    for name in draw.sample(sorted(extra), draw.randrange(5)):
        # The first values of each list are the plain ones.
        fields[name] = draw.choice(extra[name] if odd else extra[name][:3])
    if odd and draw.random() < 0.5:
        fields[draw.choice(sorted(fields))] = draw.choice(NUMBERS)
    if fields.get("mla") and draw.random() < 0.8:
        fields |= {"num_kv_heads": 1, "head_size": 576}
        fields.pop("head_size_v", None)
    return fields


def ask(draw: random.Random) -> str:
    """One random question, and its answer or documented error as text."""
    odd = draw.random() < 0.3
    fields, device = (
        random_fields(draw),
        draw.choice(DEVICES if odd else ["cpu", "sm80", "sm90", "sm100", None]),
    )
    kwargs: dict[str, Any] = {
        "backend": draw.choice(RULES) if draw.random() < 0.3 else None,
        "options": draw.choice(OPTIONS) if odd else None,
        "assume_installed": draw.choice(ASSUMED) if odd else draw.choice([None, "all"]),
    }
    phase, name = draw.choice(PHASES if odd else [None, *Phase]), draw.choice([None, "model.layers.0"])
    kind = draw.choice(["select", "explain", "select_layers", "plan"])
    try:
        spec = LayerSpec(**fields)
        if LayerSpec.from_dict(spec.to_dict()) != spec:
            return "spec does not survive its dictionary"
        if kind == "plan":
            made = attnplug.plan({"model.0": spec}, device, per_phase=phase is not None, **kwargs)
            again = type(made).from_json(made.to_json())
            return str(made) if again.to_json() == made.to_json() else "plan does not survive JSON"
        if kind == "select_layers":
            decisions = [*attnplug.select_layers({"model.0": spec}, device, phase, **kwargs).values()]
        else:
            decisions = [getattr(attnplug, kind)(spec, device, phase, layer_name=name, **kwargs)]
        for decision in decisions:
            if Decision.from_json(decision.to_json()) != decision:
                return "decision does not survive JSON"
        return "\n".join(f"{decision}\n{decision.explanation()}" for decision in decisions)
    except AttnplugError as error:
        return f"{type(error).__name__}: {error}"


def main(seed: int, count: int) -> None:
    """Ask `count` questions; an error that is not attnplug's ends the process with its question."""
    draw, digest, errors = random.Random(seed), hashlib.sha256(), 0
    for number in range(count):
        state = draw.getstate()
        try:
            answer = ask(draw)
        except BaseException:
            draw.setstate(state)
            print(f"question {number} of seed {seed}: {random_fields(draw)}", file=sys.stderr)
            raise
        if "does not survive" in answer:
            raise SystemExit(f"question {number} of seed {seed}: {answer}")
        errors += answer.partition(":")[0].endswith("Error")
        digest.update(answer.encode())
    print(digest.hexdigest(), errors)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
