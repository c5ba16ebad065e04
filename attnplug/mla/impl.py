"""The base of impls of latent attention: it does everything but the decode on the latents."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.errors import BatchError, LayoutError, PluginError, SpecError
from attnplug.core.impl import AttentionImpl, AttentionLayer, LayerTensors, MLAAttentionImpl
from attnplug.core.interface.impl_and_builder import make_impl
from attnplug.core.mla.dims import MLADims
from attnplug.core.mla.weights import DenseProjection, LatentProjection, projection_of
from attnplug.core.spec import LayerSpec, Phase
from attnplug.mla.chunks import FEW_CHUNKS
from attnplug.mla.metadata import MLAMetadata, MLAPrefillMetadata
from attnplug.mla.selected import token_pages
from attnplug.ops.checks import check_rows, kv_scales, refuse_output_scales
from attnplug.ops.gather import pages_into, slots_into
from attnplug.ops.kv_write import bound_kv_write
from attnplug.ops.merging import merge_into
from attnplug.ops.storage import compute_dtype, in_words, typed_view

if TYPE_CHECKING:
    from attnplug.core.mla.backend import MLADecodeBackend


_PRODUCT_ROWS = 4096


class MLADecodeImpl(MLAAttentionImpl[MLAMetadata]):
    """Runs a layer of latent attention; a subclass writes `decode`.

    The base writes the latents, absorbs W_UK into the queries, multiplies attended latents by W_UV, and prefills on
    `backend.prefill`: new tokens causally, computed ones in chunks, merged by their LSE.
    """

    backend: type[MLADecodeBackend]  # pyright: ignore[reportIncompatibleVariableOverride]
    dims: MLADims
    softmax_scale: float
    """The factor of logits, for `decode`: the layer's scale times the scale of stored latents."""
    projection: LatentProjection
    """The products with the layer's W_UK and W_UV."""

    @abstractmethod
    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend absorbed queries over latents: keys are whole latents, values their first L elements.

        Row j of a request with q queries and s tokens sees the first `s - q + j + 1` of them. A row that sees none
        has output 0 and LSE -inf. Stored values are used as they are: the base applies their scale.

        Args:
            q_nope: `[T, N, L]`, with the declared `padded_heads` as N.
            q_pe: `[T, N, R]`; with the layout "packed", `packed_query` gives both as one tensor.
            kv_cache: `[num_blocks, block_size, L + R]` in the stored dtype, of any block stride. For a sparse layer
                `[n, 1, L + R]`, pages of one token.
            metadata: what the builder's `build_decode` returned, by default the CommonAttentionMetadata of the
                decodes.
            output: `[T, N, L]`, written.
            output_lse: float32 `[T, N]`, written where given; natural log.
        """

    def decoded(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the LSE of `decode` in new tensors; a kernel that allocates its own overrides this."""
        output = q_nope.new_empty(*q_nope.shape[:2], self.dims.kv_lora_rank)
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32) if wants_lse else None
        self.decode(q_nope, q_pe, kv_cache, metadata, output, lse)
        return output, lse

    def _bind(
        self,
        spec: LayerSpec,
        layer_name: str,
        tensors: LayerTensors,
        kv_sharing_target_layer_name: str | None = None,
        options: Any = None,
    ) -> None:
        super()._bind(spec, layer_name, tensors, kv_sharing_target_layer_name, options)
        if spec.mla is None:
            raise SpecError("mla", None, f"is required by {type(self).__name__}")
        # Only MLADecodeBackend has this name; another base declares no form of the absorbed queries.
        if not hasattr(self.backend, "padded_heads"):
            name = self.backend.__name__
            raise PluginError(
                f"{name} has an impl of MLADecodeImpl; subclass MLADecodeBackend of attnplug.core"
            )
        self.dims = spec.mla
        self.projection = projection_of(spec, tensors)
        self._dtype = compute_dtype(spec)
        self._heads = self.backend.padded_heads(spec.num_heads)
        if spec.sparse is not None and not self.backend.is_selecting:
            remedy = f"take {self.backend.__name__}.for_layer(spec)"
            raise SpecError("sparse", str(spec.sparse), "is served by a class of its own", remedy)
        # Read at the first step and kept: a scale on a device makes the host wait.
        self._own_scale: float | None = None
        self.softmax_scale = spec.scale
        self.members: dict[Phase, AttentionImpl[Any]] = {}
        prefill = self.backend.prefill
        if prefill is not None:
            self.members[Phase.PREFILL] = make_impl(
                prefill,
                spec.expanded(),
                layer_name=layer_name,
                options=None if prefill.Options is None else prefill.Options(),
            )

    @property
    def prefill_impl(self) -> AttentionImpl[Any] | None:
        """The impl of the prefill half; None without."""
        return self.members.get(Phase.PREFILL)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As AttentionImpl.process_weights_after_loading, also of the prefill half."""
        for member in self.members.values():
            member.process_weights_after_loading(act_dtype)

    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write latents `key [T, 1, L + R]` to their slots; `value` is part of them and not read."""
        pages = self._latents(kv_cache)[:, :, None]
        rows = slot_mapping.shape[0]
        check_rows("key", key, rows, (1, self.dims.latent_size), self._dtype)
        scale = self._stored_scale(layer, pages.dtype)
        rank = self.dims.kv_lora_rank
        # The kernels write keys and values, and the value of a latent is its first part.
        given = key, key[..., :rank], pages, pages[..., :rank], slot_mapping
        bound_kv_write(*given, (scale, scale))(*given)

    @torch.no_grad()
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: MLAMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As AttentionImpl.attend, with queries `[T, H, nope + rope]` and outputs `[T, H, v_head_dim]`."""
        meta, spec = attn_metadata, self.spec
        tokens = meta.num_actual_tokens
        check_rows("query", query, tokens, (spec.num_heads, spec.query_size), self._dtype)
        check_rows("output", output, tokens, (spec.num_heads, spec.output_size), self._dtype)
        refuse_output_scales(output_scale=output_scale, output_block_scale=output_block_scale)
        if output_lse is not None:
            if not spec.needs_lse:
                remedy = "declare the layer with needs_lse=True"
                raise BatchError("output_lse", tuple(output_lse.shape), "must be None", remedy)
            check_rows("output_lse", output_lse, tokens, (spec.num_heads,), torch.float32)
        if kv_cache is None:
            raise LayoutError("kv_cache", None, "is required: latents are attended in pages")
        cut = meta.num_decode_tokens
        if cut:
            nope = self.dims.qk_nope_head_dim
            q = self.projection.absorb(query[:cut, :, :nope]), query[:cut, :, nope:]
            latent, lse = self.forward_mqa(q, kv_cache, meta, layer, wants_lse=output_lse is not None)
            output[:cut].copy_(self.projection.project(latent))
            if output_lse is not None and lse is not None:
                output_lse[:cut].copy_(lse)
        if meta.prefill is not None:
            end = cut + meta.prefill.num_tokens
            latent = self._new_latents(layer, key, kv_cache, meta.prefill, cut)
            rank = self.dims.kv_lora_rank
            stored = self._stored_scale(layer, self._latents(kv_cache).dtype)
            self.forward_mha(
                query[cut:end],
                latent[:, :rank],
                latent[:, None, rank:],
                kv_cache,
                meta,
                # On the CPU, so that `forward_mha` reads it without waiting for a device.
                torch.tensor(stored, dtype=torch.float32, device="cpu"),
                output[cut:end],
                output_lse=None if output_lse is None else output_lse[cut:end],
            )
        return output

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: MLAMetadata,
        layer: AttentionLayer | None,
        *,
        wants_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As MLAAttentionImpl.forward_mqa, by `decode`: latents `[T, H, L]`, scaled, and the LSE if wanted."""
        if isinstance(q, torch.Tensor):
            q = q[..., : self.dims.kv_lora_rank], q[..., self.dims.kv_lora_rank :]
        pages = self._latents(kv_cache)
        selected, sparse = attn_metadata.selected, self.spec.sparse
        if selected is not None and sparse is not None:
            block_size = pages.shape[1]
            pages, steps = token_pages(pages)
            selected.fill(sparse, block_size, steps)
        scale = self._stored_scale(layer, pages.dtype)
        # `decode` reads stored latents as they are, so the scale of the keys goes into the logits.
        self.softmax_scale = self.spec.scale * scale
        q_nope, q_pe = self._queries(*q)
        output, lse = self.decoded(q_nope, q_pe, pages, attn_metadata.decode, wants_lse)
        # Values are a part of the latents, so the output has their scale too.
        if scale != 1.0:
            output.mul_(scale)
        heads = self.spec.num_heads
        return output[:, :heads], None if lse is None else lse[:, :heads]

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: MLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> None:
        """As MLAAttentionImpl.forward_mha, on the prefill backend; `output_lse [T, H]` is written if given.

        Raises:
            BatchError: the step has prefills, and no backend is there to prefill.
        """
        meta = attn_metadata.prefill
        if meta is None:
            return
        impl = self.prefill_impl
        if impl is None:
            remedy = "plan the layer, or bind a prefill backend by with_prefill"
            raise BatchError(
                "max_query_len", meta.num_tokens, f"{self.backend.get_name()} decodes only", remedy
            )
        lse = output_lse
        # Merging needs the LSE, also if the caller wants none.
        if lse is None and meta.chunks:
            lse = torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)
        self._attend_new(impl, q, kv_c_normed, k_pe[:, 0], meta.new, output, lse)
        if not meta.chunks or lse is None:
            return
        pages, scale = self._latents(kv_cache), float(k_scale)
        rank = self.dims.kv_lora_rank
        # Each merge rounds its result, which adds up over many chunks.
        merged = output if len(meta.chunks) <= FEW_CHUNKS else output.float()
        for chunk in meta.chunks:
            latent, key, value = self._workspace(meta.workspace, chunk.rows, q)
            pages_into(pages, chunk.block_table, chunk.cu_lens, chunk.starts, latent, scale=scale)
            self._expand(latent[:, :rank], latent[:, rank:], key, value)
            queries, into = q[chunk.queries], merged[chunk.queries]
            part, part_lse = torch.empty_like(output[chunk.queries]), torch.empty_like(lse[chunk.queries])
            impl.attend(None, queries, key, value, None, chunk.attend, part, output_lse=part_lse)
            parts = (into, part), (lse[chunk.queries], part_lse)
            merge_into(*parts, into, lse[chunk.queries])
        if merged is not output:
            output.copy_(merged)

    @torch.no_grad()
    def attend_new(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """Attend new tokens alone, on the prefill backend.

        Args:
            query: `[T, H, nope + rope]`.
            latent: `[S, L + R]`, the latents of the keys.
            metadata: of the prefill half, for keys in the call.
            output: `[T, H, v_head_dim]`, written.
            output_lse: float32 `[T, H]`, written where given.

        Raises:
            BatchError: no backend prefills, or the query has another shape.
        """
        impl = self.prefill_impl
        if impl is None:
            raise BatchError("query", tuple(query.shape), f"{self.backend.get_name()} decodes only")
        check_rows("query", query, query.shape[0], (self.spec.num_heads, self.spec.query_size), self._dtype)
        rank = self.dims.kv_lora_rank
        self._attend_new(impl, query, latent[:, :rank], latent[:, rank:], metadata, output, output_lse)

    def _attend_new(
        self,
        impl: AttentionImpl[Any],
        query: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        _, key, value = self._workspace(None, kv_c.shape[0], query)
        self._expand(kv_c, k_pe, key, value)
        impl.attend(None, query, key, value, None, metadata, output, output_lse=output_lse)

    def _queries(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The absorbed queries in the declared layout, with the padded heads."""
        (tokens, heads), rank = q_nope.shape[:2], self.dims.kv_lora_rank
        if self.backend.query_layout == "packed":
            packed = q_nope.new_empty(tokens, self._heads, self.dims.latent_size)
            parts = [packed[..., :rank], packed[..., rank:]]
        elif self._heads == heads:
            return q_nope.contiguous(), q_pe.contiguous()
        else:
            parts = [each.new_empty(tokens, self._heads, each.shape[2]) for each in (q_nope, q_pe)]
        for part, given in zip(parts, (q_nope, q_pe), strict=True):
            part[:, :heads] = given
            part[:, heads:] = 0
        return parts[0], parts[1]

    def _new_latents(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor | None,
        kv_cache: torch.Tensor,
        prefill: MLAPrefillMetadata,
        first: int,
    ) -> torch.Tensor:
        """The latents of the prefilled tokens that are keys, `[S, L + R]`, from the call or from the pages."""
        # Latents that are stored rounded are read back, so that an answer does not depend on how a prompt was cut.
        size, end = self.dims.latent_size, first + prefill.num_tokens
        is_given = key is not None and self.kv_sharing_target_layer_name is None
        if key is not None and is_given and self.spec.resolved_kv_cache_dtype == self.spec.dtype:
            check_rows("key", key, end, (1, size), self._dtype)
            latent = key[first:end, 0]
            return latent if prefill.key_rows is None else latent[prefill.key_rows]
        slots = prefill.slots if prefill.key_rows is None else prefill.slots[prefill.key_rows]
        pages = self._latents(kv_cache)
        into = torch.empty(slots.shape[0], size, dtype=self._dtype, device=kv_cache.device)
        return slots_into(pages, slots, into, self._stored_scale(layer, pages.dtype))

    def _workspace(self, buffer: torch.Tensor | None, rows: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Latents `[rows, L + R]`, keys `[rows, H, nope + rope]` and values `[rows, H, v_head_dim]`, contiguous.

        They are views of `buffer` if it is given, and new tensors of the dtype of `like` if not.
        """
        heads, dims = self.spec.num_heads, self.dims
        sizes = (dims.latent_size,), (heads, dims.query_size), (heads, dims.v_head_dim)
        if buffer is None:
            return [like.new_empty(rows, *size) for size in sizes]
        counts = [rows * math.prod(size) for size in sizes]
        flat = buffer.view(torch.uint8)[: sum(counts) * like.element_size()].view(like.dtype)
        return [part.view(rows, *size) for part, size in zip(torch.split(flat, counts), sizes, strict=True)]

    def _expand(self, kv_c: torch.Tensor, k_pe: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the keys and values of latents."""
        nope_size = self.dims.qk_nope_head_dim
        # All heads get the same rope part. Copies of elements of 16 bytes were faster on an H200.
        rope, given = in_words(key[..., nope_size:], k_pe[:, None])
        rope.copy_(given)
        # A subclass may have an `expand` of its own.
        if type(self.projection) is DenseProjection and kv_c.is_cuda:
            self.projection.expand_into(kv_c, key[..., :nope_size], value)
            return
        # These products are further tensors, so they are made for some rows at a time.
        for start in range(0, kv_c.shape[0], _PRODUCT_ROWS):
            rows = slice(start, start + _PRODUCT_ROWS)
            key[rows, :, :nope_size], value[rows] = self.projection.expand(kv_c[rows])

    def _latents(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The pages in their stored dtype; LayoutError unless they are the layer's."""
        limits = (self.spec.block_size, self.dims.latent_size)
        shape = kv_cache.shape
        if len(shape) != 3 or shape[2] != limits[1] or limits[0] not in (None, shape[1]):
            expected = f"(num_blocks, {limits[0] or 'block_size'}, {limits[1]})"
            raise LayoutError("kv_cache", tuple(shape), f"must have the shape {expected}")
        return typed_view(kv_cache, self.spec)

    def _stored_scale(self, layer: AttentionLayer | None, stored: torch.dtype) -> float:
        """The scale of stored latents, of the engine's layer or of the layer's tensors."""
        # Only 8-bit types have scales.
        if stored.itemsize > 1:
            return 1.0
        if layer is not None:
            return kv_scales(layer, self.tensors)[0]
        if self._own_scale is None:
            self._own_scale = kv_scales(None, self.tensors)[0]
        return self._own_scale


def packed_query(q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
    """The tensor `[T, N, L + R]` that has `q_nope` and `q_pe` as adjacent views, as the layout "packed" gives them."""
    tokens, heads, rank = q_nope.shape
    size = (tokens, heads, rank + q_pe.shape[2])
    return q_nope.as_strided(size, (*q_nope.stride()[:2], 1))
