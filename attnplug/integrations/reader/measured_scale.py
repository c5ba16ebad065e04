"""Measures by which number an attention module multiplies its queries and keys: its forward runs on random input."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnplug.integrations.reader.config_json import one_line
from attnplug.integrations.reader.eager_check import CheckFailedError
from attnplug.integrations.reader.trace import (
    AttentionCall,
    ReachedAttentionError,
    constant_of,
    stopped_at_attention,
)

_MOST_ELEMENTS = 1 << 24
"""Elements of one tensor with values: 4,096 tokens of VideoPrism have 12 million, in 50 MB."""
_CLOSE = 1e-5
"""Relative difference of two float32 runs, and of a measured factor and the number in the code."""

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of a forward."""
_NOT_HIDDEN = re.compile(r"mask|position|rotary|cos|sin|freq|grid|length")
"""Names of arguments of a forward that are no hidden states."""


class _TooLargeError(CheckFailedError):
    """A tensor with more elements than are worth the time."""


def measured_factor(call: AttentionCall) -> float:
    """The product of the numbers by which the module multiplies queries and keys before it calls attention.

    The forward runs three times on the same random input: as it is, with each multiplication by a number of the
    module's own left out, and with each done twice. Random values replace the projections, so no weight is needed.

    Raises:
        CheckFailedError: the forward cannot run, or the factor differs within the queries or the keys.
    """
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
            handles.append(part.register_forward_pre_hook(lambda *_: mode.enter()))
            handles.append(part.register_forward_hook(lambda *_: mode.leave(), always_call=True))
    try:
        with torch.no_grad(), torch.device("cpu"), stopped_at_attention(module), mode:
            args, kwargs = values.all_of(inputs[0]), values.all_of(dict(inputs[1]))
            mode.begin(args, kwargs)
            module.forward(*args, **kwargs)
    except ReachedAttentionError as reached:
        return values.of(reached.query), values.of(reached.key)
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
    """The first row of each tensor with the largest batch: the windows of an image in SAM 2 have 38 million elements."""
    batch = max(
        (each.shape[0] for each in _tensors_in((*args, *kwargs.values())) if each.dim() > 1), default=1
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
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if type(value) in (tuple, list):
            return type(value)(self.all_of(item) for item in value)
        if type(value) is dict:
            return {name: self.all_of(item) for name, item in value.items()}
        return None if hasattr(value, "get_seq_length") else value


class _Replay(TorchFunctionMode):
    """Gives tensors without data values, and multiplies by each number `times` times.

    A product with a weight of two or more dimensions becomes random values of its shape.
    """

    def __init__(self, values: _RandomValues, times: int) -> None:
        super().__init__()
        self._values = values
        self._times = times
        self._inside = 0
        # Numbers count where they multiply hidden states and what is computed from them, not positions.
        self._of_tokens: dict[int, torch.Tensor] = {}

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the hidden states among the arguments of the forward."""
        named = (value for name, value in kwargs.items() if not _NOT_HIDDEN.search(name))
        self._noted([value for value in (*args, *named) if isinstance(value, torch.Tensor)])

    def enter(self) -> None:
        """Note that a module inside begins, whose numbers are its own, such as those of a norm."""
        self._inside += 1

    def leave(self) -> None:
        """Note that it ends."""
        self._inside -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if any(_is_weight(value) for value in (*args, *given.values())):
            shape = func(*_on_meta(args), **_on_meta(given))
            return self._noted(self._values.drawn(shape)) if isinstance(shape, torch.Tensor) else shape
        args, given = self._values.all_of(tuple(args)), self._values.all_of(given)
        of_tokens = any(id(value) in self._of_tokens for value in _tensors_in((*args, *given.values())))
        if of_tokens and not self._inside and constant_of(func, args) is not None:
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
        for tensor in _tensors_in((result,)):
            self._of_tokens[id(tensor)] = tensor
        return result


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.is_meta and value.dim() > 1


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
    if type(value) in (tuple, list):
        return type(value)(_on_meta(item) for item in value)
    if type(value) is dict:
        return {name: _on_meta(item) for name, item in value.items()}
    return value
