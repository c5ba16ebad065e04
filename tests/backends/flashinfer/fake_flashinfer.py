"""A FlashInfer in torch, on the CPU: it attends by exactly what its wrappers were planned and run with.

Calls are bound to the signatures that were recorded of a version. What a GPU copies is cloned, the schedule of
a plan is written where the real one writes it, and whatever the real kernels leave undefined is an error here.
"""

from __future__ import annotations

import inspect
import math
import os
import types
from pathlib import Path
from typing import Any

import torch
from fake_flashinfer_mla import BatchMLAPagedAttentionWrapper
from flashinfer_signatures import recorded
from packaging.version import Version

_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
_SINKS = "BatchAttentionWithAttentionSinkWrapper"
_INTS = 1 << 16


class PlannedWrapper:
    """What the wrappers share; subclasses have the `signatures` of one class and version."""

    signatures: dict[str, inspect.Signature]
    version = ""
    schedules_keys = False
    """Whether the plan balances by keys, as fa3's does, and not by pages."""
    splits = True
    """Whether a captured plan reserves room for split queries, as that of fa2 does."""

    def _bound(self, method: str, *args: Any, **keywords: Any) -> dict[str, Any]:
        bound = self.signatures[method].bind(*args, **keywords)
        bound.apply_defaults()
        return bound.arguments

    def _start(self, workspace: torch.Tensor, layout: str, graph: bool, buffers: list[Any]) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self._float_workspace_buffer = workspace
        self.device = workspace.device
        self._int_workspace_buffer = torch.empty(_INTS, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(_INTS, dtype=torch.uint8)
        self._graph = self.is_cuda_graph_enabled = graph
        self._qo_indptr_buf, self._paged_kv_indptr_buf, *rest = buffers
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = rest
        self.planned: dict[str, Any] = {}
        self.plans = 0
        self.replans = 0
        self._cached_module: Any = None

    def _stage(self, qo: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        for array in (qo, kv, indices, last):
            assert array.dtype == torch.int32
            assert array.device.type == "cpu"
        if self._graph:
            assert len(last) == len(self._paged_kv_last_page_len_buf), "the batch size is fixed"
            assert len(indices) <= len(self._paged_kv_indices_buf), "more pages than at capture"
            self._qo_indptr_buf.copy_(qo)
            self._paged_kv_indptr_buf.copy_(kv)
            self._paged_kv_last_page_len_buf.copy_(last)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo.clone(), kv.clone()
            # A tensor that is on the device already is taken as it is.
            self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = indices, last.clone()

    def _schedule(
        self, planned: dict[str, Any], qo: torch.Tensor, kv: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Write the work list on the host, and copy it: what `run` reads is the copy.

        A planner that counts pages is told lengths too, but reads none: any number of them will do.
        """
        count = len(kv) - 1
        if self.schedules_keys:
            assert len(lengths) == count, "a length for each request"
        keys = lengths if self.schedules_keys else torch.zeros(count, dtype=torch.int32)
        work = torch.cat([qo, kv, keys]).to(torch.int32)
        raw = work.view(torch.uint8)
        self._pin_memory_int_workspace_buffer[: len(raw)] = raw
        self._int_workspace_buffer[: len(raw)].copy_(self._pin_memory_int_workspace_buffer[: len(raw)])
        self._plan_info = [count, planned["window_left"], 0]
        if self._graph and self.splits:
            self._reserve(planned, count)
        self.planned = planned
        self.plans += 1
        self._cached_module = types.SimpleNamespace(plan=self._plan_of_module)

    def _plan_of_module(self, *given: Any) -> list[int]:
        """The planner alone, as `plan()` calls it: nothing but the work list is written."""
        tail = 0 if self.schedules_keys else 3 + (Version(self.version) >= Version("0.7"))
        if len(given) != 16 + tail:
            raise TypeError(f"Mismatched number of arguments: expected {16 + tail} but got {len(given)}")
        names = ("workspace", "ints", "pinned", "qo", "kv", "lengths", "rows", "count", "heads", "kv_heads")
        asked = dict(zip((*names, "page_size", "graph", "d", "dv", "causal", "window"), given, strict=False))
        planned, count = self.planned, asked["count"]
        assert given[16:] == (-1, False, 0, 0)[:tail]
        assert asked["workspace"] is self._float_workspace_buffer
        assert asked["ints"] is self._int_workspace_buffer
        assert asked["rows"] == count == len(asked["qo"]) - 1
        assert (asked["heads"], asked["kv_heads"]) == (planned["num_qo_heads"], planned["num_kv_heads"])
        assert (asked["page_size"], asked["d"]) == (planned["page_size"], planned["head_dim"])
        assert (asked["window"], asked["graph"]) == (planned["window_left"], self._graph)
        assert asked["causal"] == planned.get("causal", False)
        raw = torch.cat([asked["qo"], asked["kv"], torch.zeros(count, dtype=torch.int32)]).view(torch.uint8)
        asked["pinned"][: len(raw)] = raw
        self._int_workspace_buffer[: len(raw)].copy_(asked["pinned"][: len(raw)])
        self.replans += 1
        return [count, asked["window"], 0]

    def _reserve(self, planned: dict[str, Any], requests: int) -> None:
        """The room of 0.5 and 0.6, on a GPU of one multiprocessor, for float32 outputs and LSEs of parts."""
        heads, kv_heads = planned["num_qo_heads"], planned["num_kv_heads"]
        grouped = heads // kv_heads
        rows = 16 if grouped <= 16 else 64
        tiles = max(2 // kv_heads, math.ceil(requests * grouped / rows) + requests - 1)
        if heads * tiles * rows * (planned["head_dim"] + 1) * 4 > self._float_workspace_buffer.numel():
            raise RuntimeError("Failed to allocate memory for batch_prefill_tmp_v")

    def _scheduled(self, lengths: torch.Tensor) -> tuple[list[int], list[int]]:
        count = self._plan_info[0]
        work = self._int_workspace_buffer.view(torch.int32)[: 3 * count + 2]
        qo, kv, keys = work[: count + 1], work[count + 1 : 2 * count + 2], work[2 * count + 2 :]
        assert torch.equal(qo, self._qo_indptr_buf), "another plan's work list"
        assert torch.equal(kv, self._paged_kv_indptr_buf), "another plan's work list"
        if self.schedules_keys:
            assert torch.equal(keys, lengths), "a work list for other lengths"
        return qo.tolist(), kv.tolist()

    def _attend(
        self,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        *,
        causal: bool,
        scale: float,
        v_scale: float | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        planned = self.planned
        k, v = pages
        assert k.stride() == v.stride()
        assert (q.dtype, k.dtype) == (planned["q_data_type"], planned["kv_data_type"])
        assert k.shape[1:] == (planned["page_size"], planned["num_kv_heads"], planned["head_dim"])
        assert out.is_contiguous()
        assert out.shape == q.shape
        assert q.stride(2) == 1
        assert lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)
        counts = self._paged_kv_indptr_buf.diff()
        last = self._paged_kv_last_page_len_buf
        assert bool(((last >= 1) & (last <= k.shape[1])).all()), "last_page_len"
        lengths = (counts - 1) * k.shape[1] + last
        qo, kv = self._scheduled(lengths)
        assert q.shape[0] == qo[-1], "queries that were not planned for"
        self._float_workspace_buffer[:_INTS] = 0xFF  # scratch
        for index, length in enumerate(lengths.tolist()):
            rows = slice(qo[index], qo[index + 1])
            blocks = self._paged_kv_indices_buf[kv[index] : kv[index + 1]].long()
            key, value = (each[blocks].float().flatten(0, 1)[:length].double() for each in (k, v))
            queries = q[rows].double()
            assert queries.shape[0] >= 1
            assert length >= (queries.shape[0] if causal else 1), "a query that sees nothing is undefined"
            found, sums = self._one(queries, key, value, causal, scale, sinks)
            out[rows] = (found * (1.0 if v_scale is None else v_scale)).to(out.dtype)
            if lse is not None:
                lse[rows] = (sums / math.log(2)).float()

    def _one(
        self,
        queries: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planned = self.planned
        groups = planned["num_qo_heads"] // planned["num_kv_heads"]
        key, value = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
        logits = queries.transpose(0, 1) @ key.transpose(1, 2) * scale
        masked = -5e4 * (planned["logits_soft_cap"] or scale)
        if planned["logits_soft_cap"]:
            logits = planned["logits_soft_cap"] * torch.tanh(logits / planned["logits_soft_cap"])
        at = torch.arange(queries.shape[0])[:, None] + key.shape[1] - queries.shape[0]
        keys = torch.arange(key.shape[1])[None]
        hidden = (keys > at) if causal else torch.zeros_like(keys > at)
        if planned["window_left"] >= 0:
            hidden = hidden | (keys < at - planned["window_left"])
        logits = logits.masked_fill(
            hidden, -math.inf if Version(self.version) >= Version("0.7.2") else masked
        )
        terms = logits
        if sinks is not None:
            assert sinks.dtype == torch.float32
            assert not bool(sinks.isinf().any()), "an infinite sink gives NaN"
            terms = torch.cat([logits, sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)], 2)
        sums = terms.logsumexp(2)
        found = (logits - sums[:, :, None]).exp() @ value
        return found.transpose(0, 1), sums.transpose(0, 1)


class Decode(PlannedWrapper):
    """The decode wrapper: one query a request."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        given = self._bound("__init__", *args, **keywords)
        assert given["backend"] == ("fa2" if given["use_tensor_cores"] else "auto")
        self.splits = bool(given["use_tensor_cores"])
        graph = bool(given["use_cuda_graph"])
        fixed = [given[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
        start = torch.zeros_like(fixed[0]) if graph else None
        self._start(given["float_workspace_buffer"], given["kv_layout"], graph, [start, *fixed])

    def plan(self, *args: Any, **keywords: Any) -> None:
        given = self._bound("plan", *args, **keywords)
        if "_plan_impl" in self.signatures:
            assert not given.pop("deprecated_positional_args"), "positional arguments that are deprecated"
            given = self._bound("_plan_impl", *args, **keywords)
        assert given["non_blocking"]
        count = len(given["last_page_len"])
        qo = torch.arange(count + 1, dtype=torch.int32)
        self._stage(qo, given["indptr"], given["indices"], given["last_page_len"])
        self._schedule(given, qo, given["indptr"], given["seq_lens"])

    def run(self, *args: Any, **keywords: Any) -> None:
        given = self._bound("run", *args, **keywords)
        assert given["return_lse"] == (given["lse"] is not None)
        scale = self.planned["sm_scale"] * (1.0 if given["k_scale"] is None else given["k_scale"])
        # A query stands at the end: all keys are before it.
        self._attend(
            given["q"],
            given["paged_kv_cache"],
            causal=False,
            scale=scale,
            v_scale=given["v_scale"],
            out=given["out"],
            lse=given["lse"],
        )


class Prefill(PlannedWrapper):
    """The prefill wrapper: any queries."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        given = self._bound("__init__", *args, **keywords)
        assert given["backend"] in ("fa2", "fa3")
        self.backend = given["backend"]
        self.schedules_keys = self.backend == "fa3"
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        fixed = [given[f"{name}_buf"] for name in names]
        self._jit_args = given.get("jit_args")
        self._start(given["float_workspace_buffer"], given["kv_layout"], bool(given["use_cuda_graph"]), fixed)

    def plan(self, *args: Any, **keywords: Any) -> None:
        given = self._bound("plan", *args, **keywords)
        assert given["non_blocking"]
        given["head_dim"] = given["head_dim_qk"]
        longest = given["max_token_per_sequence"]
        if longest is not None:
            if Version(self.version) < Version("0.6.13"):
                raise UnboundLocalError("qo_indptr_host")
            assert longest == int(given["qo_indptr"].diff().max())
        if self.backend == "fa3":
            assert given["kv_data_type"].itemsize == 2, "fa3 has no fp8 KV"
        arrays = [given["paged_kv_indices"], given["paged_kv_last_page_len"]]
        self._stage(given["qo_indptr"], given["paged_kv_indptr"], *arrays)
        self._schedule(given, given["qo_indptr"], given["paged_kv_indptr"], given["seq_lens"])

    def run(self, *args: Any, **keywords: Any) -> None:
        given = self._bound("run", *args, **keywords)
        assert given["return_lse"] == (given["lse"] is not None)
        scale = self.planned["sm_scale"] * (1.0 if given["k_scale"] is None else given["k_scale"])
        sinks = None
        if self._jit_args is not None:
            sinks, scale = given["args"]
            assert self._jit_args[5:7] == [self.planned["head_dim"]] * 2
            assert self._jit_args[13] is (self.planned["window_left"] >= 0)
        else:
            assert not given["args"]
        self._attend(
            given["q"],
            given["paged_kv_cache"],
            causal=self.planned["causal"],
            scale=scale,
            v_scale=given["v_scale"],
            out=given["out"],
            lse=given["lse"],
            sinks=sinks,
        )


def make_flashinfer(
    version: str, *, built: bool = True, folder: Path | None = None
) -> dict[str, types.ModuleType]:
    """The modules of a FlashInfer of a version, by name; `built` says whether all its kernels are compiled."""
    signatures = recorded(version)
    root = types.ModuleType("flashinfer")
    decode: Any = type(_DECODE, (_with_signatures(Decode, signatures[_DECODE]),), {})
    prefill: Any = type(_PREFILL, (_with_signatures(Prefill, signatures[_PREFILL]),), {})
    decode.version = prefill.version = version
    sinks = _sink_wrapper(prefill, signatures[_SINKS]["__init__"])
    root.__dict__.update(
        {"__version__": version, "__path__": [], _DECODE: decode, _PREFILL: prefill, _SINKS: sinks}
    )
    names = {torch.float16: "f16", torch.bfloat16: "bf16"}
    parts: dict[str, dict[str, Any]] = {
        "jit": {"__path__": []},
        "jit.utils": {"filename_safe_dtype_map": names},
        "jit.cpp_ext": {"get_cuda_path": lambda: str(folder / "cuda") if folder else "/nowhere"},
        "jit.attention": {
            "__path__": [],
            "get_batch_prefill_uri": lambda *asked: "prefill_" + "_".join(map(str, asked)),
            "get_batch_decode_uri": lambda *asked: "decode_" + "_".join(map(str, asked)),
            "get_batch_mla_uri": lambda *asked: "mla_" + "_".join(map(str, asked)),
        },
        "mla": {BatchMLAPagedAttentionWrapper.__name__: BatchMLAPagedAttentionWrapper},
        "jit.attention.modules": _generators(version),
        "jit.env": {
            "FLASHINFER_JIT_DIR": (folder or Path("/nowhere")) / "jit",
            "FLASHINFER_AOT_DIR": (folder or Path("/nowhere")) / "aot",
            "get_aot_path": lambda name: Path(__file__) if built else Path("/nowhere"),
        },
    }
    modules = {"flashinfer": root}
    for name, members in parts.items():
        module = modules[f"flashinfer.{name}"] = types.ModuleType(f"flashinfer.{name}")
        module.__dict__.update(members)
    return modules


class JitSpec:
    """What a module is built from: a name, and how it was asked for."""

    def __init__(self, *asked: Any, **keywords: Any) -> None:
        self.asked, self.keywords = asked, keywords
        self.built: list[str | None] = []

    def build(self, verbose: bool, need_lock: bool) -> None:
        assert not verbose
        assert need_lock
        self.built.append(os.environ.get("MAX_JOBS"))


def _generators(version: str) -> dict[str, Any]:
    made: list[JitSpec] = []

    def generator(kind: str) -> Any:
        def generate(*asked: Any, **keywords: Any) -> JitSpec:
            made.append(JitSpec(kind, *asked, **keywords))
            if Version(version) >= Version("0.6"):
                made[-1].build_dir = Path("/nowhere")  # type: ignore[attr-defined]
            return made[-1]

        return generate

    names = ["gen_batch_prefill_module", "gen_batch_decode_module", "gen_customize_batch_prefill_module"]
    names.append("gen_batch_mla_module")
    found: dict[str, Any] = {"made": made}
    if Version(version) >= Version("0.7"):
        names.append("_gen_batch_prefill_primary_module")
        found["_get_batch_prefill_module_uri"] = lambda base, *mode: f"{base}_{'_'.join(mode[1:])}"
    return found | {name: generator(name) for name in names}


def _with_signatures(base: type[Any], signatures: dict[str, inspect.Signature]) -> type[Any]:
    """A subclass whose methods say of themselves what was recorded."""
    members: dict[str, Any] = {"signatures": signatures}
    for name, signature in signatures.items():
        own = getattr(base, name, None)

        def method(self: Any, *args: Any, _own: Any = own, **keywords: Any) -> Any:
            return _own(self, *args, **keywords)

        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = signature.replace(parameters=[me, *_after(signature)])  # type: ignore[attr-defined]
        members[name] = method
    return type(base.__name__, (base,), members)


def _after(signature: inspect.Signature) -> list[inspect.Parameter]:
    return list(signature.parameters.values())


def _sink_wrapper(prefill: type[Any], signature: inspect.Signature) -> type[Any]:
    class Sinks(prefill):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            given = bound.arguments
            dtype, kv, qk, vo = (
                given[n] for n in ("q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo")
            )
            windowed, backend = given["window_left"] >= 0, given["backend"]
            uri = f"batch_prefill_attention_sink_{'bf16' if dtype == torch.bfloat16 else 'f16'}_swa_{windowed}_{backend}"
            args_of_module = [
                uri,
                dtype,
                kv,
                dtype,
                torch.int32,
                qk,
                vo,
                ["sink"],
                ["float"],
                ["sm_scale"],
                ["double"],
            ]
            kept = (
                "kv_layout",
                "use_cuda_graph",
                "qo_indptr_buf",
                "paged_kv_indptr_buf",
                "paged_kv_indices_buf",
            )
            super().__init__(
                float_workspace_buffer=given["float_workspace_buffer"],
                **{name: given[name] for name in kept},
                paged_kv_last_page_len_buf=given["paged_kv_last_page_len_buf"],
                backend=backend,
                jit_args=[*args_of_module, "AttentionSink", "source", windowed],
                jit_kwargs={},
            )

    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    Sinks.__init__.__signature__ = signature.replace(parameters=[me, *_after(signature)])  # type: ignore[attr-defined]
    return Sinks
