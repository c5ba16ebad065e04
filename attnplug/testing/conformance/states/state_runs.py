"""Serves requests on a backend's state layer, step by step, and compares each output with that of the oracle."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.interface.impl_and_builder import make_builder
from attnplug.core.spec import LayerSpec
from attnplug.core.state.caches import state_cache_for
from attnplug.core.state.impl import StateImpl
from attnplug.runtime.caches.block_pool import BlockPool
from attnplug.runtime.plan.state_plan import StatePlan
from attnplug.runtime.states.state_step import StateStep
from attnplug.runtime.states.state_table import StateTable
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError, SkipKind, error_context
from attnplug.testing.conformance.harness import make_impl, raw_bytes
from attnplug.testing.conformance.mistakes.state_mistakes import StateStepOf, other_states, recognise_state
from attnplug.testing.conformance.states.state_cases import Decays, draw_inputs, state_weights
from attnplug.testing.conformance.states.state_graphs import StateGraph
from attnplug.testing.conformance.target import Target
from attnplug.testing.state_oracle import StateInputs, first_state, reference_states

NAME = "model.layers.3.linear_attn"
_PAGES, _PADDING = 64, 3
_FLOOR, _TIMES = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 4e-2}, 8.0
_OF_HEADS, _OF_TOKENS = 0.25, 0.05
"""A row smaller than these parts of the largest row of its token, or of its head, is compared with them."""


@dataclasses.dataclass(slots=True, eq=False)
class ServedRequest:
    """A request: the inputs of all its tokens, the right outputs, the states after each token, and how far it is."""

    inputs: StateInputs
    right: torch.Tensor
    states: list[torch.Tensor]
    done: int = 0


class StateServing:
    """One layer with its pages, which begin with NaN: a state that no request has must reach nothing.

    Args:
        target: the backend.
        spec: the layer.
        decays: see `draw_inputs`.
        in_place: whether steps write the pages that they read.
        view: gives a tensor of equal numbers in place of each input of a step.
    """

    def __init__(
        self,
        target: Target,
        spec: LayerSpec,
        *,
        decays: Decays = "weak",
        in_place: bool = True,
        view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self.target, self.spec, self.view = target, spec, view
        self.decays: Decays = decays
        device, cache = target.torch_device, state_cache_for(spec)
        if cache is None:
            raise CheckSkipped(f"{target.name} serves no layer with a state", SkipKind.LAYER)
        with error_context("from_spec, of a layer that validate_configuration accepts"):
            options = {} if target.own_options is None else {"options": target.own_options}
            impl = make_impl(target.backend, spec, state_weights(spec, device), NAME, **options)
        if not isinstance(impl, StateImpl):
            raise ConformanceError(f"get_impl_cls gives {type(impl).__name__}, which is no StateImpl")
        self.impl, layer = impl, cast(Any, types.SimpleNamespace(impl=impl))
        with error_context("making the builder"):
            config = BuilderConfig(layers={NAME: layer}, num_speculative_tokens=_drafts(spec))
            page: Any = cache
            self.builder = make_builder(target.backend, page, [NAME], config, torch.device(device))
        self.pages = torch.full(
            (_PAGES, *cache.shape), torch.nan, dtype=getattr(torch, cache.dtype), device=device
        )
        plan = StatePlan({NAME: cache}, _PAGES, _drafts(spec), spec.block_size)
        self.pool = BlockPool(_PAGES)
        self.table = StateTable(plan, self.pool, in_place=in_place, device=device)
        self.requests: dict[str, ServedRequest] = {}
        self.graph: StateGraph | None = None
        """Runs later steps, if there is one."""

    def add(self, name: str, tokens: int, seed: int, prefix: str | None = None, shared: int = 0) -> None:
        """Add a request, which may start from a checkpoint of another one with the same first `shared` tokens."""
        inputs = draw_inputs(self.spec, tokens, seed, decays=self.decays)
        page = None
        if prefix is not None:
            own = self.requests[prefix].inputs.rows(slice(0, shared))
            inputs, page = (
                own.joined(inputs.rows(slice(shared, tokens))),
                self.table.checkpoints(prefix)[shared],
            )
        right, states = reference_states(self.spec, inputs)
        every = [first_state(self.spec), *states.unbind()]
        self.requests[name] = ServedRequest(inputs, right, every, shared)
        self.table.add_request(name, shared, page)

    def remove(self, name: str) -> None:
        """Remove a request; its pages may then be those of others."""
        self.table.remove_request(name)
        del self.requests[name]

    def step(
        self,
        counts: Mapping[str, int],
        *,
        drafts: Mapping[str, int] | None = None,
        accepted: Mapping[str, int] | None = None,
        runs: int = 1,
    ) -> None:
        """Run a step `runs` times, compare its outputs and the pages of others, and finish it.

        Drafts that are not accepted are other tokens than the right ones.

        Raises:
            ConformanceError: an output is wrong, a page of nobody in the step changed, or rows of padding were written.
        """
        accepted = {**counts, **(accepted or {})}
        parts = [self._part(name, count, accepted[name]) for name, count in counts.items()]
        step = self.table.step(counts, drafts)
        first: torch.Tensor | None = None
        for number in range(runs):
            # A kernel may return a tensor of its own, which a caller without an output gets as it is.
            out = self.run(step, parts[0].joined(*parts[1:]), gives_output=not number)
            if first is not None and not torch.equal(out, first):
                raise ConformanceError(
                    "a step that is run again, on pages that it does not overwrite, gives other numbers"
                )
            first = out
            self._compare(counts, accepted, out)
        self.table.finish_step(accepted)
        for name in counts:
            self.requests[name].done += accepted[name]

    def run(self, step: StateStep, inputs: StateInputs, *, gives_output: bool = True) -> torch.Tensor:
        """The outputs of a step on the host, after checks of the pages and of padding rows of NaN."""
        padding: dict[str, Any] = {
            name: None
            if each is None
            else torch.full((_PADDING, *each.shape[1:]), torch.nan, dtype=each.dtype)
            for name, each in inputs.by_token().items()
        }
        device, tokens = self.pages.device, inputs.tokens
        padded = inputs.joined(dataclasses.replace(inputs, **padding)).by_token()
        given = {name: None if each is None else self.view(each.to(device)) for name, each in padded.items()}
        kept = {name: None if each is None else each.clone() for name, each in given.items()}
        value = given["query"] if given["value"] is None else given["value"]
        output = torch.full(value.shape, torch.nan, dtype=value.dtype, device=device)  # type: ignore[union-attr]
        slots = step.common.slot_mapping.tolist()
        others = sorted({*range(1, self.pages.shape[0])} - {*slots})
        before = raw_bytes(self.pages[others])
        if self.graph is not None:
            self.graph.run(step, given, output)
        else:
            made = self._forward(step, given, output if gives_output else None)
            if made.shape != output.shape or made.dtype != output.dtype:
                found = f"{made.dtype} {tuple(made.shape)} where {output.dtype} {tuple(output.shape)}"
                raise ConformanceError(f"forward gives an output of {found} is right")
            output[:tokens] = made[:tokens]
        if not torch.equal(raw_bytes(self.pages[others]), before):
            raise ConformanceError("a step changed a page that is in none of its slots")
        for name, each in given.items():
            if each is not None and not torch.equal(raw_bytes(each), raw_bytes(kept[name])):  # type: ignore[arg-type]
                raise ConformanceError(f"a step changed its argument {name}")
        if not bool(output[tokens:].isnan().all()):
            raise ConformanceError(f"rows past the {tokens} tokens of a step were written")
        return output[:tokens].cpu()

    def _forward(
        self, step: StateStep, given: Mapping[str, Any], output: torch.Tensor | None
    ) -> torch.Tensor:
        with error_context("build"):
            metadata = self.builder.build(0, step.common)
        with error_context("forward"), torch.no_grad():
            call = given["query"], given["key"], given["value"], self.pages, metadata, output
            return self.impl.forward(None, *call, decay=given["decay"], beta=given["beta"])

    def _part(self, name: str, count: int, good: int) -> StateInputs:
        request = self.requests[name]
        part = request.inputs.rows(list(range(request.done, request.done + count)))
        for tensor in (part.query, part.key, part.value):
            if tensor is not None:
                tensor[good:] = 3.0
        return part

    def _compare(self, counts: Mapping[str, int], accepted: Mapping[str, int], out: torch.Tensor) -> None:
        at = 0
        for place, (name, count) in enumerate(counts.items()):
            request, good = self.requests[name], accepted[name]
            rows = slice(request.done, request.done + good)
            found, right = out[at : at + good], request.right[rows]
            at += count
            inputs, state = request.inputs.rows(rows), request.states[request.done]
            terms = _terms(self.spec, inputs, request.states[request.done + 1 :][:good])
            bound = _bound(self.spec, inputs, state, right, terms)
            if good and not is_close(found, right, bound, terms):
                self._fail(
                    name,
                    place,
                    counts,
                    StateStepOf(self.spec, inputs, state, self._others(name, counts)),
                    found,
                    bound,
                    terms,
                )

    def _others(self, name: str, counts: Mapping[str, int]) -> dict[str, torch.Tensor]:
        own = self.requests[name]
        states = {other: self.requests[other] for other in counts if other != name}
        return other_states(
            self.spec, own.states[: own.done + 1], {n: each.states[each.done] for n, each in states.items()}
        )

    def _fail(
        self,
        name: str,
        place: int,
        counts: Mapping[str, int],
        step: StateStepOf,
        found: torch.Tensor,
        bound: float,
        terms: torch.Tensor | None,
    ) -> None:
        right = self.requests[name].right[self.requests[name].done :][: found.shape[0]]
        errors = _errors(found, right, terms)
        worst = int(errors.flatten(1).amax(1).argmax())
        words = ", ".join(f"{each} {count}" for each, count in counts.items())
        text = (
            f"output of request {name} (row {place} of a step of {words} tokens, after {self.requests[name].done}): token "
            f"{worst} is off by {float(errors[worst].max()):.2g} of its row, and {bound:.2g} is allowed"
        )
        named = recognise_state(step, found, lambda one, other: is_close(one, other, 3 * bound))
        if named is not None:
            text += f"; these are the numbers of a known mistake: {named}"
        raise ConformanceError(text, named, says=named or "state layer: output is wrong")


def _drafts(spec: LayerSpec) -> int:
    return 0 if spec.state is None else spec.state.drafts


def _terms(spec: LayerSpec, inputs: StateInputs, states: list[torch.Tensor]) -> torch.Tensor | None:
    """The size of each output row `[n, Hv]` if the terms of its sums had random signs; None for a convolution.

    Args:
        spec: the layer.
        inputs: of n tokens.
        states: after each of them, `[Hv, K, V]`.
    """
    if inputs.key is None or not states:
        return None
    queries = inputs.query.double().repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
    squares = queries.square()[..., None] * torch.stack(states).square()
    return squares.sum(-2).sqrt().amax(-1) * spec.scale


def _errors(found: torch.Tensor, right: torch.Tensor, terms: torch.Tensor | None = None) -> torch.Tensor:
    """The error of each row relative to its size, `[n, heads]`; NaN counts as infinite.

    Errors are of the size of the `terms` of a sum, so a row that is small by chance has that of its terms, or of other
    heads and tokens.
    """
    found, right = found.double(), right.double()
    if found.ndim == 2:
        found, right = found[:, None], right[:, None]
    size = right.abs().amax(-1)
    size = size if terms is None else size.maximum(terms)
    size = size.maximum(_OF_HEADS * size.amax(1, keepdim=True))
    size = size.maximum(_OF_TOKENS * size.amax(0, keepdim=True)).clamp_min(1e-30)
    return ((found - right).abs().amax(-1) / size).nan_to_num(torch.inf)


def is_close(
    found: torch.Tensor, right: torch.Tensor, bound: float, terms: torch.Tensor | None = None
) -> bool:
    """Whether each row is within `bound` of the right one, relative to its size."""
    return bool((_errors(found, right, terms) <= bound).all())


def _bound(
    spec: LayerSpec,
    inputs: StateInputs,
    state: torch.Tensor,
    right: torch.Tensor,
    terms: torch.Tensor | None,
) -> float:
    """The error that is allowed: a multiple of that of the recurrence with states rounded to their dtype at each token."""
    floor, stored = _FLOOR[spec.dtype], getattr(torch, spec.resolved_kv_cache_dtype)
    if stored is torch.float32 or not inputs.tokens:
        return floor
    outputs, at = [], state
    for token in range(inputs.tokens):
        out, states = reference_states(spec, inputs.rows(slice(token, token + 1)), at.to(stored))
        at = states[-1]
        outputs.append(out)
    own = float(_errors(torch.cat(outputs), right, terms).max())
    # A state that was rounded in many steps before has the error of these too.
    return max(floor, _TIMES * max(own, torch.finfo(stored).eps))
