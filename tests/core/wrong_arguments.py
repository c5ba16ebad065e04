"""Values of wrong types, sizes, dtypes and devices for the arguments of public functions.

The outcome is the answer, for a value that is right, or an error of attnplug that names an argument of the call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from core_calls import Call

from attnplug.core.errors import AttnplugError


class Hostile:
    """Its conversions and its repr raise."""

    def __index__(self) -> int:
        raise RuntimeError("no index")

    __len__ = __iter__ = __array__ = __float__ = __repr__ = __index__  # type: ignore[assignment]


def wrong() -> dict[str, Any]:
    """Values that few arguments take, by name."""
    return {
        "None": None,
        "text": "abc",
        "1.5": 1.5,
        "nan": math.nan,
        "-1": -1,
        "2**63": 2**63,
        "True": True,
        "list": [1, "a", None],
        "lists": [[1, [2]]],
        "mapping": {"z": 1},
        "object": object(),
        "hostile": Hostile(),
        "class": int,
        "bytes": b"1",
        "set": {1.5},
        "float64": torch.zeros(2, dtype=torch.float64),
        "scalar": torch.tensor(1.5),
        "bools": torch.zeros(2, 2, dtype=torch.bool),
        "meta": torch.empty(3, device="meta"),
        "5 dims": torch.zeros(1, 2, 3, 4, 5),
        "sparse": torch.zeros(2, 3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(2, 4)], layout=torch.jagged),
        "floats": np.array([1.0]),
        "words": np.array(["a"]),
        "number": np.array(1.5),
    }


def near(good: Any) -> Iterator[tuple[str, Any]]:
    """Values that differ from a right one in one thing."""
    if isinstance(good, torch.Tensor):
        yield from (("~meta", good.to("meta")), ("~dim", good[None]), ("~complex", good.to(torch.complex64)))
        yield from (("~bool", good.float().bool()), ("~list", good.tolist()))
        yield "~numpy", good.float().numpy()
        yield "~dtype", good.to(torch.int64) if good.dtype.is_floating_point else good.double()
        if good.ndim:
            yield "~empty", good[:0]
            yield "~flat", good.flatten()[:-1]
    elif isinstance(good, np.ndarray):
        yield from (("~float", good.astype(float)), ("~dim", good[None]), ("~tensor", torch.from_numpy(good)))
        yield from (("~list", good.tolist()), ("~object", good.astype(object)), ("~bool", good.astype(bool)))
    elif isinstance(good, (list, tuple)) and good:
        for name, value in (*wrong().items(), *near(good[0])):
            yield f"[0] {name}", type(good)([value, *good[1:]])
    elif isinstance(good, dict) and good:
        first = next(iter(good))
        for name, value in wrong().items():
            yield f"[{first!r}] {name}", {**good, first: value}
        yield "key 1", {1: good[first]}


# Values that an argument takes, with the answer that its documentation says.
SIZES = "~meta ~empty ~flat"
TAKEN: dict[str, dict[str, str]] = {
    "ops.combine_partials": {"scatter_heads": "True"},
    "ops.ExchangeBuffers.take": {"name": "text"},
    "ops.ExchangeBuffers.partial_or_new": {"like": SIZES},
    "ops.ExchangeBuffers.reserve": {"scatter_heads": "True"},
    "ops.gather_pages": {"scale": "1.5 2**63 scalar number"},
    "ops.gather_slots": {"scale": "1.5 2**63 scalar number"},
    "ops.write_kv_cache": {"k_scale": "1.5 2**63 scalar number", "v_scale": "1.5 2**63 scalar number"}
    | {"slot_mapping": "~empty ~flat"},
    "ops.Reach": {"left": "-1 2**63", "right": "-1 2**63", "chunk": "2**63", "spans": "True"},
    "ops.Reach.bounds": {"first": "-1 2**63", "end": "-1 2**63"},
    "ops.slots_of_keys": {"steps": "[0]2**63"},
    "ops.table_of_tokens": {"steps": "[0]2**63"},
    "ops.query_ends": {"ends": "~empty ~flat"},
    "ops.gather_page_indices": {"rows": "~flat", "out": "~flat"},
    "batch.get_dcp_local_seq_lens": {"seq_lens": SIZES},
    "batch.compute_causal_conv1d_metadata": {"query_start_loc": "~flat"},
    "batch.subclass_attention_metadata": {"name_prefix": "text", "fields": "[0][0]text"},
    "batch.create_fast_prefill_custom_backend": {"prefix": "text"},
    "batch.local_attention table": {"block_table": "~meta"},
    "batch.get_seq_len_block_table_args": {"is_prompt": "True"},
    "batch.compute_slot_mapping of tensors": {"out": "~flat"},
    "batch.compute_slot_mapping_start_idx": {"is_prompt": "True"},
    "batch.reshape_query_for_spec_decode": {"query": "~meta ~empty ~complex ~bool ~dtype"},
    "batch.reshape_attn_output_for_spec_decode": {"attn_output": "~meta ~empty ~complex ~bool ~dtype"},
    "batch.split_decodes_and_prefills": {"require_uniform": "True"},
    "batch.split_prefill_chunks": {"seq_lens_cpu": "~empty ~flat ~list"},
    "batch.slice_query_start_locs": {"query_start_loc": "~meta ~flat"},
    "batch.make_local_attention_virtual_batches of common(block_table_tensor)": {
        "block_table_tensor": "~meta"
    },
    "batch.split_attn_metadata of common(block_table_tensor)": {"block_table_tensor": "~meta"},
    "batch.split_attn_metadata of common(seq_lens)": {"seq_lens": "~meta"},
    "core.BuilderConfig": {"layers": "mapping"},
    "core.KVCacheTensor": {"shared_by": "[0]text"},
    "core.KVCacheGroupSpec": {"layer_names": "[0]text"},
    "core.KVCacheConfig": {"num_blocks": "-1"},
    "core.get_mla_dims": {"hf_config": "['q_lora_rank']None"},
    "core.Selection.clear": {"count": "-1"},
    "core.Selection.check_values": {"ends": "~empty ~flat"},
    "core.MultipleOf": {"base": "2**63", "but": "bytes [0]-1 [0]2**63"},
    "core.MultipleOf.from_on": {"least": "-1"},
    "core.MultipleOf.nearest": {"sizes": "[0]-1 [0]2**63", "wanted": "-1"},
    "core.MultipleOf.common": {"one": "[0]-1 [0]2**63", "other": "[0]-1 [0]2**63"},
    "core.MultipleOf.allows": {"size": "-1 2**63"},
    "core.is_quantized_kv_cache": {"kv_cache_dtype": "text"},
    "core.LayerTensors": {"k_scale": "scalar", "v_scale": "scalar"},
    "core.DenseProjection.of": {"kv_b_proj": "~meta ~empty"},
    "core.Selection": {"positions": "", "counts": ""},
    "runtime.bind_kv_cache": {
        "kv_caches": "['a']"
        + " ['a']".join(["float64", "scalar", "bools", "meta", "5dims", "sparse", "nested"]),
        "layers": "['a']hostile",
    },
    "runtime.cross_metadata": {
        "block_table": "bools ~meta ~empty ~complex ~bool ~dtype sparse",
        "slot_mapping": "float64 meta ~meta ~empty ~flat ~complex ~bool ~dtype",
    },
    "runtime.init_attn_backend": {"fast_prefill": "mapping"},
    "runtime.view_kv_cache": {"raw": "~meta"},
    "runtime.CpuGpuBuffer": {"fill": "1.5 -1"},
    "runtime.StagingRing": {"slots": "list float64 bools meta sparse nested [0]*"},
    "runtime.init_kv_cache": {"layouts": "['a']None"},
    "runtime.reshape_kv_cache": {"layouts": "['a']None"},
    "top.select": {"layer_name": "text"},
    "top.explain": {"layer_name": "text"},
    "top.plan": {"per_phase": "True", "uniform": "True"},
    "top.use": {"backend": "text", "options": "*"},
    "top.LayerSpec": {
        "kv_cache_dtype": "text",
        "scale": "1.5 2**63 scalar number",
        "logits_soft_cap": "1.5 2**63 scalar number",
        **dict.fromkeys(("causal", "direct_kv", "needs_lse", "has_sinks", "mm_prefix"), "True"),
    },
    "top.Device": {"type": "text", "capability": "[0]2**63"},
}
# Sizes of hooks' declarations, which backends give; and metadata that a function does not read.
READS_ANYTHING = (
    "MultipleOf.allows(sizes)",
    "MultipleOf.dividing(sizes)",
    "of common(seq_lens)",
    "of common(block_table",
)
# Errors about an item of a file, or of a plugin, name that item.
NAMES_AN_ITEM = (
    *("from_dict", "get_mla_dims", "Registry", "parse_memory", "Device.parse", "use", "layouts"),
    *("check_values", "common(block_table_tensor)", "compute_slot_mapping", "plan", "select_layers"),
)


def takes(name: str, argument: str, kind: str) -> bool:
    """Whether the call documents that the argument may have this value."""
    if kind == "None" or f"{name}({argument})".endswith(READS_ANYTHING[:2]):
        return True
    if any(part in name for part in READS_ANYTHING[2:]):
        return True
    allowed = TAKEN.get(name, {}).get(argument, "").split()
    short = kind.replace(" ", "")
    return short in allowed or "*" in allowed or ("[0]*" in allowed and short.startswith("[0]"))


def check_refusals(name: str, call: Call) -> None:
    """Each wrong value of each argument is refused by an error that names an argument, or is one that it may have."""
    function, make = call
    for argument, good in make().items():
        for kind, value in (*wrong().items(), *near(good)):
            given = {**make(), argument: value}
            refusal = None
            try:
                function(**given)
            except AttnplugError as error:
                refusal = str(error)
            if refusal is None:
                assert takes(name, argument, kind), f"{argument}: {kind} is accepted"
            elif not any(part in f"{name}({argument})" for part in NAMES_AN_ITEM):
                named = [each for each in given if each.split("[")[0] in refusal]
                assert named, f"{argument}: {kind}: {refusal}"
