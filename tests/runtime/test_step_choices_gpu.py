"""On a GPU: random steps that a composite divides among kernels equal the oracle, and each step runs on its member."""

from __future__ import annotations

import random
from typing import Any

import pytest
from served_model import ServedModel

import attnplug
from attnplug.core import BuilderConfig, Device, LayerSpec
from attnplug.testing.conformance.builders.step_members import expected_members

pytestmark = pytest.mark.gpu

SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128, dtype="bfloat16")
LONGEST = 600
NAMES = (
    (
        "FLASH_ATTN_4+TRITON[mixed requests 2..3 rows ..300 on FLASH_ATTN_4; prefill query ..100 on TRITON; "
        "draft on FLASH_ATTN_4]"
    ),
    "FLASH_ATTN_4+FLASHINFER[draft on TRITON; prefill query ..100 on TRITON; decode requests ..2 on TRITON]",
    "TRITON+FLASHINFER[mixed on TRITON; decode requests 3.. on TRITON]",
    "TORCH+TRITON[prefill query ..100 on TRITON; draft on TORCH]",
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.partition("[")[0])
def test_random_steps_equal_the_oracle_and_run_on_the_members_of_their_routes(name: str) -> None:
    chosen = attnplug.explain(SPEC, Device.current(), backend=name)
    if not chosen:
        pytest.skip(f"{name} serves nothing here: {chosen.explanation()}")
    model = ServedModel(
        {"0": SPEC, "1": SPEC.replace(sliding_window=77)},
        device="cuda",
        backend=name,
        max_model_len=LONGEST,
        num_blocks=512,
        config=BuilderConfig(max_num_seqs=8, max_num_batched_tokens=2048, num_speculative_tokens=2),
        debug=False,
    )
    layer: Any = model.runtime.layers["0"]
    ran: list[str] = []
    for impl in layer.impl.members.values():
        impl.attend = _noted(impl, ran)
    backend, draw = layer.impl.backend, random.Random(11)
    threshold = model.runtime.attention_groups[0].builder.reorder_batch_threshold or 1
    done, seen = dict.fromkeys("abcde", 0), set()
    for request in done:
        model.add(request)
    for _ in range(40):
        scheduled = {}
        for request in draw.sample(sorted(done), draw.randint(1, 5)):
            count = draw.choice([1, 1, 3, 40, 90, 130])
            if done[request] + count > LONGEST:
                model.remove(request)
                model.add(request)
                done[request] = 0
            scheduled[request] = count
            done[request] += count
        ran.clear()
        batch = model.step(**scheduled)
        lens = [count for count in batch.common.query_start_loc_cpu.diff().tolist() if count]
        if len(lens) < batch.common.num_reqs:
            continue
        expected = expected_members(backend, threshold, lens, batch.common.max_seq_len)
        assert ran == [member for member, _ in expected], lens
        seen |= set(ran)
    assert len(seen) > 1


def _noted(impl: Any, ran: list[str]) -> Any:
    right = impl.attend

    def attend(*args: Any, **kwargs: Any) -> Any:
        ran.append(impl.backend.get_name())
        return right(*args, **kwargs)

    return attend
