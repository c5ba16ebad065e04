"""Prices of shared prefixes: fitted to times, measured on a CPU, written by a tuning, and read by decisions and steps."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import CPU, backend, registry
from model_layers import layer
from test_session import Case, Workers

import attnplug
from attnplug import Decision, Device, LayerSpec
from attnplug.core import Feature
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.errors import AttnplugError, MatrixFileError
from attnplug.registry.measured.sharing_prices import MeasuredPrices, SharingPrices, TablePrices
from attnplug.registry.measured.tuned import TunedLayer, TunedTable
from attnplug.registry.measured.tuned_files import read_table, update_table
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.runtime import AttentionRuntime, ModelPlan
from attnplug.runtime.batch.forest_prices import LayerPrices
from attnplug.tuning.jobs import Event, Job
from attnplug.tuning.price_runs import measure_prices
from attnplug.tuning.prices import PriceStep, PriceTimes, fitted, measured_prices, steps_for
from attnplug.tuning.timers import timer_for

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
H200 = Device("cuda", (9, 0), "NVIDIA H200")
TRUE = SharingPrices(bandwidth=4.6e12, reread=0.7, products=6e14, calls=2.5e-5)
SHARES = Feature.SLIDING_WINDOW | Feature.LSE | Feature.CROSS | Feature.NON_CAUSAL


def times_of(prices: SharingPrices, steps: Sequence[PriceStep], noise: float = 0.0) -> list[PriceTimes]:
    """Times of a device of which the model is right, with 7 us for a step of no keys."""
    cache, rng = kv_cache_spec_for(SPEC, 16), random.Random(0)
    assert cache is not None
    priced, found = LayerPrices.of(prices, SPEC.num_heads, cache), []
    for step in steps:
        plain = 7e-6 + priced.plain(step.read)
        saved = step.prompts * priced.saved(step.readers, step.readers, step.keys)
        both = (each * rng.uniform(1 - noise, 1 + noise) for each in (plain, plain - saved + prices.calls))
        found.append(PriceTimes(*both))
    return found


def test_a_fit_finds_the_constants_of_a_device_of_which_the_model_is_right() -> None:
    steps = steps_for(H200)
    found, error = fitted(steps, times_of(TRUE, steps), SPEC, 16, host=3e-4)
    for name in ("bandwidth", "reread", "products", "calls"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert (found.margin, found.host, error < 0.02) == (0.02, 3e-4, True)


@pytest.mark.parametrize("device", [CPU, H200])
def test_no_step_has_one_prefix_of_all_requests(device: Device) -> None:
    """A builder may attend it by a kernel of its own, and its time would be neither plain nor shared."""
    assert all(step.prompts > 1 and step.readers > 1 for step in steps_for(device))


def test_noisy_times_give_prices_that_still_choose_the_same_steps() -> None:
    """The margin grows with the error, so that fewer steps share."""
    steps, cache = steps_for(H200), kv_cache_spec_for(SPEC, 16)
    assert cache is not None
    found, error = fitted(steps, times_of(TRUE, steps, noise=0.05), SPEC, 16)
    assert found.margin == max(error, 0.02)
    ours, theirs = (LayerPrices.of(each, SPEC.num_heads, cache) for each in (found, TRUE))
    for readers, keys in ((64, 8192), (16, 16384)):
        assert ours.saved(readers, readers, keys) == pytest.approx(
            theirs.saved(readers, readers, keys), rel=0.25
        )
    assert ours.saved(2, 2, 64) < ours.calls


def test_times_that_no_sharing_explains_give_finite_prices() -> None:
    steps = steps_for(CPU)
    slower = [PriceTimes(1e-3, 5e-3) for _ in steps]
    found, _ = fitted(steps, slower, SPEC, 16)
    assert found.calls > 1e-3
    assert found.reread <= 1
    faster = [PriceTimes(1e-2, 1e-6) for _ in steps]
    assert fitted(steps, faster, SPEC, 16)[0].products > 0


def test_prices_are_measured_on_a_cpu() -> None:
    spec = LayerSpec(num_heads=4, num_kv_heads=1, head_size=16, dtype="float32")
    steps = (PriceStep(2, 64, 3, 8), PriceStep(2, 128, 4, 8), PriceStep(2, 32, 2, 8))
    prices, error, count = measured_prices(spec, "TORCH", CPU, timer_for("cpu"), steps)
    assert count == 3
    assert error >= 0
    assert (prices.host, prices.safety) == (0.0, 2.0)
    assert 1e6 < prices.bandwidth < 1e13
    windowed, *_ = measured_prices(spec.replace(window=(15, 0)), "TORCH", CPU, timer_for("cpu"), steps)
    assert windowed.calls < 1
    with pytest.raises(AttnplugError):
        measured_prices(spec.replace(head_size=17), "TRITON", CPU, timer_for("cpu"), steps)


class PricingWorkers(Workers):
    """Gives prices for jobs that ask for them; `unpriced` backends fail there."""

    unpriced: frozenset[str] = frozenset()

    def _event(self, job: Job, name: str) -> Event:
        if not job.prices:
            return super()._event(job, name)
        about = {"job": job.number, "backend": name}
        if name in self.unpriced:
            return {**about, "event": "failed", "why": "RuntimeError: no room"}
        prices = dataclasses.replace(TRUE, calls=self.times[name] * 1e-6).to_dict()
        return {**about, "event": "priced", "prices": prices, "error": 0.04, "steps": 8}


class PricedCase(Case):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.workers = PricingWorkers(A=100.0, B=50.0, C=80.0)
        shares = {"A": SHARES, "B": SHARES, "C": Feature.SLIDING_WINDOW}
        self.fakes = [backend(name, 50, features=features) for name, features in shares.items()]

    def price(self, is_late: Any = lambda: False, *, fresh: bool = False) -> Any:
        tuner = self.tuner()
        return measure_prices(tuner, read_table(self.path), self.save, is_late, fresh=fresh)

    @property
    def priced(self) -> list[str]:
        return [job.backends[0][0] for job in self.workers.jobs if job.prices]


@pytest.fixture
def case(tmp_path: Path) -> PricedCase:
    return PricedCase(tmp_path / "table.json")


def test_backends_that_share_prefixes_are_priced_once_for_each_kind_of_layer(case: PricedCase) -> None:
    case.run()
    found = case.price()
    assert case.priced == ["A", "B"] * 2
    assert found.lines[0] == (
        "layer kind 1, shared prefixes: A reads 4,600.0 GB/s, 70 % of it again for each reader, "
        "and further calls take 100 us, 4 % off in the median step"
    )
    written = read_table(case.path)
    assert written.digest == found.table.digest
    assert [[each.subject.backend for each in one.prices] for one in written.layers] == [["A", "B"]] * 2
    case.workers.jobs.clear()
    case.run()
    assert case.price().lines == []
    assert case.priced == []
    assert [len(one.prices) for one in read_table(case.path).layers] == [2, 2], "a run keeps prices"
    assert len(case.price(fresh=True).lines) == 4
    assert [len(one.prices) for one in read_table(case.path).layers] == [2, 2]


def test_a_backend_that_nobody_would_choose_has_no_prices(case: PricedCase) -> None:
    case.workers.times["A"] = 101.0
    case.run()
    case.price()
    assert case.priced == ["B"] * 2, "A takes more than twice the time of B"


def test_a_backend_that_fails_has_no_prices_and_a_budget_leaves_some_out(case: PricedCase) -> None:
    case.run()
    case.workers.unpriced = frozenset({"A"})
    found = case.price()
    assert found.lines[0] == "layer kind 1, shared prefixes: A has no prices: RuntimeError: no room"
    assert [[each.subject.backend for each in one.prices] for one in found.table.layers] == [["B"]] * 2
    case.workers.unpriced = frozenset()
    assert case.price(lambda: True).left == 2
    calls: Iterator[bool] = iter([False, True])
    assert case.price(lambda: next(calls)).left == 1


def priced_table(
    spec: LayerSpec = SPEC, backend: str = "TORCH", device: Device = CPU, **versions: str
) -> TunedTable:
    row = MeasuredPrices(
        BackendVersions(backend, None, None, device, tuple(versions.items())),
        TRUE,
        0.04,
        8,
        "2026-11-28T02:00:00+00:00",
    )
    return TunedTable(device, (TunedLayer(spec, 1, (), (), (row,)),))


def test_a_table_with_prices_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path, table = tmp_path / "cpu.json", priced_table(torch="2.13")
    update_table(path, lambda _: table)
    assert read_table(path).layers == table.layers
    assert sum('"bandwidth"' in line for line in path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda price: price.update(bandwidth=0.0), "bandwidth=0.0"),
        (lambda price: price.update(calls=-1.0), "calls=-1.0"),
        (lambda price: price.update(products="much"), "products must be"),
        (lambda price: price.update(speed=1.0), "a price has the unknown field 'speed'"),
        (lambda price: price.pop("margin"), "'margin' is missing"),
        (lambda price: price.update(subject=7), "subject must be below 1"),
        (lambda price: price.update(steps=0), "prices of 0 steps"),
        (lambda price: price.update(date="yesterday"), "Invalid isoformat"),
    ],
)
def test_damaged_prices_are_refused(tmp_path: Path, change: Any, match: str) -> None:
    data = priced_table().to_dict()
    change(data["prices"][0])
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(data))
    with pytest.raises(MatrixFileError, match=match):
        read_table(path)
    data = priced_table().to_dict()
    data["prices"] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(MatrixFileError, match="two prices are of TORCH"):
        read_table(path)


def test_a_decision_has_the_prices_of_its_table_and_says_so() -> None:
    table = priced_table()
    decision = attnplug.explain(SPEC, "cpu", tuned=table)
    source = f"{table.name}, measured 2026-11-28"
    assert decision.sharing_prices == TablePrices(TRUE, source)
    assert decision.price_source == source
    assert f"shared prefixes: prices of {source}" in str(decision)
    assert Decision.from_json(decision.to_json()) == decision


@pytest.mark.parametrize(
    "table",
    [
        priced_table(SPEC.replace(num_heads=8)),
        priced_table(backend="FLEX"),
        priced_table(torch="1.0"),
        priced_table(device=H200),
        False,
    ],
    ids=["other layer", "other backend", "other version", "other device", "no table"],
)
def test_prices_of_something_else_leave_the_built_in_ones(table: Any) -> None:
    decision = attnplug.explain(SPEC, "cpu", tuned=table)
    assert decision.sharing_prices is None
    assert decision.price_source == "built in"
    assert "sharing_prices" not in decision.to_dict()


def test_a_backend_without_prices_says_how_to_get_them() -> None:
    fakes = registry(backend("A", 50, features=SHARES))
    assert fakes.explain(SPEC, CPU).price_source == "none; attnplug tune measures those of A"


@pytest.mark.parametrize("per_phase", [True, False])
def test_steps_decide_by_the_prices_of_the_table(per_phase: bool) -> None:
    spec = layer(dtype="float32")
    dear, cheap = (
        dataclasses.replace(TRUE, bandwidth=1e6, products=1e15, calls=calls) for calls in (1e6, 0.0)
    )
    for prices, words in (
        (dear, "too little for further calls"),
        (cheap, "1 shared prefixes with 3 readers"),
    ):
        (one,) = priced_table(spec).layers
        row = dataclasses.replace(one.prices[0], prices=prices)
        table = TunedTable(CPU, (dataclasses.replace(one, prices=(row,)),))
        plan = attnplug.plan({"0": spec}, "cpu", num_blocks=64, tuned=table, per_phase=per_phase)
        again = ModelPlan.from_json(plan.to_json())
        for each in (plan, again):
            assert each.decisions["0"].sharing_prices == TablePrices(
                prices, f"{table.name}, measured 2026-11-28"
            )
        runtime = AttentionRuntime(plan, debug=False)
        builder = runtime.step_batch_builder(max_model_len=1024)
        stem = list(range(1, 33))
        for name, own in (("a", 40), ("b", 41), ("c", 42)):
            builder.add_request(name, [[*stem, own]], 16 * len(stem) + 1)
        runtime.begin_step(builder.step(1))
        (note,) = runtime.step_notes
        assert words in note
        assert note.endswith(f", by prices of {table.name}, measured 2026-11-28")
