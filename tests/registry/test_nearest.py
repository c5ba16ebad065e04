"""The nearest miss: the cheapest changes with which a refused backend would serve, found by asking it again."""

from __future__ import annotations

from fake_plugins import CPU, H100, SPEC, backend, plugin

from attnplug import Registry
from attnplug.backends import torch_native
from attnplug.core import AttentionBackend, Feature
from attnplug.registry.selection.nearest import NearMiss, SpecChange, nearest_misses, only_reference_serves

FP8 = SPEC.replace(kv_cache_dtype="fp8_e4m3")


def registry(*backends: type[AttentionBackend]) -> Registry:
    return Registry({"mine": plugin(*backends)})


def misses(*backends: type[AttentionBackend], spec=SPEC, device=CPU, **asked) -> list[tuple[str, str, int]]:
    found = registry(*backends)
    decision = found.explain(spec, device, **asked)
    return [(miss.backend, str(miss), miss.cost) for miss in nearest_misses(found, decision)]


def test_each_kind_of_change_has_its_words_and_its_cost():
    stores = {"supported_kv_cache_dtypes": ("auto", "fp8_e5m2")}
    assert misses(backend("STORES", **stores), spec=FP8) == [("STORES", "with --kv-cache-dtype fp8_e5m2", 2)]
    plain = backend("PLAIN", supported_kv_cache_dtypes=("auto",))
    assert misses(plain, spec=FP8) == [("PLAIN", "with --kv-cache-dtype auto", 3)]
    halves = backend("HALVES", supported_dtypes=("float16",))
    assert misses(halves) == [("HALVES", "with dtype float16", 4)]
    pages = backend("PAGES", get_supported_kernel_block_sizes=lambda *asked: (16,))
    assert misses(pages, spec=SPEC.replace(block_size=24)) == [("PAGES", "without --block-size", 2)]
    needs = backend("NEEDS", requires=("no-such-distribution>=2",))
    ((name, words, cost),) = misses(needs)
    assert (name, cost) == ("NEEDS", 1)
    assert words == "after pip install 'no-such-distribution>=2'"


def test_several_changes_are_added_up_and_the_nearest_backend_is_first():
    both = backend("BOTH", requires=("no-such-distribution",), supported_kv_cache_dtypes=("auto", "fp8_e5m2"))
    one = backend("ONE", supported_kv_cache_dtypes=("auto", "int8"))
    found = misses(both, one, spec=FP8)
    assert [(name, cost) for name, _, cost in found] == [("ONE", 2), ("BOTH", 3)]
    assert found[1][1] == "after pip install 'no-such-distribution' and with --kv-cache-dtype fp8_e5m2"
    # Of two as near, the one of the higher priority is first.
    later = backend("LATER", 90, supported_kv_cache_dtypes=("auto", "int8"))
    assert [name for name, *_ in misses(one, later, spec=FP8)] == ["LATER", "ONE"]


def test_what_no_change_of_the_user_helps_has_no_miss():
    small = backend("SMALL", get_supported_head_sizes=lambda: (32,))
    far = backend("FAR", device_types=("rocm",))
    assert misses(small, far, spec=FP8) == []
    # The reference, which has priority 0, is not proposed either.
    found = Registry({"torch": torch_native})
    assert nearest_misses(found, found.explain(SPEC.replace(kv_cache_dtype="nvfp4"), CPU)) == ()
    # Encoders have no cache whose dtype or page could change.
    encoder = SPEC.replace(attn_type="encoder", causal=False, direct_kv=True)
    assert misses(backend("NO_ENCODER", features=Feature(0)), spec=encoder) == []


def test_only_the_backend_that_a_rule_names_is_asked():
    one = backend("ONE", supported_kv_cache_dtypes=("auto", "int8"))
    two = backend("TWO", supported_kv_cache_dtypes=("auto", "int8"))
    assert [name for name, *_ in misses(one, two, spec=FP8, backend="TWO")] == ["TWO"]


def test_a_miss_is_written_with_its_changes():
    changes = (
        SpecChange("requires", "'a>=1'", "pip install 'a>=1'"),
        SpecChange("block_size", None, "--block-size"),
    )
    assert NearMiss("NAME", changes, 3).to_dict() == {
        "backend": "NAME",
        "changes": [
            {"field": "requires", "value": "'a>=1'", "command": "pip install 'a>=1'"},
            {"field": "block_size", "value": None, "command": "--block-size"},
        ],
        "words": "after pip install 'a>=1' and without --block-size",
    }


def test_the_reference_alone_on_a_gpu_is_noticed():
    found = Registry({"torch": torch_native})
    assert only_reference_serves(found.explain(SPEC, H100))
    assert not only_reference_serves(found.explain(SPEC, CPU))
    assert not only_reference_serves(found.explain(SPEC, H100, backend="TORCH"))
    two = Registry({"torch": torch_native, "mine": plugin(backend("ONE"))})
    assert not only_reference_serves(two.explain(SPEC, H100))
    nobody = registry(backend("SMALL", get_supported_head_sizes=lambda: (32,)))
    assert not only_reference_serves(nobody.explain(SPEC, H100))
