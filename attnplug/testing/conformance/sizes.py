"""The sizes that a backend declares are sizes, and its preferred block size is one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from attnplug.core.blocks import MultipleOf
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.spec_grid import plainest
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["checks"]

_SIZES = (1, 7, 16, 64, 80, 96, 128, 192, 256, 576, 1009)


def checks(target: Target) -> Iterator[Check]:
    """The checks of head sizes and block sizes."""
    for name, (run, summary) in _CHECKS.items():
        yield Check(f"declaration/{name}", functools.partial(run, target), summary)


def _check_head_sizes(target: Target) -> None:
    backend = target.backend
    with during("get_supported_head_sizes()"):
        sizes = backend.get_supported_head_sizes()
    _expect_sizes("get_supported_head_sizes()", sizes)
    for size in dict.fromkeys([*_SIZES, *(each for each in sizes if isinstance(each, int))]):
        listed = not sizes or MultipleOf.allows(sizes, size)
        with during(f"supports_head_size({size})"):
            served: object = backend.supports_head_size(size)
        if served is not listed:
            what = f"supports_head_size({size}) is {served!r}, but get_supported_head_sizes() says {listed}"
            raise ConformanceError(f"{what}: {_words(sizes)}")


def _check_block_sizes(target: Target) -> None:
    backend, spec = target.backend, plainest(target)
    with during("get_supported_kernel_block_sizes()"):
        union = backend.get_supported_kernel_block_sizes()
        own = backend.get_supported_kernel_block_sizes(spec, target.device)
    for what, sizes in (("()", union), ("(spec, device)", own)):
        _expect_sizes(f"get_supported_kernel_block_sizes{what}", sizes)
        if not sizes:
            raise ConformanceError(f"get_supported_kernel_block_sizes{what} names no size")
    for size in (*range(1, 257), 512, 1024):
        if MultipleOf.allows(own, size) and not MultipleOf.allows(union, size):
            what = (
                f"block size {size} is supported for a plain layer, but not without arguments, for the union"
            )
            raise ConformanceError(f"{what} of all specs: {_words(union)}")


def _check_preferred_block_size(target: Target) -> None:
    backend, spec = target.backend, plainest(target)
    for layer, device in ((None, None), (spec, target.device)):
        with during("get_supported_kernel_block_sizes"):
            allowed = backend.get_supported_kernel_block_sizes(layer, device)
        for default in (16, 1, 7, 17, 64, 100, 5000):
            call = f"get_preferred_block_size({'spec, device, ' if layer else ''}default={default})"
            with during(call):
                size: object = backend.get_preferred_block_size(layer, device, default)
            if type(size) is not int or not MultipleOf.allows(allowed, size):
                raise ConformanceError(
                    f"{call} is {size!r}, which it cannot read: supported are {_words(allowed)}"
                )


def _expect_sizes(what: str, sizes: object) -> None:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ConformanceError(f"{what} is {sizes!r}; it must be a sequence of sizes")
    for size in sizes:
        if not isinstance(size, MultipleOf) and (type(size) is not int or size < 1):
            raise ConformanceError(
                f"{what} has {size!r}; a size is an integer of at least 1, or MultipleOf(n)"
            )


def _words(sizes: Sequence[int | MultipleOf]) -> str:
    return ", ".join(map(str, sizes)) or "any size"


_CHECKS: dict[str, tuple[Callable[[Target], None], str]] = {
    "head-sizes": (_check_head_sizes, "head sizes are sizes, and supports_head_size agrees"),
    "block-sizes": (_check_block_sizes, "block sizes are sizes, those of a layer within the union"),
    "preferred-block-size": (_check_preferred_block_size, "the preferred block size is one that it can read"),
}
