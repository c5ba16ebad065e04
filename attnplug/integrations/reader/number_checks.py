"""Runs the code of an attention module on random numbers.

Its own attention is compared with softmax attention of its scale, soft cap, mask and sinks, and the number is measured
by which it multiplies queries and keys before it calls attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnplug.integrations.reader.config_json import one_line
from attnplug.integrations.reader.device_mode import each_changed, tensors_in
from attnplug.integrations.reader.mask_pattern import MaskPattern
from attnplug.integrations.reader.own_attention import LOGITS, MASK, OwnAttention
from attnplug.integrations.reader.trace import (
    AttentionCall,
    ReachedAttentionError,
    constant_of,
    stopped_at_attention,
)

_TOKENS = 6
# Elements of one real tensor: 128 heads of 512 have 393,216 here, and more would take seconds.
_MOST_COMPARED = 1 << 23
# Elements of one tensor with values: 4,096 tokens of VideoPrism have 12 million, in 50 MB.
_MOST_ELEMENTS = 1 << 24
_CLOSE = 1e-5
"""Relative difference of two float32 runs, and of a measured factor and the number in the code."""

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
_NOT_HIDDEN = re.compile(r"mask|position|rotary|cos|sin|freq|grid|length")
"""Names of arguments of a forward that are no hidden states."""


class CheckFailedError(Exception):
    """The file's own attention cannot be run, or its arguments do not describe its result."""


def check_eager(call: AttentionCall) -> bool:
    """Run the file's own attention on small random tensors and compare; True if it uses sinks.

    If the function reads a parameter of its module (sinks), it gets random values of the same shape.
    CheckFailedError if the result differs from softmax attention with the call's arguments.
    """
    if call.eager is None:
        raise CheckFailedError("the modelling file has no attention function of its own to compare with")
    generator = torch.Generator(device="cpu").manual_seed(0)
    module = _Standin(call.module, generator)
    keywords = {name: module.real(value) for name, value in call.keywords.items()}
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    size, size_v = call.query.shape[3], call.value.shape[3]
    # Meta tensors have no values to compare, so the check needs real tensors on the CPU.
    with torch.device("cpu"), torch.no_grad():
        query = _random((1, heads, _TOKENS, size), generator)
        key = _random((1, kv_heads, _TOKENS, size), generator)
        value = _random((1, kv_heads, _TOKENS, size_v), generator)
        # Some functions that never get a mask would not add one.
        mask = None if call.mask is None else torch.full((_TOKENS, _TOKENS), -1e9).triu(1)[None, None]
        try:
            found, _ = call.eager(
                module, query, key, value, mask, dropout=0.0, scaling=call.scaling, **keywords
            )
        except CheckFailedError:
            raise
        except Exception as error:
            raise CheckFailedError(f"its attention function cannot be run ({error})") from error
        sinks = keywords.get("s_aux")
        if sinks is None:
            sinks = next((tensor for tensor in module.read if tensor.numel() == heads), None)
        scale = size**-0.5 if call.scaling is None else call.scaling
        expected = _attention(query * scale, key, value, mask, keywords.get("softcap"), sinks)
    if found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=1e-3, atol=1e-4):
        raise CheckFailedError("its attention function gives other numbers than its arguments say")
    return sinks is not None


def check_own(call: AttentionCall, own: OwnAttention) -> None:
    """Run the operations that a module's own attention applies to its logits, and compare likewise.

    CheckFailedError if the result differs from softmax attention with the scale and the mask of `call`.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    # An operation with a shape or a mask of its own needs the number of tokens of the recorded run.
    free = own.whole or all(func in (torch.mul, torch.add) for func, _, _ in own.operations)
    queries, keys = (_TOKENS, _TOKENS) if free else (own.query.shape[-2], own.key.shape[-2])
    with torch.device("cpu"), torch.no_grad():
        query = _random((*own.query.shape[:-2], queries, own.query.shape[-1]), generator)
        key = _random((*own.key.shape[:-2], keys, own.key.shape[-1]), generator)
        value = _random((*own.key.shape[:-2], keys, call.value.shape[-1]), generator)
        mask = None
        if isinstance(call.mask, MaskPattern):
            seen = call.mask.seen(torch.arange(queries)[:, None], torch.arange(keys))
            mask = torch.zeros(queries, keys).masked_fill(~seen, -1e9)
        found = _own_output(own, query, key, value, mask)
        query, key, value = (
            each.reshape(-1, recorded.shape[1], *each.shape[-2:])
            for each, recorded in ((query, call.query), (key, call.key), (value, call.value))
        )
        expected = _attention(query * own.scaling, key, value, mask).transpose(1, 2)
    if not torch.allclose(found.reshape(expected.shape), expected, rtol=1e-3, atol=1e-4):
        raise CheckFailedError("its operations give other numbers than the scale and the mask that were read")


def _own_output(
    own: OwnAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The product of weights and values, `[..., H, T, Dv]`."""
    query = query * own.before
    if own.whole:
        ((func, _, given),) = own.operations
        output: torch.Tensor = func(
            query, key, value, **{name: mask if each is MASK else each for name, each in given.items()}
        )
        return output
    logits = query @ key.transpose(-1, -2)
    for func, args, given in own.operations:
        replaced = {id(LOGITS): logits, id(MASK): mask}
        logits = func(*(replaced.get(id(each), each) for each in args), **given)
    weights = logits.softmax(dim=-1)
    if weights.dim() != value.dim():
        weights = weights.reshape(*value.shape[:-2], *weights.shape[-2:])
    return weights @ value


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random numbers; CheckFailedError for a shape that a configuration with too large sizes gives."""
    if math.prod(shape) > _MOST_COMPARED:
        raise CheckFailedError(f"a tensor of the shape {shape} has more than {_MOST_COMPARED} elements")
    return torch.randn(shape, generator=generator, device="cpu")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[1, T, H, Dv]` of scaled `query [1, H, T, D]` and `key`, `value` `[1, Hkv, T, D or Dv]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    logits = query @ key.transpose(2, 3)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if mask is not None:
        logits = logits + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(1, query.shape[1], query.shape[2], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


class _Standin:
    """An attention module with random tensors in place of meta tensors; records the tensors read."""

    def __init__(self, module: torch.nn.Module, generator: torch.Generator) -> None:
        self._module = module
        self._generator = generator
        self._real: dict[int, torch.Tensor] = {}
        self.read: list[torch.Tensor] = []

    def real(self, value: Any) -> Any:
        """`value`; for a meta tensor, its random replacement."""
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        if id(value) not in self._real:
            shape = tuple(value.shape)
            drawn = _random(shape, self._generator)
            self._real[id(value)] = drawn if value.is_floating_point() else drawn.to(value.dtype)
        return self._real[id(value)]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, torch.Tensor):
            value = self.real(value)
            self.read.append(value)
        return value


class _TooLargeError(CheckFailedError):
    """A tensor with more elements than are worth the time."""


def measured_factor(call: AttentionCall) -> float:
    """The product of the numbers by which the module multiplies queries and keys before it calls attention.

    CheckFailedError: the forward cannot run, or the factor differs within the queries or the keys.
    """
    # The forward runs three times on the same random input: as it is, with each
    # multiplication by a number of the module's own left out, and with each done twice.
    # Random values replace the projections, so no weight is needed.
    # Numbers in the code are not enough: those on keys, applied twice, or
    # different by layer made the scale of the privacy filter 2.8 times too large.
    if call.inputs is None:
        raise CheckFailedError("the inputs of its forward are unknown")
    try:
        plain, scaled, twice = (_queries_and_keys(call, times, call.inputs) for times in (0, 1, 2))
    except _TooLargeError:
        inputs = _first_rows(*call.inputs)
        plain, scaled, twice = (_queries_and_keys(call, times, inputs) for times in (0, 1, 2))
    factor = 1.0
    for place, name in enumerate(("queries", "keys")):
        ratio, squared = (_ratio(name, run[place], plain[place]) for run in (scaled, twice))
        # A sum of a product and another term has no factor of its own.
        if not math.isclose(ratio * ratio, squared, rel_tol=1e-3):
            raise CheckFailedError(f"it adds products to its {name}")
        factor *= ratio
    return _exact(factor, call)


def _ratio(name: str, scaled: torch.Tensor, plain: torch.Tensor) -> float:
    if scaled.shape != plain.shape:
        raise CheckFailedError(f"the shape of its {name} depends on a number in its forward")
    if scaled.isnan().any():
        raise CheckFailedError(f"it multiplies its {name} by a tensor whose value is not known")
    squares = float((plain * plain).sum())
    ratio = float((scaled * plain).sum()) / squares if squares else math.nan
    size = float(plain.abs().max()) * abs(ratio)
    if not math.isfinite(ratio) or not torch.allclose(scaled, plain * ratio, rtol=1e-4, atol=1e-4 * size):
        raise CheckFailedError(f"it multiplies parts of its {name} by different numbers")
    return ratio


def _exact(factor: float, call: AttentionCall) -> float:
    """A product of numbers in the code within the error of the measurement, else the measured factor."""
    size = call.query.shape[3]
    usual = (1.0, size**-0.5, size**-0.25, 1.0 / size)
    products = {1.0}
    for constant in call.constants[:8]:
        products |= {product * constant for product in products}
    near = (each for each in (*usual, *sorted(products)) if math.isclose(each, factor, rel_tol=_CLOSE))
    return next(near, factor)


def _queries_and_keys(call: AttentionCall, times: int, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    module = call.module
    values = _RandomValues()
    mode = _Replay(values, times)
    handles = []
    for part in module.modules():
        if part is not module:
            handles.append(part.register_forward_pre_hook(lambda *_: mode.enter(1)))
            handles.append(part.register_forward_hook(lambda *_: mode.enter(-1), always_call=True))
    try:
        with torch.no_grad(), torch.device("cpu"), stopped_at_attention(module), mode:
            args, kwargs = values.all_of(inputs[0]), values.all_of(dict(inputs[1]))
            mode.begin(args, kwargs)
            module.forward(*args, **kwargs)
    except ReachedAttentionError as reached:
        query, key = reached.args
        return values.of(query), values.of(key)
    except CheckFailedError:
        raise
    except Exception as error:
        raise CheckFailedError(
            f"its forward cannot run on random input ({type(error).__name__}: {one_line(error)})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    raise CheckFailedError("its forward calls no attention on random input")


def _first_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """The first row of each tensor with the largest batch."""
    # The windows of an image in SAM 2 have 38 million elements.
    batch = max(
        (each.shape[0] for each in tensors_in((*args, *kwargs.values())) if each.dim() > 1), default=1
    )

    def first(value: Any) -> Any:
        is_batch = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == batch
        return value[:1] if is_batch else value

    return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


class _RandomValues:
    """float32 values for tensors without data: the same for the same sequence of tensors."""

    def __init__(self) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(0)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.float() if tensor.is_floating_point() else tensor
        if tensor.numel() == 1 and tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            # A buffer may be a scale. Its value is lost, so a result that depends on it is not a number.
            return torch.full(tensor.shape, math.nan, device="cpu")
        if id(tensor) not in self._known:
            # The tensor is kept too, because Python would reuse the id of a freed one.
            self._known[id(tensor)] = tensor, self.drawn(tensor)
        return self._known[id(tensor)][1]

    def drawn(self, tensor: torch.Tensor) -> torch.Tensor:
        """New values of its shape: positive, so that no sum of squares is near zero."""
        if tensor.numel() > _MOST_ELEMENTS:
            raise _TooLargeError(
                f"a tensor of the shape {tuple(tensor.shape)} has more than {_MOST_ELEMENTS} elements"
            )
        if not tensor.is_floating_point():
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return torch.rand(tensor.shape, generator=self._generator, device="cpu") + 0.25

    def all_of(self, value: Any) -> Any:
        """`value` with each tensor in it replaced; a cache is left out, because it has keys of the recorded run."""

        def replaced(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return self.of(each)
            return None if hasattr(each, "get_seq_length") else each

        return each_changed(value, replaced)


class _Replay(TorchFunctionMode):
    """Gives tensors without data values, and multiplies by each number `times` times.

    A product with a weight of two or more dimensions becomes random values of its shape.
    """

    def __init__(self, values: _RandomValues, times: int) -> None:
        super().__init__()
        self._values = values
        self._times = times
        self.inside = 0
        """The modules inside that run: their numbers are their own, such as those of a norm."""
        # Numbers count where they multiply hidden states and what is computed from them, not positions.
        self._of_tokens: dict[int, torch.Tensor] = {}

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the hidden states among the arguments of the forward."""
        named = (value for name, value in kwargs.items() if not _NOT_HIDDEN.search(name))
        self._noted([value for value in (*args, *named) if isinstance(value, torch.Tensor)])

    def enter(self, change: int) -> None:
        """Note that a module inside begins (1) or ends (-1)."""
        self.inside += change

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        weights = (value for value in (*args, *given.values()) if isinstance(value, torch.nn.Parameter))
        if any(weight.is_meta and weight.dim() > 1 for weight in weights):
            shape = func(*each_changed(tuple(args), _on_meta), **each_changed(given, _on_meta))
            return self._noted(self._values.drawn(shape)) if isinstance(shape, torch.Tensor) else shape
        args, given = self._values.all_of(tuple(args)), self._values.all_of(given)
        of_tokens = any(id(value) in self._of_tokens for value in tensors_in((*args, *given.values())))
        if of_tokens and not self.inside and constant_of(func, args) is not None:
            result = self._times_number(func, args)
        else:
            result = func(*args, **given)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            result = result.float()
        return self._noted(result) if of_tokens else result

    def _times_number(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        first = isinstance(args[0], torch.Tensor) and args[0].numel() > 1
        result = args[0] if first else args[1]
        for _ in range(self._times):
            result = func(result, args[1]) if first else func(args[0], result)
        return result

    def _noted(self, result: Any) -> Any:
        for tensor in tensors_in((result,)):
            self._of_tokens[id(tensor)] = tensor
        return result


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
