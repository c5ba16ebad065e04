"""Composites pass the conformance kit: two backends of one phase each, and two that order their steps otherwise."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from catching import failures, variant
from plain_attention import PlainImpl
from slow_kits import slow_kit

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionCGSupport, Device, Phase, composite_backend
from attnplug.core.composite.routing import Router
from attnplug.core.composite.steps import StepKind, StepRange
from attnplug.testing.conformance.builders import step_members
from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.declared import options
from attnplug.testing.conformance.listing import GROUPS
from attnplug.testing.conformance.numbers import correctness, requests
from attnplug.testing.conformance.serving import gpu
from attnplug.testing.conformance.states import state_checks
from attnplug.testing.conformance.target import Target


class DecodesFirst(TorchMetadataBuilder):
    """Asks for decodes first, as vendors' builders do, and declares that steps of one length are captured."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


PREFILLS = variant("PREFILLS", supported_phases=(Phase.PREFILL,))
DECODES = variant("DECODES", builder=DecodesFirst, supported_phases=(Phase.DECODE,))
PLAIN = variant("PLAIN", impl=PlainImpl, supported_kv_cache_layouts=lambda cls: ("HND",))


@slow_kit(composite_backend(PREFILLS, DECODES), device="cpu")
def test_of_two_that_serve_one_phase_each(check: Check) -> None:
    check()


@pytest.mark.parametrize("pair", [(PLAIN, DECODES), (PREFILLS, PLAIN)], ids=["prefills", "decodes"])
def test_of_two_implementations_that_share_no_code(pair) -> None:
    # The plain one takes any batch for what it says it is.
    assert set(failures(composite_backend(*pair), requests.checks)) <= {
        "batch/widened-decode",
        "batch/widened-mixed",
    }


THIRD, FOURTH = variant("THIRD", builder=DecodesFirst), variant("FOURTH", builder=DecodesFirst)
ROUTES = (
    (StepRange(StepKind.PREFILL, query=(1, 12)), THIRD),
    (StepRange(StepKind.DRAFT), THIRD),
    (StepRange(StepKind.MIXED, requests=(3, 4), rows=(1, 40), keys=(1, 60)), FOURTH),
    (StepRange(StepKind.DECODE, requests=(2, 3)), THIRD),
)
ROUTED = composite_backend(PREFILLS, DECODES, ROUTES)


@slow_kit(ROUTED, device="cpu")
def test_of_four_that_share_their_steps(check: Check) -> None:
    check()


def to_another(right, self, sizes):
    """Gives steps of a route to the member of their phase."""
    return


def at_the_limit(right, self, sizes):
    """Takes the longest query of a range for one past it."""
    return right(self, dataclasses.replace(sizes, query=sizes.query + 1))


def by_rows(right, self, sizes):
    """Counts rows in place of requests."""
    return right(self, dataclasses.replace(sizes, requests=sizes.rows))


def drafts_as_decodes(right, self, sizes):
    """Ranks drafts as decodes of one token."""
    return right(self, dataclasses.replace(sizes, kind=StepKind.DECODE) if sizes.kind == "draft" else sizes)


def mixed_as_prefill(right, self, sizes):
    """Looks for a mixed step among prefills."""
    kind = StepKind.PREFILL if sizes.kind == "mixed" else sizes.kind
    return right(self, dataclasses.replace(sizes, kind=kind))


@pytest.mark.parametrize(
    ("wrong", "routes"),
    [
        (to_another, {"1-prefill", "2-draft", "3-mixed", "4-decode"}),
        (at_the_limit, {"1-prefill"}),
        (by_rows, {"3-mixed"}),
        (drafts_as_decodes, {"2-draft"}),
        (mixed_as_prefill, {"3-mixed"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_router_is_caught_and_the_members_are_named(monkeypatch, wrong, routes) -> None:
    right = Router.place_of
    monkeypatch.setattr(Router, "place_of", lambda self, sizes: wrong(right, self, sizes))
    problems = failures(ROUTED, step_members.checks)
    assert {f"composite/route-{each}" for each in routes} <= set(problems)
    for name, problem in problems.items():
        assert "tokens ran on" in str(problem), (name, problem)
        assert "THIRD" in str(problem) or "FOURTH" in str(problem)


class IgnoresWindows(TorchImpl):
    def _bind(self, spec, *args, **kwargs):
        super()._bind(spec.replace(window=(-1, -1)) if spec.causal else spec, *args, **kwargs)


WRONG = variant("WRONG", impl=IgnoresWindows)


@pytest.mark.parametrize(
    "pair", [(WRONG, DECODES), (PREFILLS, WRONG)], ids=["in the prefilling half", "in the decoding half"]
)
def test_what_one_half_ignores_is_caught_and_named(pair) -> None:
    def windowed(target: Target):
        return (check for check in correctness.checks(target) if check.id.endswith("NHD-window6.0"))

    problems = failures(composite_backend(*pair), windowed)
    assert problems
    assert all("a known mistake: sliding window ignored" in str(problem) for problem in problems.values())


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "name",
    [
        "TRITON+TORCH",
        "TORCH+TRITON",
        "TORCH+TRITON[prefill query ..12 on TRITON; draft on TORCH; mixed requests 3..4 rows ..40 on TRITON]",
        # Of these the class for latents is checked too.
        "TORCH+TORCH[decode requests ..2 on TRITON; draft on TRITON]",
    ],
)
def test_of_triton_and_torch_under_the_interpreter(name: str, tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(
        '[known_failures]\n"*runtime/threads" = "the interpreter keeps the program in its modules"\n'
    )
    # In another process: triton reads the variable when it is imported.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "attnplug", "conformance", name, "--device", "cpu"),
            *("--timeout", "600", "--known-failures", str(known)),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert name.partition("[")[0] in done.stdout


def test_every_group_of_checks_asks_composites_something() -> None:
    target = Target(composite_backend(PREFILLS, DECODES), Device("cpu"))
    silent = [group for group in GROUPS if not list(group(target))]
    assert silent == [
        options.checks,
        gpu.capture_checks,
        step_members.checks,
        gpu.checks,
        gpu.graph_checks,
        state_checks.checks,
    ]
    routed = Target(ROUTED, Device("cpu"))
    assert [group for group in silent if list(group(routed))] == [step_members.checks]
