"""A small model served step by step on TORCH: groups, caches, batches and metadata together, against the oracle."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from model_layers import layer
from runtime_backends import decision

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, LayerSpec, LayerTensors
from attnplug.runtime import (
    StepBatch,
    StepBatchBuilder,
    build_attn_metadata,
    get_kv_cache_spec,
    group_kv_caches,
    init_attn_backend,
    init_kv_cache,
)
from attnplug.testing import assert_close, layer_tensors, request_oracle

BLOCKS, BLOCK = 128, 4
SPECS = {
    "0.self": layer(dtype="float32", sliding_window=6, has_sinks=True),
    "0.cross": layer(dtype="float32", attn_type="encoder_decoder"),
    "1.self": layer(dtype="float32"),
    "2.self": layer(dtype="float32", sliding_window=6, has_sinks=True),
    "2.cross": layer(dtype="float32", attn_type="encoder_decoder"),
    "3.self": layer(dtype="float32", num_heads=2, logits_soft_cap=4.0),
}
READER = "3.self"
"""Stands for itself in one run, and reads the KV of 1.self in another."""


def rows(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(count, heads, 8, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Request:
    """All queries, keys and values that it will ever have, per layer."""

    name: str
    length: int
    encoder_len: int
    seed: int
    done: int = 0

    def query(self, name: str) -> torch.Tensor:
        return rows(self.length, SPECS[name].num_heads, self.seed + hash_of(name))

    def key_value(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.encoder_len if name.endswith("cross") else self.length
        seed = self.seed + hash_of(name)
        return rows(count, 2, seed + 1000), rows(count, 2, seed + 2000)


def hash_of(name: str) -> int:
    return 17 * list(SPECS).index(name)


class Server:
    """What an engine does between steps, in a few lines."""

    def __init__(self, sharing: dict[str, str], layout: str, device: str = "cpu") -> None:
        self.sharing, self.device = sharing, device
        self.config = group_kv_caches(get_kv_cache_spec(SPECS, BLOCK), BLOCKS, sharing)
        decisions = {name: decision(spec, TorchBackend) for name, spec in SPECS.items()}
        self.tensors = {name: layer_tensors(spec, device=device) for name, spec in SPECS.items()}
        self.impls = {
            name: TorchBackend.get_impl_cls().from_spec(
                spec,
                backend=TorchBackend,
                layer_name=name,
                tensors=self.tensors[name],
                kv_sharing_target_layer_name=sharing.get(name),
            )
            for name, spec in SPECS.items()
        }
        self.groups = init_attn_backend(self.config.kv_cache_groups, decisions, BuilderConfig(), device)
        self.caches = init_kv_cache(self.config, SPECS, dict.fromkeys(SPECS, TorchBackend), device, layout)
        for cache in self.caches.values():
            cache[1:] = torch.nan  # whatever is read without having been written shows
        self.free = list(range(1, BLOCKS))
        random.Random(5).shuffle(self.free)
        self.cross = [
            g for g, group in enumerate(self.config.kv_cache_groups) if group.layer_names[0].endswith("cross")
        ]
        self.builder = StepBatchBuilder(
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=40,
            block_sizes=[BLOCK] * len(self.config.kv_cache_groups),
            cross_groups=self.cross,
            max_encoder_len=12,
            device=device,
        )
        self.requests: dict[str, Request] = {}

    def pages(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK))]

    def add(self, request: Request) -> None:
        self.requests[request.name] = request
        pages = [
            self.pages(request.encoder_len if group in self.cross else request.length)
            for group in range(len(self.config.kv_cache_groups))
        ]
        self.builder.add_request(request.name, pages, encoder_len=request.encoder_len)

    def run(self, counts: dict[str, int]) -> None:
        """One step of every layer, each compared with the oracle."""
        batch = self.builder.step(counts)
        metadata = build_attn_metadata(self.groups, batch, self.config)
        running = [self.requests[name] for name in batch.req_ids]
        for name, spec in SPECS.items():
            query = torch.cat([r.query(name)[r.done : r.done + counts[r.name]] for r in running])
            key, value = self.new_keys(name, batch, counts)
            output = torch.full_like(query, torch.nan, device=self.device)
            self.impls[name].forward(
                None, query.to(self.device), key, value, self.caches[name], metadata[name], output
            )
            expected = torch.cat([self.expected(name, spec, r, counts[r.name]) for r in running])
            assert_close(output, expected, 1e-5, name)
        self.builder.finish_step()
        for request in running:
            request.done += counts[request.name]

    def new_keys(
        self, name: str, batch: StepBatch, counts: dict[str, int]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        running = [self.requests[r] for r in batch.req_ids]
        if name.endswith("cross"):
            new = [r.key_value(name) for r in running if r.done == 0 and counts[r.name]]
        else:
            source = self.sharing.get(name, name)
            pairs = [(r, r.key_value(source)) for r in running]
            new = [tuple(t[r.done : r.done + counts[r.name]] for t in pair) for r, pair in pairs]
        if not new:
            return None, None
        keys, values = zip(*new, strict=True)
        return torch.cat(keys).to(self.device), torch.cat(values).to(self.device)

    def expected(self, name: str, spec: LayerSpec, request: Request, count: int) -> torch.Tensor:
        key, value = request.key_value(self.sharing.get(name, name))
        end = request.done + count
        if not name.endswith("cross"):
            key, value = key[:end], value[:end]
        query = request.query(name)[request.done : end]
        tensors = LayerTensors(
            sinks=None if self.tensors[name].sinks is None else self.tensors[name].sinks.cpu()
        )
        return request_oracle(spec, query, key, value, key.shape[0], tensors=tensors).output


def serve(server: Server) -> None:
    """Prefills in chunks, decodes, a speculation, requests that come, wait, move and leave."""
    server.add(Request("a", 30, 5, 1))
    server.run({"a": 11})
    server.add(Request("b", 12, 12, 2))
    server.run({"a": 1, "b": 7})
    server.add(Request("c", 9, 1, 3))
    server.run({"a": 1, "b": 1, "c": 0})
    server.builder.swap_states(0, 2)
    server.run({"a": 4, "b": 1, "c": 3})
    for group in range(len(server.config.kv_cache_groups)):
        if server.config.kv_cache_groups[group].layer_names[0] == "0.self":
            server.builder.free_blocks("a", group, (17 - 5) // BLOCK)  # keys 12 on are still seen
    server.run({"a": 1, "b": 1, "c": 1})
    server.builder.remove_request("b")
    server.add(Request("d", 8, 3, 4))
    server.run({"a": 10, "c": 2, "d": 8})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("sharing", "kv_groups"),
    [
        ({}, 3),  # three kinds of two layers each
        ({READER: "1.self"}, 5),  # one full layer with pages of its own: groups of one, and twins
    ],
)
def test_every_layer_of_every_step_is_what_the_oracle_says(layout, sharing, kv_groups):
    server = Server(sharing, layout)
    assert len(server.config.kv_cache_groups) == kv_groups
    assert len(server.groups) == kv_groups + 1  # 3.self has heads of its own, so a builder of its own
    serve(server)


@pytest.mark.gpu
def test_every_layer_of_every_step_is_what_the_oracle_says_on_a_gpu():
    serve(Server({READER: "1.self"}, "HND", "cuda"))
