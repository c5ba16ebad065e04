"""Each name that a release of vLLM has on its three base classes is read from a plugin's class, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from vllm_ports import BUILDER, CALLED, IMPL, LATENT, LATENT_IMPL, VALUES, TorchBackend, reads

from attnplug.core import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from attnplug.core.interface.interface import backend_faults, builder_faults, impl_faults
from attnplug.core.interface.ported_names import BACKEND_NAMES, BUILDER_NAMES, IMPL_NAMES, LATENT_IMPL_NAMES
from attnplug.core.interface.vllm_names import (
    VLLM_BACKEND_NAMES,
    VLLM_BUILDER_NAMES,
    VLLM_IMPL_NAMES,
    VLLM_VERSIONS,
)

TABLES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "backend": (VLLM_BACKEND_NAMES, BACKEND_NAMES),
    "impl": (VLLM_IMPL_NAMES, IMPL_NAMES),
    "builder": (VLLM_BUILDER_NAMES, BUILDER_NAMES),
}


def faults_of(kind: str, name: str, value: Any) -> list[str]:
    """What attnplug says about a plugin's class with this name, on each base that a plugin can have."""
    bases = {
        "backend": (AttentionBackend, backend_faults, [TorchBackend]),
        "impl": (AttentionImpl, impl_faults, [IMPL, LATENT_IMPL]),
        "builder": (AttentionMetadataBuilder, builder_faults, [BUILDER, LATENT.get_builder_cls()]),
    }
    base, faults, classes = bases[kind]
    return [
        fault
        for each in classes
        for fault in faults(type("Acme", (each,), {name: value}), base)  # type: ignore[operator]
        if fault.startswith(f"Acme.{name} ")
    ]


FIXED = {
    "accept_output_buffer": "attend always writes the output",
    "get_required_kv_cache_layout": "follows from supported_kv_cache_layouts",
}
"""Names that have one right value here; another is refused."""


def every_name() -> Iterator[tuple[str, str]]:
    for kind, (names, _) in TABLES.items():
        for name in names:
            yield kind, name


def test_the_table_goes_from_the_oldest_release_to_the_newest_that_was_read() -> None:
    assert VLLM_VERSIONS == ("0.8.0", "0.33.0")
    newest = {
        kind: [n for n, (_, last) in names.items() if last == "0.33.0"] for kind, (names, _) in TABLES.items()
    }
    assert {kind: len(names) for kind, names in newest.items()} == {"backend": 37, "impl": 37, "builder": 17}
    assert VLLM_IMPL_NAMES["lse_base_on_e"] == ("0.25.0", "0.33.0")
    assert VLLM_BACKEND_NAMES["accept_output_buffer"][1] < VLLM_VERSIONS[1]


@pytest.mark.parametrize(("kind", "name"), list(every_name()))
def test_a_name_of_vllm_is_read_or_refused_with_what_to_write(kind: str, name: str) -> None:
    faults = faults_of(kind, name, reads)
    if name in LATENT_IMPL_NAMES:
        assert faults == [f"Acme.{name} is not read by attnplug; {LATENT_IMPL_NAMES[name].write}"]
    elif name in CALLED[kind] | VALUES[kind]:
        assert not [fault for fault in faults if "is not read by attnplug" in fault]
    elif name in FIXED:
        assert any(FIXED[name] in fault for fault in faults_of(kind, name, False))
    else:
        remedy = TABLES[kind][1][name].write
        assert faults
        assert all(f"Acme.{name} is not read by attnplug; {remedy}" == fault for fault in faults)


def test_no_name_is_called_read_that_is_no_name_of_a_release() -> None:
    for kind, (names, _) in TABLES.items():
        assert CALLED[kind] | VALUES[kind] <= names.keys()


@pytest.mark.parametrize("kind", TABLES)
def test_a_name_of_a_later_release_is_refused_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = f"attnplug.core.interface.interface.VLLM_{kind.upper()}_NAMES"
    monkeypatch.setattr(table, {**TABLES[kind][0], "prefetch_pages": ("0.34.0", "0.34.0")})
    (fault, *_) = faults_of(kind, "prefetch_pages", reads)
    assert fault == "Acme.prefetch_pages is not read by attnplug; remove it: attnplug has nothing like it"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("impl", {"scales": (1, 2), "head_size_v": 16, "devices": 2, "_num_heads": 4, "prepared": True}),
        ("builder", {"devices": ("a",), "layer_name": "a", "kernel_block_sizes": (16,), "_prepare": reads}),
        ("backend", {"tile": 64, "_supports_rswa": True}),
    ],
)
def test_helpers_with_like_names_are_taken(kind: str, names: dict[str, Any]) -> None:
    for name, value in names.items():
        assert faults_of(kind, name, value) == []


def test_names_that_ask_for_nothing_may_stay() -> None:
    for kind, name, value in (
        ("backend", "supports_kv_cache_update_bypass", False),
        ("impl", "hisparse_cache", None),
        ("impl", "supports_per_head_quant_scales", False),
        ("builder", "supports_draft_decode_metadata_update", False),
    ):
        assert faults_of(kind, name, value) == []
