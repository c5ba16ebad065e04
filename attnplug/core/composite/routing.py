"""Gives the parts of a step to the members of a composite, by the shape of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnplug.core.batch.splitting import split_decodes_and_prefills
from attnplug.core.composite.step_split import StepSplit, split_at
from attnplug.core.composite.steps import StepKind, StepRange, StepSizes
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import Phase


class Router:
    """Chooses the members of a composite that serve a step.

    The choice depends on host numbers that a padded step and its captured graph have in common: kind, longest query,
    requests and rows. Only mixed steps, which no graph has, may depend on lengths too.

    Args:
        places: ranges of steps, each with the place of the member that serves it; see `CompositeBackend.places`.
        prefill: the place of the member that serves all other prefills.
    """

    def __init__(self, places: Sequence[tuple[StepRange, str]], prefill: str = Phase.PREFILL) -> None:
        self._places, self._prefill = tuple(places), prefill
        # Most steps are of a kind that no range has, and a build is part of every step.
        self._kinds = frozenset(steps.kind for steps, _ in self._places)

    def place_of(self, sizes: StepSizes) -> str | None:
        """The place of the member that a range gives a step to; None where no range has it."""
        return next((place for steps, place in self._places if steps.has(sizes)), None)

    def split(
        self, common: CommonAttentionMetadata, threshold: int, is_cross: bool, *, cut: bool = False
    ) -> StepSplit:
        """The parts of a step with the places of their members.

        A mixed step in a range is one part, and so is one whose two parts have one member.

        Args:
            common: the step, decodes first.
            threshold: the longest query of a decode.
            is_cross: see `split_at`.
            cut: whether every mixed step is cut, as for captures and for parts that share a prefix.

        Raises:
            BatchError: start locations that decrease or pass `num_actual_tokens`.
        """
        # `split_attn_metadata` takes four times the host's time, because it also cuts inside requests.
        reqs, rest, tokens, others = split_decodes_and_prefills(common, threshold)
        longest, keys = common.max_query_len, common.max_seq_len
        if not rest:
            place = self._decoding(min(longest, threshold), reqs, tokens, keys)
            return StepSplit(reqs, tokens, common, None, decode_place=place)
        if not reqs:
            return StepSplit(0, 0, None, common, prefill_place=self._prefilling(longest, rest, others, keys))
        if tokens and not cut and StepKind.MIXED in self._kinds:
            sizes = StepSizes(StepKind.MIXED, longest, reqs + rest, tokens + others, keys)
            whole = self.place_of(sizes)
            if whole is not None:
                return StepSplit(0, 0, None, common, prefill_place=whole)
        # A threshold of 1 gives the longest query without a look at the lengths.
        decoded = 1 if threshold == 1 else int(common.query_start_loc_cpu[: reqs + 1].diff().max())
        decoding = self._decoding(decoded, reqs, tokens, keys)
        prefilling = self._prefilling(longest, rest, others, keys)
        if decoding == prefilling and tokens and not cut:
            return StepSplit(0, 0, None, common, prefill_place=decoding)
        split = split_at(common, reqs, tokens, is_cross, longest=decoded)
        return dataclasses.replace(split, decode_place=decoding, prefill_place=prefilling)

    def cut_places(self, query_lens: npt.NDArray[np.int32], threshold: int) -> tuple[int, str, str]:
        """The number of decodes of a step that is cut, and the places of the members of both parts."""
        is_long = query_lens > threshold
        decodes = int(is_long.argmax()) if is_long.any() else query_lens.size
        first, rest = query_lens[:decodes], query_lens[decodes:]
        # Ranges of parts have no limits of lengths, so that any number serves.
        decoding = self._decoding(int(first.max(initial=1)), first.size, int(first.sum()), 1)
        return decodes, decoding, self._prefilling(int(rest.max(initial=1)), rest.size, int(rest.sum()), 1)

    def _decoding(self, query: int, requests: int, rows: int, keys: int) -> str:
        kind = StepKind.DECODE if query <= 1 else StepKind.DRAFT
        if kind not in self._kinds:
            return Phase.DECODE
        return self.place_of(StepSizes(kind, query, requests, rows, keys)) or Phase.DECODE

    def _prefilling(self, query: int, requests: int, rows: int, keys: int) -> str:
        if StepKind.PREFILL not in self._kinds:
            return self._prefill
        return self.place_of(StepSizes(StepKind.PREFILL, query, requests, rows, keys)) or self._prefill
