"""Runs a call: packed queries over keys that are given, or over pages.

Backends for calls: one binding for each spec and device, and metadata that a step's layers may share.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from attnplug._system.scopes import Scopes
from attnplug.core.errors import BatchError, NoBackendError
from attnplug.core.interface.answers import answer
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.precision import without_autocast
from attnplug.core.spec import LayerSpec, Phase
from attnplug.integrations.binding import Binding, direct_step, version_of
from attnplug.integrations.flash_attn.pages import Pages
from attnplug.integrations.flash_attn.request import Request
from attnplug.integrations.flash_attn.steps import Ints, Lengths, paged_step
from attnplug.integrations.ordering import run_in_order
from attnplug.registry.default import select
from attnplug.registry.selection.decision import Decision
from attnplug.registry.selection.policy import phase_rule_for, rule_sets

_Function = TypeVar("_Function", bound=Callable[..., Any])

NAME = "flash_attn"
"""The layer name of all calls, for rules by name."""
_MOST_BINDINGS = 256


def untraced(function: _Function) -> _Function:
    """`function`, which torch.compile runs outside of its graphs."""
    # torch.compile would trace the selection too. `torch.compiler.disable` as a
    # decorator would import the compiler, 1.5 s, for callers that never compile.

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            disable: Any = torch.compiler.disable
            return disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("_Function", call)


class _Thread(threading.local):
    """The bindings of one thread."""

    # Each thread has its own, because builders keep buffers.

    def __init__(self) -> None:
        self.bindings: OrderedDict[Hashable, Binding] = OrderedDict()


_thread = _Thread()
_STEPS: Scopes[dict[Hashable, tuple[Any, ...]]] = Scopes("attnplug_one_step")
"""The metadata of the open `one_step` blocks."""


def bind(spec: LayerSpec, device: torch.device, slopes: torch.Tensor | None, *, is_decode: bool) -> Binding:
    """The impl and builder for `spec` under the current selection rules; made on first use.

    NoBackendError, BackendUnavailableError, PolicyError: see `attnplug.select`.
    """
    phase = None
    if phase_rule_for(rule_sets(), spec, NAME):
        phase = Phase.DECODE if is_decode else Phase.PREFILL
    decision = select(spec, device, phase, layer_name=NAME)
    key = (decision.get_backend_cls(), spec, device, decision.options, version_of(slopes))
    found = _thread.bindings.get(key)
    learned = {"alibi_slopes": slopes}
    if found is None:
        found = _thread.bindings[key] = Binding(decision, NAME, device, learned)
        if len(_thread.bindings) > _MOST_BINDINGS:
            _thread.bindings.popitem(last=False)
    elif slopes is not None:
        found.read(learned)
    _thread.bindings.move_to_end(key)
    return found


def decisions() -> tuple[Decision, ...]:
    """The decisions that this thread's calls use, the latest last, with the reasons for and against each backend."""
    return tuple(binding.decision for binding in _thread.bindings.values())


@contextlib.contextmanager
def one_step() -> Iterator[None]:
    """Calls inside share metadata where they give the same tensors of lengths and tables.

    The caller promises that nothing writes to these tensors meanwhile. A model's forward is such a step: its layers
    differ in queries, keys and values alone. Without it each call reads the lengths again, and calls of
    `flash_attn_varlen_func` wait for the device to copy `cu_seqlens_q` to the host.
    """
    with _STEPS.block({}):
        yield


def shared(what: Hashable, tensors: tuple[torch.Tensor | None, ...], make: Callable[[], Any]) -> Any:
    """`make()`, or inside of `one_step` what it returned for the same `what` and the same tensors."""
    steps = _STEPS.get()
    if not steps:
        return make()
    step = steps[0]
    key = (what, *(id(tensor) for tensor in tensors))
    if key not in step:
        # The tensors are kept, so that no other tensor can get the id of one of them within the step.
        step[key] = (tensors, make())
    return step[key][1]


def built(
    binding: Binding,
    what: Hashable,
    tensors: tuple[torch.Tensor | None, ...],
    make: Callable[[], CommonAttentionMetadata],
) -> Any:
    """The binding's metadata for `make()`; inside of `one_step` that of its last call, if `what` and the tensors are equal."""
    # Only the last one is kept, because metadata is valid until its builder builds again.
    steps = _STEPS.get()
    if not steps:
        return binding.build(make())
    step = steps[0]
    key = (what, *(id(tensor) for tensor in tensors))
    found = step.pop(binding, None)
    if found is None or found[0] != key:
        found = (key, binding.build(make()), tensors)
    step[binding] = found
    return found[1]


_log = logging.getLogger("attnplug")


def attend_given(
    asked: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_lens: Ints, key_lens: Ints
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Packed queries `[T, H, D]` over packed keys: outputs `[T, H, Dv]`, and their LSE `[T, H]` if asked.

    Rows past those of the requests are zeros.
    """
    return _attend_read(asked, q, k, v, lambda: (k, v), query_lens, key_lens)


def _attend_read(
    asked: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    query_lens: Ints,
    key_lens: Ints,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend_given` over the keys and values that `read` returns, once nothing can refuse the call.

    `k [..., Hkv, D]` and `v [..., Hkv, Dv]` have their heads and sizes.
    """
    output, lse = _outputs(asked, q, v.shape[-1], query_lens)
    if not query_lens.sum():
        read()
        return output, lse
    spec = asked.spec(q, k, v, None)
    binding = bind(spec, q.device, asked.slopes, is_decode=bool((query_lens <= 1).all()))
    metadata = built(
        binding,
        (query_lens.tobytes(), key_lens.tobytes()),
        (),
        lambda: direct_step(query_lens, key_lens, key_lens, spec.causal, q.device),
    )
    keys, values = read()
    with without_autocast(q.device):
        run_in_order(binding.impl.forward, binding.layer, q, keys, values, None, metadata, output, lse)
    return output, lse


def attend_pages(
    asked: Request,
    q: torch.Tensor,
    pages: Pages,
    others: Iterable[Pages],
    query_lens: Ints,
    lengths: Lengths,
    given: tuple[torch.Tensor | None, ...],
    write: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Packed queries over pages, or over the first of `others` where no backend serves those; as `attend_given`.

    `others` are the same caches in other pages, made on first use. `given` are the caller's tensors of lengths and tables: inside of `one_step` they identify the metadata.
    `write` writes the call's new keys. It runs once a backend is bound and its metadata built: a refused call writes
    nothing.
    """
    if pages.as_one() is None:
        return _attend_copied(asked, q, pages, query_lens, lengths, write)
    output, lse = _outputs(asked, q, pages.values.shape[3], query_lens)
    if not query_lens.sum():
        write()
        return output, lse
    try:
        binding, pages = _bind_pages(asked, q, pages, others, is_decode=bool((query_lens <= 1).all()))
    except NoBackendError:
        # Rows may be of a size that no backend has pages of, and cannot be cut into others.
        if not pages.are_rows:
            raise
        return _attend_copied(asked, q, pages, query_lens, lengths, write)
    causal = binding.decision.spec.causal
    needs = binding.decision.get_backend_cls().get_builder_cls().needs_host_seq_lens
    # Lengths may be an int, and tables may follow from the shape of the caches: no tensor of `given` tells them.
    known = None if lengths.host is None else lengths.host.tobytes()
    metadata = built(
        binding,
        (query_lens.tobytes(), known, lengths.added, pages.block_size, pages.capacity),
        given,
        lambda: paged_step(query_lens, lengths, pages, causal, needs),
    )
    write()
    with without_autocast(q.device):
        cache = pages.as_one()
        run_in_order(binding.impl.attend, binding.layer, q, None, None, cache, metadata, output, lse)
    return output, lse


def _outputs(
    asked: Request, q: torch.Tensor, size: int, query_lens: Ints
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs and LSE for a backend to fill; zeros and -inf where no request has rows."""
    whole = int(query_lens.sum()) == q.shape[0]
    output = (q.new_empty if whole else q.new_zeros)((q.shape[0], q.shape[1], size))
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32) if asked.with_lse else None
    return output, lse


def _bind_pages(
    asked: Request, q: torch.Tensor, pages: Pages, others: Iterable[Pages], *, is_decode: bool
) -> tuple[Binding, Pages]:
    """The first of the ways that a backend serves; the error for the first of them if none is served."""
    try:
        return _bind(asked, q, pages, is_decode=is_decode), pages
    except NoBackendError:
        for other in others:
            with contextlib.suppress(NoBackendError):
                return _bind(asked, q, other, is_decode=is_decode), other
        raise


def _bind(asked: Request, q: torch.Tensor, pages: Pages, *, is_decode: bool) -> Binding:
    spec = asked.spec(q, pages.keys, pages.values, pages.block_size)
    binding = bind(spec, q.device, asked.slopes, is_decode=is_decode)
    backend = binding.decision.get_backend_cls()
    if "NHD" not in answer(backend, "supported_kv_cache_layouts"):
        limit = f"cannot be read by {backend.get_name()}, and the caches of flash-attn have it"
        raise BatchError("layout", "NHD", limit, "choose another backend by attnplug.use(...)")
    return binding


@functools.cache
def _warn_of_copies() -> None:
    """Say once that calls copy what they read."""
    _log.warning(
        "flash_attn: each call copies the keys and values that it reads, because k_cache and v_cache are no "
        "equal views of one allocation, or their rows are no pages; allocate torch.empty(2, ...) and pass its halves"
    )


def _attend_copied(
    asked: Request,
    q: torch.Tensor,
    pages: Pages,
    query_lens: Ints,
    lengths: Lengths,
    write: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same over copies of the keys and values, for caches that no backend can view as one."""
    _warn_of_copies()
    key_lens = lengths.on_host()

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        write()
        slots = pages.slots_of(key_lens)
        blocks, offsets = slots // pages.block_size, slots % pages.block_size
        return pages.keys[blocks, offsets], pages.values[blocks, offsets]

    return _attend_read(asked, q, pages.keys, pages.values, read, query_lens, key_lens)
