"""Serves random mixed steps on TORCH, TRITON and FLEX with routes; prints the backends that ran.

The oracle checks each layer of each step.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from model_layers import layer
from served_model import ServedModel

import attnplug
from attnplug.core import BuilderConfig
from attnplug.core.impl import AttentionImpl

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "plugins" / "attnplug-flex"))
import attnplug_flex

NAME = (
    "TORCH+TRITON[prefill query ..20 on TRITON; draft on FLEX; mixed requests ..3 rows ..24 on FLEX; "
    "prefill requests 2.. on FLEX]"
)


def main() -> None:
    attnplug.register(attnplug_flex, "flex")
    specs = {
        "full": layer(dtype="float32", head_size=16),
        "window": layer(dtype="float32", head_size=16, sliding_window=9),
    }
    model = ServedModel(
        specs,
        max_model_len=128,
        config=BuilderConfig(max_num_seqs=8, max_num_batched_tokens=128, num_speculative_tokens=2),
        backend=NAME,
    )
    ran: set[str] = set()
    for each in model.runtime.layers.values():
        for impl in each.impl.members.values():  # type: ignore[attr-defined]
            impl.attend = _noted(impl, ran)
    draw, done = random.Random(5), dict.fromkeys("abcd", 0)
    for name in done:
        model.add(name)
    for _ in range(18):
        scheduled = {}
        for name in draw.sample(sorted(done), draw.randint(1, 4)):
            count = draw.choice([1, 1, 3, 19, 30])
            if done[name] + count > 120:
                model.remove(name)
                model.add(name)
                done[name] = 0
            scheduled[name] = count
            done[name] += count
        model.step(**scheduled)
    print(*sorted(ran))


def _noted(impl: AttentionImpl, ran: set[str]):
    right = impl.attend

    def attend(*args, **kwargs):
        ran.add(impl.backend.get_name())
        return right(*args, **kwargs)

    return attend


if __name__ == "__main__":
    main()
