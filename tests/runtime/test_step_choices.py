"""The step chooses: plans divide the steps of a layer among backends, say so, and run them there."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from fake_backends import backend, layouts, offered
from graph_backends import GraphBuilder, GraphImpl, graph_backend
from graph_models import FULL, LONGEST, config, state_of
from served_model import ServedModel

from attnplug import Device, LayerSpec, Phase, plan
from attnplug.core import AttentionCGSupport
from attnplug.core.composite.steps import StepKind, StepPriority, StepRange
from attnplug.core.errors import PolicyError
from attnplug.registry import get_registry
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import TimedRow, TunedLayer, TunedTable
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.runtime import ModelPlan
from attnplug.testing import assert_close

CPU = Device("cpu")
SHORT = StepRange(StepKind.PREFILL, query=(1, 12))
SMALL = StepRange(StepKind.MIXED, requests=(2, 4), rows=(1, 20), keys=(1, 40))


def ranked(name, prefill, decode, *ranges, base=backend, **attributes):
    """A backend with a priority for each phase, and with others for ranges of steps."""
    priorities = {Phase.PREFILL: prefill, Phase.DECODE: decode, None: min(prefill, decode)}
    return base(
        name,
        get_priority=lambda spec, device, phase: priorities[phase],
        get_step_priorities=lambda spec, device: tuple(StepPriority(*each) for each in ranges),
        **attributes,
    )


def three(*ranges, **attributes):
    return ranked("P", 90, 20), ranked("D", 20, 90), ranked("S", 30, 30, *ranges, **attributes)


def decided(*backends, **asked):
    with offered(*backends):
        made = plan({"l": FULL}, "cpu", **asked)
    return next(iter(made.decisions.values())), made


def said(decision):
    return [str(each) for each in decision.steps]


# Priorities for ranges of steps


def test_steps_of_a_range_run_on_the_backend_that_ranks_highest_there():
    decision, made = decided(*three((SHORT, 95), (StepRange(StepKind.DRAFT), 91), (SMALL, 99)))
    assert decision.backend == "P+D+S"
    assert decision.members == {Phase.PREFILL: "P", Phase.DECODE: "D"}
    assert said(decision) == [
        f"{SMALL.words} run on S: priority 99 for such steps, and P+D has 90",
        "prefills with at most 12 new tokens a request run on S: priority 95 for such steps, and P has 90",
        "decodes of several tokens run on S: priority 91 for such steps, and D has 90",
    ]
    assert decision.full_name == (
        "P+D[mixed requests 2..4 rows ..20 keys ..40 on S; prefill query ..12 on S; draft on S]"
    )
    assert decision.get_backend_cls().full_name() == decision.full_name
    assert "decodes of several tokens run on S" in " ".join(str(decision).split())
    assert made.backends == ("P+D+S",)


def test_a_lower_or_equal_rank_changes_nothing():
    decision, _ = decided(*three((SHORT, 90), (StepRange(StepKind.DRAFT), 89), (SMALL, 90)))
    assert (decision.backend, decision.steps) == ("P+D", ())


def test_a_half_can_serve_steps_of_the_other_phase():
    decision, _ = decided(ranked("P", 90, 20), ranked("D", 20, 90, (SHORT, 95)))
    assert decision.backend == "P+D"
    assert [each.backend for each in decision.steps] == ["D"]


def test_drafts_of_a_backend_that_prefills_them_are_ranked_as_prefills():
    plain = ranked("D", 20, 90), ranked("P", 90, 20), ranked("M", 30, 80)
    assert decided(*plain)[0].steps == ()
    slow = ranked("D", 20, 90, drafts_on_prefill=True)
    decision, _ = decided(slow, *plain[1:])
    assert said(decision) == ["decodes of several tokens run on M: priority 80 for such steps, and D has 20"]


def test_a_backend_can_rank_itself_lower_for_a_range():
    low = ranked("D", 20, 90, (StepRange(StepKind.DRAFT), 10))
    decision, _ = decided(low, ranked("P", 90, 20))
    assert said(decision) == ["decodes of several tokens run on P: priority 20 for such steps, and D has 10"]


def test_rules_of_the_user_are_kept_for_all_steps():
    decision, _ = decided(*three((SHORT, 95), (StepRange(StepKind.DRAFT), 99)), backend="decode=D")
    assert decision.steps == ()
    assert decided(*three((SHORT, 95)), per_phase=False)[0].steps == ()


def test_layers_that_keep_equal_bits_are_not_divided():
    spec = FULL.replace(invariance=("batch",))
    with offered(*three((SHORT, 95))):
        made = plan({"l": spec}, "cpu")
    assert made.decisions["l"].steps == ()


def test_a_range_whose_backend_shares_no_cache_is_noted_with_the_reason():
    *_, s = three((SHORT, 95), supported_kv_cache_layouts=layouts("HND"))
    nhd = {"supported_kv_cache_layouts": layouts("NHD")}
    decision, made = decided(ranked("P", 90, 20, **nhd), ranked("D", 20, 90, **nhd), s)
    assert (decision.backend, decision.steps) == ("P+D", ())
    (note,) = made.notes
    assert note.startswith(
        "prefills with at most 12 new tokens a request would run on S, but KV layouts differ"
    )


def test_a_wrong_answer_about_ranges_changes_nothing():
    wrong = backend("W", get_priority=lambda *asked: 30, get_step_priorities=lambda *asked: [SHORT])
    decision, made = decided(*three()[:2], wrong)
    assert decision.steps == ()
    (note,) = made.notes
    assert "from get_step_priorities, which must be a tuple or list of StepPriority" in note
    assert note.endswith("; ignored")


# Names with routes


def test_a_composite_with_routes_can_be_asked_for_by_name():
    name = "P+D[prefill query ..12 on S; draft on P]"
    decision, _ = decided(*three(), backend=name)
    assert decision.backend == "P+D+S"
    assert said(decision)[0].endswith("run on S: asked for by backend")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("P+D[prefill on X]", "X.* is not a backend"),
        ("P+D[prompt on S]", "must begin with one of decode"),
        ("P[draft on S]", "has routes and one half"),
        ("P+D[draft on S+P]", r"has a route on S\+P"),
        ("P+D[draft on S", "has no ]"),
        ("P+D+S", "names 3 backends"),
    ],
)
def test_a_name_of_another_form_is_refused(name, why):
    with pytest.raises(PolicyError, match=why):
        decided(*three(), backend=name)


def test_a_plan_from_json_has_the_same_class_and_other_limits_another_digest():
    backends = three((SHORT, 95))
    with offered(*backends) as registry:
        made = plan({"l": FULL}, "cpu")
        back = ModelPlan.from_json(made.to_json(), registry)
    assert back == made
    assert back.digest() == made.digest()
    (name,) = made.decisions
    assert back.decisions[name].backend_cls is made.decisions[name].backend_cls
    assert made.to_dict()["decisions"][name]["steps"] == [
        {
            "steps": "prefill query ..12",
            "backend": "S",
            "why": "priority 95 for such steps, and P has 90",
        }
    ]
    other = decided(*three((StepRange(StepKind.PREFILL, query=(1, 13)), 95)))[1]
    assert other.backends == made.backends
    assert other.digest() != made.digest()


# Measured times


def measured(*cells, spec=FULL, spread=0.004):
    """A table of backends that nobody ships: names, shapes and microseconds."""
    rows, shapes = [], {}
    for text, times in cells:
        shape = StepShape.parse(text)
        shapes[shape] = 1.0
        for name, us in times.items():
            subject = BackendVersions(name, None, None, CPU, ())
            facts: dict[str, Any] = {"rounds": 5, "date": "2026-11-22T02:00:00+00:00", "spread": spread}
            rows.append(TimedRow(subject, shape, (16, "NHD"), us=us, **facts))
    layer = TunedLayer(spec, 1, tuple(shapes.items()), tuple(rows))
    return TunedTable(CPU, (layer,))


LONG, DECODES = (
    ("prefill 4 x 4k", {"P": 100, "D": 150, "S": 160}),
    ("decode 8 x 4k", {"P": 300, "D": 100, "S": 120}),
)


def by_times(*cells, backends=None):
    return decided(*(backends or three()), tuned=measured(LONG, DECODES, *cells))[0]


def test_short_prompts_go_to_the_backend_that_was_faster_up_to_the_longest_one_measured():
    decision = by_times(
        ("prefill 64 x 40", {"P": 100, "D": 90, "S": 50}),
        ("prefill 64 x 100", {"P": 100, "D": 90, "S": 80}),
        ("prefill 32 x 300", {"P": 100, "D": 101, "S": 101}),
        ("prefill 16 x 500", {"P": 100, "D": 120, "S": 110}),
    )
    first, *_ = decision.steps
    assert (str(first.steps), first.backend) == ("prefill query ..100", "S")
    assert first.why.startswith("measured 2.00x faster than P at prefill 64 x 40 in tuned table ")


def test_few_decodes_and_drafts_have_backends_of_their_own():
    decision = by_times(
        ("decode 1 x 4k", {"P": 300, "D": 101, "S": 50}),
        ("decode 2 x 4k", {"P": 300, "D": 101, "S": 100}),
        ("decode 8 x 4 of 4k", {"P": 101, "D": 102, "S": 400}),
    )
    assert [(str(each.steps), each.backend) for each in decision.steps] == [("decode requests ..1", "S")]
    slow = by_times(("decode 8 x 4 of 4k", {"P": 90, "D": 100, "S": 400}))
    assert [(str(each.steps), each.backend) for each in slow.steps] == [("draft", "P")]


def test_within_the_noise_and_slower_at_one_step_nothing_changes():
    assert by_times(("prefill 64 x 100", {"P": 100, "D": 99, "S": 99})).steps == ()
    cells = ("prefill 64 x 100", {"P": 100, "S": 50}), ("prefill 8 x 100", {"P": 100, "S": 104})
    assert by_times(*cells).steps == ()


@pytest.mark.parametrize(("slow", "found"), [(115, ["prefill query ..300"]), (400, [])])
def test_a_range_gains_more_than_it_loses(slow, found):
    decision = by_times(
        ("prefill 64 x 40", {"P": 226, "S": 100}),
        ("prefill 16 x 64 of 8k", {"P": 100, "S": slow}),
        ("prefill 32 x 300", {"P": 124, "S": 100}),
    )
    short = [str(each.steps) for each in decision.steps if each.steps.query[1] != 40]
    assert short == found


def test_long_prompts_may_have_another_backend_too():
    decision = by_times(
        ("prefill 16 x 1k", {"P": 50, "D": 100, "S": 100}), ("prefill 1 x 16k", {"P": 104, "D": 100, "S": 90})
    )
    assert [(str(each.steps), each.backend) for each in decision.steps] == [("prefill query 16384..", "S")]


def test_mixed_steps_like_those_measured_go_whole_to_a_faster_backend():
    mixed = "mixed 24 x 3k + 1 x 512 of 2k", {"P+D": 175, "P": 157, "D": 176, "S": 190}
    decision = by_times(mixed)
    assert [(str(each.steps), each.backend) for each in decision.steps] == [
        ("mixed query ..1024 requests 12..50 rows ..1072 keys ..3072", "P")
    ]
    assert by_times((mixed[0], {"P+D": 157, "P": 175, "D": 176, "S": 190})).steps == ()
    fewer = "mixed 6 x 4k + 1 x 256 of 2k", {"P+D": 90, "P": 70, "D": 80, "S": 99}
    both = by_times(mixed, fewer)
    assert [str(each.steps) for each in both.steps] == [
        "mixed query ..1024 requests 3..50 rows ..1072 keys ..4096"
    ]


def test_times_in_a_range_count_more_than_a_declaration():
    declares = three((SHORT, 95), (StepRange(StepKind.DRAFT), 95))
    decision = by_times(("prefill 64 x 8", {"P": 100, "D": 120, "S": 150}), backends=declares)
    assert [str(each.steps) for each in decision.steps] == ["draft"]


def test_a_declaration_counts_between_measured_steps_that_do_not_speak_against_it():
    declares = three((SHORT, 95))
    won = ("prefill 64 x 8", {"P": 100, "D": 120, "S": 60})
    decision = by_times(won, backends=declares)
    assert [(str(each.steps), each.backend) for each in decision.steps] == [
        ("prefill query ..8", "S"),
        ("prefill query ..12", "S"),
    ]
    even = by_times(won, ("prefill 64 x 10", {"P": 100, "S": 100}), backends=declares)
    assert [str(each.steps) for each in even.steps] == ["prefill query ..8", "prefill query ..12"]
    for times in ({"P": 90, "D": 95, "S": 100}, {"P": 90, "D": 95}):
        lost = by_times(won, ("prefill 64 x 10", times), backends=declares)
        assert [str(each.steps) for each in lost.steps] == ["prefill query ..8"]


# Running


class Notes(GraphImpl):
    """Attends as its base does, and notes its backend and rows."""

    ran: list[tuple[str, int]] = []  # noqa: RUF012  (one list for all impls of a test)

    def attend(self, layer, query, key, value, kv_cache, attn_metadata, output, **asked):
        self.ran.append((self.backend.get_name(), attn_metadata.common.num_actual_tokens))
        return super().attend(layer, query, key, value, kv_cache, attn_metadata, output, **asked)


def graphs(name, prefill, decode, *ranges):
    made = ranked(
        name, prefill, decode, *ranges, base=lambda name, **rest: graph_backend(UNIFORM, name, **rest)
    )
    builder = type("Sorts", (GraphBuilder,), {"cudagraph_support": UNIFORM, "reorder_batch_threshold": 1})
    made.get_impl_cls = staticmethod(lambda: Notes)
    made.get_builder_cls = staticmethod(lambda: builder)
    return made


UNIFORM = AttentionCGSupport.UNIFORM_BATCH
FEW = StepRange(StepKind.DECODE, requests=(1, 2))
BACKENDS = (
    graphs("P", 90, 20),
    graphs("D", 20, 90),
    graphs("S", 30, 30, (SHORT, 95), (StepRange(StepKind.DRAFT), 92), (SMALL, 99), (FEW, 91)),
)


def served(drafts=3):
    with offered(*BACKENDS):
        return ServedModel(
            {"0": FULL, "1": FULL},
            config=config(num_speculative_tokens=drafts, max_num_batched_tokens=256),
            max_model_len=LONGEST,
            debug=False,
            num_blocks=256,
        )


def words_choose(texts, threshold, lens, longest):
    """The member that a decision's sentences name for each row of a step."""
    rules = []
    for text in texts:
        kind = "decodes of several tokens" if text.startswith("decodes of several") else text.split()[0]
        limits = {}
        for least, most, what in re.findall(
            r"(?:at most|(\d+) to) (\d+) (new tokens a request|requests|tokens a request|new tokens)", text
        ):
            limits[what] = int(least or 1), int(most)
        rules.append((kind, limits, text.split(" run on ")[1].split(":")[0]))

    def member(kind, part, default):
        found = {
            "new tokens a request": max(part),
            "requests": len(part),
            "new tokens": sum(part),
            "tokens a request": longest,
        }
        for each, limits, name in rules:
            if each == kind and all(low <= found[what] <= high for what, (low, high) in limits.items()):
                return name
        return default

    decodes = [each for each in lens if each <= threshold]
    rest = [each for each in lens if each > threshold]
    whole = member("mixed", lens, None) if decodes and rest else None
    if whole:
        return [whole] * sum(lens)
    kind = "decodes" if max(decodes, default=1) == 1 else "decodes of several tokens"
    first = [member(kind, decodes, "D")] * sum(decodes) if decodes else []
    return first + ([member("prefills", rest, "P")] * sum(rest) if rest else [])


def test_in_1000_random_steps_the_text_of_the_decision_and_the_member_that_runs_agree():
    made, draw = served(), random.Random(7)
    decision = made.plan.decisions["0"]
    assert [each.backend for each in decision.steps] == ["S"] * 4
    builder = made.runtime.attention_groups[0].builder
    texts, threshold = said(decision), builder.reorder_batch_threshold
    assert threshold == 4
    seen = set()
    for _ in range(1000):
        kinds = draw.choice([(1,), (1, 2, 4), (5, 9, 12, 13, 30), (1, 5, 12, 13), (1, 3, 6, 20)])
        lens = sorted(draw.choices(kinds, k=draw.randint(1, 6)), key=lambda length: length > threshold)
        totals = [length + draw.randint(0, 30) for length in lens]
        metadata = builder.build(0, step(lens, totals))
        members = made.runtime.layers["0"].impl.backend.members()
        ran = []
        for part, place in (
            (metadata.decode, metadata.decode_place),
            (metadata.prefill, metadata.prefill_place),
        ):
            if part is not None:
                ran += [members[place].get_name()] * part.common.num_actual_tokens
        assert ran == words_choose(texts, threshold, lens, max(totals)), (lens, totals)
        seen |= set(ran)
    assert seen == {"P", "D", "S"}


def step(lens, totals):
    from attnplug.testing import paged_batch

    return paged_batch(FULL, lens, totals).common


def test_every_row_of_routed_steps_equals_the_oracle_and_is_attended_by_its_member():
    made, draw = served(), random.Random(3)
    for name in "abcdef":
        made.add(name)
    done = dict.fromkeys("abcdef", 0)
    ran = set()
    for _ in range(40):
        names = draw.sample("abcdef", draw.randint(1, 6))
        scheduled = {}
        for name in names:
            count = draw.choice([1, 1, 2, 4, 6, 12, 14])
            if done[name] + count > LONGEST - 1:
                made.remove(name)
                made.add(name)
                done[name], count = 0, 9
            scheduled[name] = count
            done[name] += count
        Notes.ran.clear()
        # It compares every layer with the oracle.
        made.step(**scheduled)
        assert sum(rows for _, rows in Notes.ran) == 2 * sum(scheduled.values())
        ran |= {name for name, _ in Notes.ran}
    assert ran == {"P", "D", "S"}


@pytest.mark.parametrize(
    ("queries", "requests", "member"), [(1, 2, "S"), (1, 4, "D"), (3, 2, "S"), (3, 4, "S")]
)
def test_a_graph_is_replayed_by_the_member_that_it_was_captured_with(queries, requests, member):
    made = served(drafts=2)
    state = state_of(made)
    Notes.ran.clear()
    with state.capture(requests, queries):
        rows = requests * queries
        made.runtime.forward("0", torch.ones(rows, 4, 8), torch.ones(rows, 2, 8), torch.ones(rows, 2, 8))
    assert [name for name, _ in Notes.ran] == [member]
    # A step of fewer requests is padded to the graph's size, so that it has the same member.
    for names in ("ab"[: requests - 1], "abcd"[:requests]):
        made = served(drafts=2)
        state = state_of(made)
        for index, name in enumerate(names):
            made.add(name)
            made.step(**{**dict.fromkeys(names[:index], 1), name: 7 + index})
        scheduled = dict.fromkeys(names, queries)
        buffers = state.get_graph_input_buffers(requests, queries)
        state.prepare_graph_input_buffers(buffers, made.begin(**scheduled))
        drawn = made.draw("0", scheduled)
        own = len(names) * queries
        padded = (
            torch.cat([each, each.new_full((rows - own, *each.shape[1:]), 9.0)])
            for each in (drawn.query, drawn.key, drawn.value)
        )
        Notes.ran.clear()
        found = made.runtime.forward("0", *padded)
        assert Notes.ran == [(member, rows)]
        assert_close(found[:own], drawn.expected, 1e-5)


def test_warm_up_runs_steps_on_both_sides_of_each_limit():
    from attnplug.runtime.steps.warm_up import step_shapes

    made = served()
    lengths = {shape.query_len for shape in step_shapes(made.runtime, made.runtime.layers["0"])}
    assert {12, 13} <= lengths


def test_latents_are_decoded_by_another_backend_where_it_ranks_higher():
    from attnplug.core import MLADims

    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    found = {}
    for heads in (8, 16, 128):
        spec = LayerSpec(num_heads=heads, num_kv_heads=1, head_size=dims.latent_size, mla=dims)
        made = plan({"l": spec}, "h100", assume_installed="all")
        decision = made.decisions["l"]
        found[heads] = decision.backend, [f"{each.steps} on {each.backend}" for each in decision.steps]
        back = ModelPlan.from_json(made.to_json(), get_registry())
        assert back.decisions["l"].backend_cls is decision.backend_cls
    few = ["draft requests ..2 on TRITON", "decode requests ..4 on TRITON"]
    assert found == {
        8: ("FLASH_ATTN_4+TRITON", []),
        16: ("FLASH_ATTN_4+FLASH_MLA+TRITON", few),
        128: ("FLASH_ATTN_4+FLASH_MLA+TRITON", few),
    }
    # Ranks that share latents decode each row by one impl.
    shared = plan({"l": spec.replace(num_heads=64, needs_lse=True)}, "h100", assume_installed="all")
    assert shared.decisions["l"].steps == ()


def test_one_backend_for_both_phases_can_leave_a_range_to_another():
    one, other = ranked("ONE", 90, 90), ranked("OTHER", 50, 50, (StepRange(StepKind.DRAFT), 95))
    decision, _ = decided(one, other)
    assert decision.backend == "ONE+ONE+OTHER"
    assert decision.members == {Phase.PREFILL: "ONE", Phase.DECODE: "ONE"}
    assert said(decision) == [
        "decodes of several tokens run on OTHER: priority 95 for such steps, and ONE has 90"
    ]
    assert decided(one, ranked("OTHER", 50, 50))[0].backend == "ONE"
    assert decided(one, other, backend="ONE")[0].backend == "ONE"
    with offered(one, other) as registry:
        again = plan({"l": FULL}, "cpu")
        back = ModelPlan.from_json(again.to_json(), registry)
    assert back.decisions["l"].backend_cls is again.decisions["l"].backend_cls
