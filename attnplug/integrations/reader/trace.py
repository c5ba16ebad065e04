"""Runs a model once on the meta device and records every call to attention."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnplug.integrations.reader.device_mode import ValuesWithoutWeights
from attnplug.integrations.reader.mask_pattern import MaskPattern, UnknownMaskError, read_mask
from attnplug.integrations.reader.mixers import looks_like_attention, parents
from attnplug.integrations.reader.own_attention import Follower, OwnAttention, by_heads
from attnplug.integrations.reader.state_calls import StateCall, lightning_call, states_recorded

PROBE = "attnplug_reader"
"""The name of the recording attention and mask functions in transformers' interfaces."""

_current: contextvars.ContextVar[Trace] = contextvars.ContextVar("attnplug_reader_trace")
_stopped: contextvars.ContextVar[torch.nn.Module | None] = contextvars.ContextVar(
    "attnplug_stopped", default=None
)
_registration = threading.Lock()


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function, tensors on the meta device.

    `mask` is the pattern, None if the model passed no mask, or a reason why the pattern is unknown.
    `eager` is the modelling file's own attention. `constants` are the numbers by which the module multiplied
    tensors before the call, in order, with repetitions. `inputs` are the arguments of the module's forward. `visit` numbers the run of the module's forward that made the call. `own` is attention that the
    module computes itself.
    """

    path: str
    module: torch.nn.Module
    visit: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: MaskPattern | str | None = None
    scaling: float | None = None
    keywords: Mapping[str, Any]
    eager: Callable[..., Any] | None = None
    constants: tuple[float, ...] = ()
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    own: OwnAttention | None = None


class Trace:
    """Record of one run: `calls` and `states` in order, the modules that ran (`executed`, `visits`).

    `own_attention` has the paths of attention without a recorded call, and the reason.
    """

    def __init__(self, model: PreTrainedModel, lengths: frozenset[int]) -> None:
        self.model = model
        self.lengths = lengths
        self.calls: list[AttentionCall] = []
        self.states: list[StateCall] = []
        self.own_attention: dict[str, str] = {}
        self.executed: set[str] = set()
        self.stack: list[tuple[str, int, set[float]]] = []
        self.visits = 0
        self._masks: dict[int, tuple[torch.Tensor, MaskPattern | str]] = {}
        self._paths: dict[int, list[str]] = {}
        # Some layers share one module, which then has a path for each layer.
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._seen: dict[int, int] = {}
        self.constants: dict[int, list[float]] = {}
        self.inputs: dict[int, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}

    def enter(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Note that a module's forward begins; the n-th run of a shared module takes its n-th path."""
        paths = self._paths[id(module)]
        run = self._seen.get(id(module), 0)
        self._seen[id(module)] = run + 1
        parent = self.stack[-1][0] if self.stack else ""
        inside = [path for path in paths if path.startswith(f"{parent}.")] or paths
        path = inside[0] if len(inside) < len(paths) else paths[min(run, len(paths) - 1)]
        self.visits += 1
        self.executed.add(path)
        self.stack.append((path, self.visits, set()))
        self.constants[self.visits], self.inputs[self.visits] = [], (args, kwargs)
        if (state := lightning_call(self, module)) is not None:
            self.states.append(state)

    def leave(self) -> None:
        """Note that the innermost forward ends."""
        _, visit, _ = self.stack.pop()
        del self.constants[visit], self.inputs[visit]

    def frame_of(self, module: torch.nn.Module) -> tuple[str, int, set[float]]:
        """The path, visit and factors of the innermost running forward of `module`; else its first path."""
        paths = self._paths.get(id(module), [""])
        return next((frame for frame in reversed(self.stack) if frame[0] in paths), (paths[0], 0, set()))

    def first_path(self, module: torch.nn.Module) -> str:
        """The first path of `module` in the model."""
        return self._paths.get(id(module), [""])[0]

    def add_mask(self, tensor: torch.Tensor, function: Any) -> None:
        """Remember the pattern of the mask `function` for `tensor`."""
        try:
            pattern: MaskPattern | str = read_mask(function)
        except UnknownMaskError as error:
            pattern = str(error)
        except Exception as error:  # noqa: BLE001 - a mask function is the model's code
            pattern = f"its mask function cannot be evaluated ({type(error).__name__}: {error})"
        # The tensor is kept alive too, because Python would reuse the id of a freed one.
        self._masks[id(tensor)] = (tensor, pattern)

    def mask_of(self, tensor: torch.Tensor | None) -> MaskPattern | str | None:
        """The pattern noted by `add_mask`; a reason for any other tensor."""
        if tensor is None:
            return None
        base = tensor._base
        # Some models slice the whole mask, which makes a view of it.
        if base is not None and (base.shape, base.stride()) == (tensor.shape, tensor.stride()):
            tensor = base
        known = self._masks.get(id(tensor))
        return known[1] if known else "the model alters the mask or adds a bias of its own to it"

    def own(self, owner: str, attention: OwnAttention, value: torch.Tensor | None) -> None:
        """Record attention that the module `owner` computes itself, or note why it is unknown."""
        modules = [self.model.get_submodule(path) for path in dict.fromkeys((owner, *parents(owner), ""))]
        _, visit, factors = next(
            (frame for frame in reversed(self.stack) if frame[0] == owner), (owner, 0, set())
        )
        tensors = by_heads(attention, value, modules, factors)
        if isinstance(tensors, str):
            self.own_attention[owner] = tensors
            return
        query, key, value = tensors
        self.calls.append(
            AttentionCall(
                path=owner,
                module=modules[0],
                visit=visit,
                query=query,
                key=key,
                value=value,
                mask=attention.mask,
                scaling=attention.scaling,
                keywords={} if attention.mask is not None else {"is_causal": False},
                own=attention,
            )
        )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *rest: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Records a call of attention and returns an output of the right shape."""
    if module is _stopped.get():
        raise ReachedAttentionError(query, key)
    trace = _current.get()
    if rest:
        keywords["positional arguments"] = rest
    path, visit, _ = trace.frame_of(module)
    trace.calls.append(
        AttentionCall(
            path=path,
            module=module,
            visit=visit,
            query=query,
            key=key,
            value=value,
            mask=trace.mask_of(attention_mask),
            scaling=scaling,
            keywords={name: given for name, given in keywords.items() if given is not None},
            eager=_eager_of(sys._getframe(1)),
            constants=tuple(trace.constants.get(visit, ())),
            inputs=trace.inputs.get(visit),
        )
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_empty(shape), None


def _eager_of(caller: types.FrameType | None) -> Callable[..., Any] | None:
    """The only attention function that the calling function names; a comprehension is part of its function."""
    while (
        caller is not None and caller.f_code.co_name.startswith("<") and caller.f_code.co_name != "<module>"
    ):
        caller = caller.f_back
    if caller is None:
        return None
    names = [name for name in caller.f_code.co_names if name.endswith("eager_attention_forward")]
    return caller.f_globals.get(names[0]) if len(names) == 1 else None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Records a mask and returns a meta tensor that the trace will recognise."""
    tensor = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    _current.get().add_mask(tensor, mask_function)
    return tensor


class ReachedAttentionError(Exception):
    """A module's forward has reached attention inside `stopped_at_attention`; its arguments are queries and keys."""


@contextlib.contextmanager
def stopped_at_attention(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block, a call of attention by `module` raises ReachedAttentionError."""
    token = _stopped.set(module)
    try:
        yield
    finally:
        _stopped.reset(token)


@contextlib.contextmanager
def probe_registered() -> Iterator[None]:
    """Registers PROBE with transformers inside the block; one block of the process runs at a time."""
    # transformers keeps its tables in the class, so all threads of the process share them.
    with _registration:
        AttentionInterface.register(PROBE, _attention)
        AttentionMaskInterface.register(PROBE, _mask)
        try:
            yield
        finally:
            # transformers has no function that undoes `register`.
            AttentionInterface._global_mapping.pop(PROBE, None)
            AttentionMaskInterface._global_mapping.pop(PROBE, None)


def _torch_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of torch.nn.MultiheadAttention after its projections."""
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return output.transpose(1, 2), None


_TIMES = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply", "multiply_")
_OVER = ("div", "true_divide", "__truediv__", "div_", "__itruediv__", "divide", "divide_")


def constant_of(func: Any, args: tuple[Any, ...]) -> float | None:
    """The number other than 1 by which a call multiplies a tensor; NaN if the number is unknown; else None.

    A tensor of one element that is no parameter is a number too.
    """
    name = getattr(func, "__name__", "")
    if len(args) != 2 or name not in (*_TIMES, *_OVER):
        return None
    one, other = args
    if name in _TIMES and _is_number(one) and not _is_number(other):
        one, other = other, one
    if not isinstance(one, torch.Tensor) or not one.is_floating_point():
        return None
    if not _is_number(other) or _is_number(one):
        return None
    value = math.nan if isinstance(other, torch.Tensor) and other.is_meta else float(other)
    if value == 1.0 or name in _TIMES:
        return None if value == 1.0 else value
    return 1.0 / value if value else math.inf


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Watch(TorchFunctionMode):
    """Notes attention that a module computes itself, and the numbers by which it multiplies tensors."""

    _ALWAYS = ("multi_head_attention_forward", "flex_attention")
    _CHECKS = ("isfinite", "isinf", "isnan")

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self.follower = Follower(trace)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        stack = self._trace.stack
        constant = constant_of(func, args) if stack else None
        if constant is not None:
            self._trace.constants[stack[-1][1]].append(constant)
        if stack and len(args) == 2 and isinstance(args[1], float) and args[1]:
            if name in _TIMES:
                stack[-1][2].add(args[1])
            elif name in _OVER:
                stack[-1][2].add(1 / args[1])
        if name == "multi_head_attention_forward" and self._record_torch_module(*args, **(kwargs or {})):
            return func(*args, **(kwargs or {}))
        if name in self._ALWAYS:
            self._trace.own_attention[self._owner()] = ""
        if name in self._CHECKS and args and args[0].is_meta:
            # Models clamp half-precision values that overflow; values that are not there do not.
            good = torch.tensor(name == "isfinite", device="cpu")
            return good.expand(args[0].shape)
        result = func(*args, **(kwargs or {}))
        if name == "scaled_dot_product_attention":
            self.follower.whole(func, args, kwargs or {}, self._owner())
        elif name == "softmax":
            known = self.follower.softmax(args, kwargs or {}, result, self._owner())
            tensor = args[0] if args else (kwargs or {})["input"]
            if not known and tensor.dim() >= 3 and tensor.shape[-1] in self._trace.lengths:
                self._trace.own_attention[self._owner()] = ""
        else:
            self.follower.follow(func, args, kwargs or {}, result)
        return result

    def _record_torch_module(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        size: int,
        num_heads: int,
        *rest: Any,
        **given: Any,
    ) -> bool:
        """Record torch's own module (inputs `[L, B, E]`) if it attends without masks and added keys."""
        path, visit, _ = self._trace.stack[-1]
        module = self._trace.model.get_submodule(path)
        if not isinstance(module, torch.nn.MultiheadAttention):
            return False
        extra = [module.bias_k, module.bias_v, given.get("attn_mask"), given.get("key_padding_mask")]
        if query.dim() != 3 or any(item is not None for item in extra) or given.get("is_causal"):
            return False
        if module.add_zero_attn or key.shape != value.shape:
            return False
        dtype: torch.dtype = module.out_proj.weight.dtype
        heads = [
            torch.empty(t.shape[1], num_heads, t.shape[0], size // num_heads, dtype=dtype, device="meta")
            for t in (query, key, value)
        ]
        self._trace.calls.append(
            AttentionCall(
                path=path,
                module=module,
                visit=visit,
                query=heads[0],
                key=heads[1],
                value=heads[2],
                keywords={"is_causal": False},
                eager=_torch_attention,
            )
        )
        return True

    def _owner(self) -> str:
        """The innermost running module that is named attention, else the innermost module."""
        running = [path for path, _, _ in reversed(self._trace.stack)]
        modules = {path: self._trace.model.get_submodule(path) for path in running}
        named = (path for path, module in modules.items() if looks_like_attention(module))
        # A softmax may be a module of torch's.
        own = (path for path, each in modules.items() if not type(each).__module__.startswith("torch."))
        return next(named, next(own, ""))


class RunFailedError(Exception):
    """The model raised; `trace` has what it did until then, and `__cause__` is its error."""

    def __init__(self, trace: Trace) -> None:
        super().__init__("the model cannot be run")
        self.trace = trace


def record_run(
    model: PreTrainedModel, part: PreTrainedModel, inputs: Mapping[str, Any], lengths: frozenset[int]
) -> Trace:
    """Run `part(**inputs)` and record it; RunFailedError if the part raises.

    `part` is `model` or a module inside it. Paths start at `model`. A softmax over one of `lengths` elements
    counts as attention over that number of keys.
    """
    trace = Trace(model, lengths)
    prefix = trace.first_path(part)
    trace.executed |= {prefix[:end] for end, letter in enumerate(prefix) if letter == "."}
    token = _current.set(trace)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(trace.enter, with_kwargs=True))
        # After errors too: a part may fail inside one that `_failing_parts_skipped` lets go on.
        handles.append(module.register_forward_hook(lambda *_: trace.leave(), always_call=True))
    try:
        with (
            states_recorded(trace, functools.partial(_current.get, None)),
            torch.no_grad(),
            torch.device("meta"),
            ValuesWithoutWeights(),
            _Watch(trace) as watch,
        ):
            part(**inputs)
            watch.follower.end()
    except Exception as error:
        raise RunFailedError(trace) from error
    finally:
        for handle in handles:
            handle.remove()
        _current.reset(token)
    return trace
