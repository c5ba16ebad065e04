"""Backends of state layers with one mistake each, in eight families, and right ones that differ in form."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from plain_state import PlainImpl, PlainStates, changed

from attnplug.backends.torch_native.state.impl import TorchStateImpl
from attnplug.backends.torch_native.state.recurrence import many_tokens

__all__ = ["LARGE", "MUTANTS", "RIGHT"]

right = PlainImpl
MUTANTS: dict[str, dict[str, type[PlainStates]]] = {}
"""By family and name: a backend that the kit must catch."""


def impl(**methods: Any) -> type[PlainStates]:
    return changed(methods)


def builder(**methods: Any) -> type[PlainStates]:
    return changed(None, methods)


def late_decay(self, q, k, v, g, b, s):
    s = self.decayed(s + k[:, :, None] * self.update(k, v, b, s)[:, None], g)
    return self.answer(q, s), s


def early_output(self, q, k, v, g, b, s):
    s = self.decayed(s, g)
    out = self.answer(q, s)
    return out, s + k[:, :, None] * self.update(k, v, b, s)[:, None]


def early_delta(self, q, k, v, g, b, s):
    update = self.update(k, v, b, s)
    s = self.decayed(s, g) + k[:, :, None] * update[:, None]
    return self.answer(q, s), s


def beta_on_value(self, k, v, b, s):
    return v if b is None else b[:, None] * v - torch.einsum("hk,hkv->hv", k, s)


MUTANTS["order"] = {
    "decay after the update": impl(token=late_decay),
    "output before the update": impl(token=early_output),
    "delta before the decay": impl(token=early_delta),
    "beta on the value only": impl(update=beta_on_value),
    "beta twice": impl(beta=lambda self, b: b * b),
    "beta ignored": impl(beta=lambda self, b: torch.ones_like(b)),
    "delta ignored": impl(update=lambda self, k, v, b, s: v if b is None else b[:, None] * v),
    "beta at most 1": impl(beta=lambda self, b: b.clamp(max=1.0)),
}


def modulo(self, q, k):
    heads = torch.arange(self.spec.num_heads) % self.spec.num_kv_heads
    return q[heads], k[heads]


def first_group(self, q, k):
    q, k = right.shared(self, q, k)
    return q, k[:1].expand_as(k)


def transposed(self, page):
    page = right.loaded(self, page)
    return page.mT.contiguous() if page.ndim == 3 and page.shape[1] == page.shape[2] else page


def reinterpreted(self, page):
    found = right.loaded(self, page)
    return found if found.ndim == 2 else found.transpose(1, 2).reshape(found.shape)


MUTANTS["sizes"] = {
    "value heads take key heads h % Hk": impl(shared=modulo),
    "all heads have the first key": impl(shared=first_group),
    "K and V swapped where they are equal": impl(loaded=transposed),
    "K and V swapped in memory": impl(loaded=reinterpreted),
    "K beyond 16 left out": impl(
        shared=lambda self, q, k: right.shared(self, q, k * (torch.arange(k.shape[-1]) < 16))
    ),
    "values of one element are zero": impl(
        answer=lambda self, q, s: right.answer(self, q, s) * (s.shape[-1] > 1)
    ),
    "scale ignored": impl(scale_of=lambda self: 1.0),
    "scale of K": impl(scale_of=lambda self: self.spec.head_size**-0.5),
    "scale of V": impl(scale_of=lambda self: self.spec.head_size_v**-0.5),
    "scale twice": impl(scale_of=lambda self: self.spec.scale**2),
}


def gate_of(change):
    return lambda self, decay, row, run: change(right.gate(self, decay, row, run))


def difference_of_sums(self, decay, row, run):
    """The sum up to a token less that up to the token before, as chunked forms have it."""
    total = decay[run.begin : run.end].cumsum(0)
    own = total.diff(dim=0, prepend=torch.zeros_like(total[:1]))
    return right.gate(self, own, row - run.begin, run)


MUTANTS["decay"] = {
    "differences of sums": impl(gate=difference_of_sums),
    "exp of exp": impl(gate=gate_of(torch.exp)),
    "factor taken for a logarithm": impl(decayed=lambda self, s, g: s * (1 + g)[..., None]),
    "log2": impl(gate=gate_of(lambda g: g * math.log(2))),
    "row decay of the first row": impl(gate=gate_of(lambda g: g[:, :1])),
    "row decay as the mean of its rows": impl(gate=gate_of(lambda g: g.mean(1, keepdim=True))),
    "sums in bfloat16": impl(gate=gate_of(lambda g: g.to(torch.bfloat16).float())),
    "the next head": impl(gate=gate_of(lambda g: g.roll(-1, 0))),
    "the next token": impl(
        gate=lambda self, d, row, run: right.gate(self, d, min(row + 1, run.end - 1), run)
    ),
    "ignored": impl(gate=gate_of(torch.zeros_like)),
    "clamped in decodes only": impl(
        gate=lambda self, d, row, run: right.gate(self, d, row, run).clamp(
            min=-1e-3 if run.end - run.begin == 1 else None
        )
    ),
}


def quotients(self, q, k, v, g, b, s):
    """Divides by the decays of a chunk, which overflow in float32 for strong ones."""
    total = g.exp() ** 4
    s = s * (total / g.exp() ** 3)[..., None]
    s = s + k[:, :, None] * self.update(k, v, b, s)[:, None]
    return self.answer(q, s), s


MUTANTS["norm and form"] = {
    "quotients of exponentials": impl(token=quotients),
    "normalises all heads at once": impl(
        shared=lambda self, q, k: right.shared(self, q, k / k.norm() * self.spec.num_kv_heads**0.5)
    ),
    "unit norm of keys without the delta rule": impl(
        shared=lambda self, q, k: right.shared(self, q, k / k.norm(dim=-1, keepdim=True))
    ),
    "epsilon of 1e-2 in a second norm": impl(
        shared=lambda self, q, k: right.shared(self, q, k * (k.square().sum(-1, keepdim=True) + 1e-2).rsqrt())
    ),
}


def start(change):
    """Another start where a state is given."""

    def first(self, place, run, runs):
        return change(self, place, run, runs)

    return impl(first=first)


def page_of_new(self, place, run, runs):
    return self.loaded(max(run.read, 0) or next((page for _, page in run.stores), 1))


def neighbour(self, place, run, runs):
    return right.first(self, 0, runs[(place + 1) % len(runs)], runs)


def has_state_of_first(self, place, run, runs):
    if runs[0].read < 0:
        return torch.zeros(self.states.shape[1:])
    return self.loaded(max(run.read, 0)) if run.read >= 0 else torch.zeros(self.states.shape[1:])


def null_page(self, place, run, runs):
    return self.loaded(max(run.read, 0))


def second_chunk_zeros(self, place, run, runs):
    long = run.end - run.begin > 1
    return torch.zeros(self.states.shape[1:]) if long else right.first(self, place, run, runs)


def decodes_from_zeros(self, place, run, runs):
    long = run.end - run.begin > 1
    return right.first(self, place, run, runs) if long else torch.zeros(self.states.shape[1:])


MUTANTS["start"] = {
    "reads its page though -1": start(page_of_new),
    "zeros though given": start(lambda self, place, run, runs: torch.zeros(self.states.shape[1:])),
    "later chunks from zeros": start(second_chunk_zeros),
    "decodes from zeros": start(decodes_from_zeros),
    "the neighbour's state": start(neighbour),
    "has-state of the batch's first request": start(has_state_of_first),
    "the null page for -1": start(null_page),
    "reads page 1 for the first request": start(
        lambda self, place, run, runs: (
            self.loaded(1) if place == 0 and run.read > 0 else right.first(self, place, run, runs)
        )
    ),
}


def last_of_batch(self, row, run, place, runs):
    return right.page_of(self, row, run, place, runs) if row == runs[-1].end - 1 else -1


def last_only(self, row, run, place, runs):
    return right.page_of(self, row, run, place, runs) if row == run.end - 1 else -1


def off_by_one(self, row, run, place, runs):
    return (
        dict(run.stores).get(row + 2, -1)
        if row + 2 <= run.end and len(run.stores) > 1
        else right.page_of(self, row, run, place, runs)
    )


def neighbours_read_page(self, row, run, place, runs):
    page = right.page_of(self, row, run, place, runs)
    other = runs[(place + 1) % len(runs)].read
    return other if page >= 0 and other > 0 and place != (place + 1) % len(runs) and run.read < 0 else page


def before_update(self, q, k, v, g, b, s):
    out, after = right.token(self, q, k, v, g, b, s)
    self.before = s
    return out, after


def store_before(self, page, state):
    right.store(self, page, getattr(self, "before", state))


def every_token(self, row, run, place, runs):
    page = right.page_of(self, row, run, place, runs)
    return page if page >= 0 or not run.stores else run.stores[-1][1]


def shifted_drafts(self, row, run, place, runs):
    pages = [page for _, page in run.stores]
    found = right.page_of(self, row, run, place, runs)
    return (
        pages[(pages.index(found) + 1) % len(pages)]
        if found >= 0 and len(pages) == run.end - run.begin > 1
        else found
    )


MUTANTS["store"] = {
    "only the last token of the batch": impl(page_of=last_of_batch),
    "only the last token of a request": impl(page_of=last_only),
    "borders off by one": impl(page_of=off_by_one),
    "in the read page of another request": impl(page_of=neighbours_read_page),
    "before the update": impl(token=before_update, store=store_before),
    "draft pages shifted by one": impl(page_of=shifted_drafts),
    "in bfloat16 for float32": impl(
        store=lambda self, page, s: right.store(self, page, s.to(torch.bfloat16).float())
    ),
    "never": impl(page_of=lambda self, row, run, place, runs: -1),
    "added to what the page has": impl(
        store=lambda self, page, s: right.store(self, page, s + self.states[page].float().nan_to_num())
    ),
    "the next page too": impl(
        store=lambda self, page, s: [
            right.store(self, min(page + at, len(self.states) - 1), s) for at in (0, 1)
        ]
    ),
}


def crossing(self, x, state, place):
    if place == 0 and getattr(self, "last", None) is not None and not bool(state.any()):
        state = self.last
    out, state = right.convolve(self, x, state, place)
    self.last = state
    return out, state


def padded_window(self, x, state, place):
    out, after = right.convolve(self, x, state, place)
    return out, torch.cat([after[:, :-1], torch.zeros_like(x)[:, None]], 1)


def forgets(self, x, state, place):
    out, after = right.convolve(self, x, state, place)
    if place < after.shape[1] - 1 and after.shape[1] > 1:
        after = torch.cat([torch.zeros_like(after[:, : -(place + 1)]), after[:, -(place + 1) :]], 1)
    return out, after


def activated_state(self, x, state, place):
    out, after = right.convolve(self, x, state, place)
    return out, torch.cat([after[:, :-1], out[:, None]], 1)


MUTANTS["convolution"] = {
    "flipped taps": impl(weight=lambda self: right.weight(self).flip(1)),
    "one column late": impl(weight=lambda self: right.weight(self).roll(1, 1)),
    "window of padding": impl(convolve=padded_window),
    "short requests lose older columns": impl(convolve=forgets),
    "crosses requests": impl(convolve=crossing),
    "bias dropped": impl(bias=lambda self: 0.0),
    "activation dropped": impl(activated=lambda self, y: y),
    "activation always": impl(activated=lambda self, y: torch.nn.functional.silu(y)),
    "state of the activated output": impl(convolve=activated_state),
}


def write_null(self, runs):
    for run in runs:
        if not run.stores:
            self.states[1] = 0.5


def over_the_end(common):
    return None


def whole_batch(self, runs):
    self.output[runs[-1].end :] = 0.0


def sorted_runs(self, common):
    """Reads in order of pages, and not of requests."""
    runs = type(self).__mro__[1].runs(self, common)
    reads = sorted(run.read for run in runs)
    return [run._replace(read=read) for run, read in zip(runs, reads, strict=True)]


def without_empty(self, common):
    """Forgets that requests without tokens have a row of `state_pages`."""
    starts, reads = common.query_start_loc_cpu.tolist(), common.state_pages_cpu.tolist()
    runs = type(self).__mro__[1].runs(self, common)
    filled = [at for at, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]
    return (
        [run._replace(read=reads[place]) for place, run in enumerate(runs)]
        if len(filled) < len(reads)
        else runs
    )


def first_build_only(self, common):
    if not hasattr(self, "kept"):
        self.kept = type(self).__mro__[1].runs(self, common)
        return self.kept
    runs = type(self).__mro__[1].runs(self, common)
    return [run._replace(read=old.read) for run, old in zip(runs, self.kept, strict=False)] + runs[
        len(self.kept) :
    ]


def tails(self, common):
    """Stores only after multiples of 4 tokens of a step, as if chunks had to be whole."""
    runs = type(self).__mro__[1].runs(self, common)
    return [
        run._replace(
            stores=tuple((e, p) for e, p in run.stores if (e - run.begin) % 4 == 0 or e - run.begin < 4)
        )
        for run in runs
    ]


def padding_stores(self, common):
    runs = type(self).__mro__[1].runs(self, common)
    return [run if run.stores else run._replace(stores=((run.end, 2),)) for run in runs]


def inputs_changed(self, q, k):
    q, k = right.shared(self, q, k)
    return q, k.add_(0.0)


def clobbers(self, runs):
    self.states[runs[0].read if runs and runs[0].read > 0 else 1] *= 1.0 if runs and runs[0].read > 0 else 0.0


MUTANTS["serving"] = {
    "steps of padding write page 1": impl(end=write_null),
    "steps of padding store a state": builder(runs=padding_stores),
    "rows of padding are written": impl(end=whole_batch),
    "requests read in order of pages": builder(runs=sorted_runs),
    "idle requests have no row": builder(runs=without_empty),
    "pages of the first step": builder(runs=first_build_only),
    "tails of chunks are not stored": builder(runs=tails),
    "the read page is cleared": impl(
        end=lambda self, runs: [
            self.states[run.read].zero_()
            for run in runs
            if run.read > 0 and run.read not in dict(run.stores).values()
        ]
    ),
}


def in_chunks(chunk):
    """TORCH's own form with chunks of a size."""

    class Chunks(TorchStateImpl):
        def _heads(self, parts):
            return super()._heads(parts)

    def run(self, given, run, state, states, output):
        for begin, end, page in run.chunks():
            parts = given.rows(slice(begin, end), state.dtype)
            if parts.key is None:
                out, last = self._convolve(parts.query[None], state[None])
                out, state = out[0], last[0]
            else:
                out, state = many_tokens(*self._heads(parts), state, chunk)
            output[begin:end] = out.to(output.dtype)
            if page >= 0:
                states[page] = state.to(states.dtype)

    Chunks._run_longer = run
    from attnplug.backends.torch_native.backend import TorchStateBackend

    return type("Chunked", (TorchStateBackend,), {"get_impl_cls": classmethod(lambda cls: Chunks)})


def swapped_load(self, page):
    found = self.states[page].float()
    return (
        found.clone()
        if found.ndim == 2
        else found.reshape(found.shape[0], found.shape[2], found.shape[1]).mT.clone()
    )


def swapped_store(self, page, state):
    state = state.to(self.states.dtype)
    self.states[page] = state if state.ndim == 2 else state.mT.reshape(state.shape)


def log2_gate(self, s, g):
    return s * torch.exp2(g / math.log(2))[..., None]


def solved(self, k, v, b, s):
    if b is None:
        return v
    return torch.linalg.solve(
        torch.eye(1).expand(len(k), 1, 1), (b[:, None] * (v - (k[:, None] @ s)[:, 0]))[:, None]
    )[:, 0]


def densely(*names: str) -> type[PlainStates]:
    """Reads these arguments as if their numbers lay side by side, from where they begin."""

    def advance(self, query, key, value, states, attn_metadata, output, **gates):
        given = {"query": query, "key": key, "value": value, **gates}
        for name in names:
            if (each := given[name]) is not None and each.numel():
                flat = torch.as_strided(each, (each.numel(),), (1,), each.storage_offset())
                given[name] = flat.view(each.shape)
        tensors = given.pop("query"), given.pop("key"), given.pop("value")
        right.advance(self, *tensors, states, attn_metadata, output, **given)

    return impl(advance=advance)


MUTANTS["strides"] = {
    "strides of queries ignored": densely("query"),
    "strides of values ignored": densely("value"),
    "strides of gates ignored": densely("decay", "beta"),
}


def first_32(self, place, run, runs):
    return right.first(self, place, run, runs) if place < 32 else torch.zeros(self.states.shape[1:])


def keys_of_large_groups(self, q, k):
    q, k = right.shared(self, q, k)
    return q, k * 0.9 if self.spec.num_heads // self.spec.num_kv_heads > 8 else k


def channels_to_1024(self, x, state, place):
    out, after = right.convolve(self, x, state, place)
    return out * (torch.arange(len(out)) < 1024), after


LARGE: dict[str, tuple[str, type[PlainStates]]] = {
    "requests past the 32nd start from zeros": ("large-linear-head-float32-h4", impl(first=first_32)),
    "prompts start anew after 256 tokens": (
        "large-delta-row-float32-h4",
        impl(
            gate=lambda self, decay, row, run: (
                right.gate(self, decay, row, run) - (1e3 if row - run.begin == 256 else 0.0)
            )
        ),
    ),
    "heads past the 32nd are zero": (
        "prompts-linear-row-float32-h40",
        impl(answer=lambda self, q, s: right.answer(self, q, s) * (torch.arange(len(q)) < 32)[:, None]),
    ),
    "keys past 128 left out": (
        "prompts-linear-head-float32-h16",
        impl(shared=lambda self, q, k: right.shared(self, q, k * (torch.arange(k.shape[-1]) < 128))),
    ),
    "values past 128 left out": (
        "prompts-delta-head-float32-h2x2-d16x192",
        impl(answer=lambda self, q, s: right.answer(self, q, s) * (torch.arange(s.shape[-1]) < 128)),
    ),
    "keys of more than 8 heads": ("prompts-delta-row-float32-h16", impl(shared=keys_of_large_groups)),
    "channels past 1024 are zero": ("prompts-conv3-float32-h2050", impl(convolve=channels_to_1024)),
}
"""By name, the start of the check that catches it, and a backend that is right for small sizes."""


def own_tensor(self, query, key, value, states, attn_metadata, output, **gates):
    own = torch.full_like(output, torch.nan)
    right.advance(self, query, key, value, states, attn_metadata, own, **gates)
    return own[: attn_metadata.common.query_start_loc_cpu[-1]]


def own_padded_tensor(self, query, key, value, states, attn_metadata, output, **gates):
    own = torch.full_like(output, torch.nan)
    right.advance(self, query, key, value, states, attn_metadata, own, **gates)
    return own


RIGHT: dict[str, type] = {
    "token by token": PlainStates,
    **{f"chunks of {size}": in_chunks(size) for size in (1, 16, 32, 64, 128)},
    "[V, K] storage": impl(loaded=swapped_load, store=swapped_store),
    "hands on a tensor of its own": impl(advance=own_padded_tensor),
    "hands on the step's rows in a tensor of its own": impl(advance=own_tensor),
    "log2 decays": impl(decayed=log2_gate),
    "solves systems": impl(update=solved),
    "normalises keys of the delta rule twice": impl(
        shared=lambda self, q, k: right.shared(
            self, q, k / k.norm(dim=-1, keepdim=True) if self.spec.state.rule == "delta" else k
        )
    ),
    "scratch in the null page": impl(end=lambda self, runs: self.states[0].fill_(7.0)),
    "outputs in reversed order of requests": builder(
        runs=lambda self, common: type(self).__mro__[1].runs(self, common)[::-1]
    ),
    "computes in float64": impl(
        token=lambda self, q, k, v, g, b, s: tuple(
            each.float()
            for each in right.token(
                self,
                q.double(),
                k.double(),
                v.double(),
                g.double(),
                None if b is None else b.double(),
                s.double(),
            )
        )
    ),
    "scales the answer": impl(
        scale_of=lambda self: 1.0, answer=lambda self, q, s: self.spec.scale * right.answer(self, q, s)
    ),
    "decays keys of states in place": impl(decayed=lambda self, s, g: s.mul_(g.exp()[..., None])),
}
