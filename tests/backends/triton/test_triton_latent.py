"""TRITON decodes latents: every size, every query length, and requests over the shares of several programs."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import latent
from attnplug.backends.triton import shares as host_shares
from attnplug.backends.triton.backend import TritonBackend
from attnplug.backends.triton.latent import latent_launch
from attnplug.backends.triton.launch import Gpu
from attnplug.backends.triton.share_launch import ShareLaunch
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import paged_batch
from attnplug.testing.conformance.harness import Output, run_batch
from attnplug.testing.conformance.mistakes.expectations import difference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"


def layer(heads, rank, rope, **fields):
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=16
    )
    fields = {"dtype": DTYPE, "needs_lse": True, **fields}
    return LayerSpec(num_heads=heads, num_kv_heads=1, head_size=rank + rope, mla=dims, **fields)


def check(spec, new, tokens, **options):
    """The numbers of a batch, over distinct pages, are those of the oracle."""
    backend = TritonBackend.for_layer(spec)
    batch = paged_batch(spec, new, tokens, device=DEVICE, backend=backend, **options)
    assert difference(batch, Output(*run_batch(backend, batch))) is None


HEADS = [1, 4, 12, 16, 20, 64, 128]
RANKS = [(512, 64), (256, 64), (512, 0), (256, 32)]
QUICK = {*zip(HEADS, itertools.cycle(RANKS))}


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [
        pytest.param(
            heads, *ranks, marks=() if (heads, ranks) in QUICK or DEVICE == "cuda" else pytest.mark.slow
        )
        for heads, ranks in itertools.product(HEADS, RANKS)
    ],
)
def test_heads_and_dimensions(heads, rank, rope):
    check(layer(heads, rank, rope), [1, 1], [40, 7], block_size=16)


@pytest.mark.parametrize(
    ("new", "tokens"),
    [
        ([1], [300]),
        ([1] * 6, [40, 7, 129, 64, 1, 300]),
        ([1, 0, 1, 1, 0], [33, 50, 0, 16, 1]),
        ([4] * 3, [4, 90, 33]),
        ([3, 1, 8, 0, 2], [3, 70, 131, 9, 64]),
        ([5, 2], [3, 40]),
    ],
    ids=["one", "ragged", "idle", "uniform", "lengths", "before-0"],
)
@pytest.mark.parametrize(
    ("block_size", "programs"),
    [
        pytest.param(size, count, marks=() if DEVICE == "cuda" or index % 4 == 0 else pytest.mark.slow)
        for index, (size, count) in enumerate(itertools.product([1, 16, 48], [1, 3, 40]))
    ],
)
def test_shares_of_programs(new, tokens, block_size, programs, monkeypatch):
    gpu = Gpu(programs, 1 << 18)
    monkeypatch.setattr(latent, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(latent, "latent_launch", lambda *sizes: ShareLaunch(16, 16, 4, 1, 1, 1))
    check(layer(4, 64, 16), new, tokens, block_size=block_size)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_latents_of_8_bits(kv_cache_dtype):
    check(layer(12, 64, 16, kv_cache_dtype=kv_cache_dtype), [1, 4], [70, 33], k_scale=0.37)


@pytest.mark.parametrize("topk", [1, 20, 200])
@pytest.mark.parametrize("programs", [1, 7])
def test_chosen_keys_over_the_shares_of_programs(topk, programs, monkeypatch):
    gpu = Gpu(programs, 1 << 18)
    monkeypatch.setattr(latent, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(latent, "latent_launch", lambda *sizes: ShareLaunch(16, 16, 4, 1, 1, 1))
    spec = layer(4, 64, 16, sparse=SparseSpec("token_topk", topk))
    check(spec, [1, 0, 3, 2], [70, 9, 40, 1], block_size=16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    check(layer(20, 64, 16, dtype=dtype), [1, 2], [70, 33])


def test_plans_are_made_once_per_step_and_before_the_layers_of_a_graph(monkeypatch):
    made = []
    monkeypatch.setattr(host_shares, "BoundKernel", lambda *args: lambda *call: made.append(call))
    shares = host_shares.Shares(8, torch.device("cpu"))
    lens = torch.tensor([5, 9], dtype=torch.int32)

    def step(number, reqs=2, part=0):
        return host_shares.SharesStep(
            query_start_loc=lens,
            seq_lens=lens,
            num_reqs=reqs,
            max_query_len=1,
            number=number,
            part=part,
        )

    plan = host_shares.SharesPlan(16, 4, 1)
    shares.begin_step(step(1))
    assert not made
    first = shares.tiles(step(1), plan)
    assert shares.tiles(step(1), plan) is first
    assert len(made) == 1
    shares.begin_step(step(2))
    assert len(made) == 2
    assert shares.tiles(step(2), plan) is first
    assert len(made) == 2
    # The other requests of the same step have a plan of their own.
    assert shares.tiles(step(4, part=1), plan) is not first
    # More requests than the builder's limit have buffers of their own: a graph may read the others.
    assert shares.tiles(step(3, reqs=9), plan) is not first


def test_a_launch_fits_the_shared_memory():
    cases = itertools.product(
        (1, 16, 17, 33, 1024), (0, 64, 128, 256), (2, 4), (99 << 10, 163 << 10, 227 << 10)
    )
    for rows, rope, itemsize, memory in cases:
        launch = latent_launch(rows, 512, rope, itemsize, Gpu(100, memory))
        tile = (512 + rope) * itemsize
        assert (launch.block_m + launch.block_n * launch.num_stages) * tile <= memory
    blackwell = latent_launch(64, 512, 64, 2, Gpu(148, 227 << 10, has_tensor_memory=True))
    # Compiled for compute capability 10.0, two stages took 281 KB.
    assert (blackwell.block_m, blackwell.block_n, blackwell.num_stages) == (64, 64, 1)
    assert latent_launch(16, 512, 64, 2, Gpu(132, 227 << 10)).block_m == 16
    assert latent_launch(64, 512, 64, 2, Gpu(132, 227 << 10)).num_stages == 2


@pytest.mark.parametrize(
    ("programs", "reqs", "rows", "parts", "columns"),
    [
        # As many as each row has, which no round reads in vain.
        (132, 64, 16, 8, 512),
        (66, 4, 128, 16, 512),
        (66, 2, 128, 32, 256),
        (66, 1, 128, 64, 128),
        (132, 1, 64, 128, 64),
        # Few rows have more programs.
        (132, 1, 16, 128, 32),
        (132, 2, 16, 128, 32),
        (132, 2, 48, 64, 128),
    ],
)
def test_merges_read_as_many_parts_as_a_row_has(programs, reqs, rows, parts, columns):
    assert latent._MERGES[latent.merge_place(programs, reqs, rows)] == (parts, columns)


@pytest.mark.parametrize(
    ("most", "reqs", "programs"),
    [
        (66, 8, 64),
        (132, 16, 128),
        (66, 4, 64),
        (132, 4, 132),
        (66, 7, 63),
        (66, 60, 66),
        (66, 100, 66),
        (66, 0, 66),
    ],
)
def test_requests_have_equally_many_programs_where_few_are_left_out(most, reqs, programs):
    assert latent.latent_programs(most, reqs) == programs


def test_all_merges_are_compiled_with_the_first(monkeypatch):
    made, bind = [], latent.TritonMLAImpl._kernels
    monkeypatch.setattr(
        latent.TritonMLAImpl, "_kernels", lambda *given: made.append(bind(*given)) or made[-1]
    )
    check(layer(4, 512, 64), [1, 1], [40, 7], block_size=16)
    (_, merges), *_ = made
    kernels = tuple(each.kernel for each in merges)
    assert len(kernels) == len(latent._MERGES)
    assert all(each.siblings == kernels for each in kernels)
    assert [each.pieces for each in merges] == [-(-512 // columns) for _, columns in latent._MERGES]
