"""Reasons for a refusal, for people and for programs.

The causes and remedies of each reason code, for `attnplug explain-code` and the documentation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from attnplug._system.text import shortened
from attnplug.core.interface.guarded import plain_text

_MANY = 8
"""The least number of sizes in even steps that a sentence shortens to its ends."""


class Reason(str):
    """One cause why a backend does not serve a layer: a sentence that carries its facts.

    The sentence reads fact, value and limit, remedy:
    `head_size not supported: 80 is not one of 64, 128`. Being a `str`, a list of reasons is also
    the list of sentences that callers of vLLM's `validate_configuration` expect.
    """

    __slots__ = ("code", "field", "remedy", "requested", "supported")

    code: str
    """Stable name of the cause: one of REASON_CODES, or `feature.<name>`."""
    field: str | None
    """The LayerSpec or Device field at fault, if any."""
    requested: str | None
    """The value that the layer asks for."""
    supported: str | None
    """The values that are supported."""
    remedy: str | None
    """A step that the user can take, if there is one."""

    def __new__(
        cls,
        fact: str,
        *,
        code: str,
        field: str | None = None,
        requested: object = None,
        supported: object = None,
        remedy: str | None = None,
    ) -> Reason:
        """Compose the sentence from the plain `fact`, the value against its limit, and the remedy."""
        asked, limit = _words(requested), _words(supported)
        text = fact
        if asked is not None and limit is not None:
            text += f": {asked} is not {_limit(limit)}"
        elif asked is not None:
            text += f": {asked}"
        elif limit is not None:
            text += f": {limit}"
        if remedy:
            text += f"; {remedy}"
        data = {"text": text, "code": code, "field": field, "requested": asked, "supported": limit}
        return cls.from_dict(data | {"remedy": remedy})

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The pickling of str would call __new__ without the required code.
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, str | None]:
        """A JSON object: `text`, `code`, `field`, `requested`, `supported`, `remedy`."""
        facts = ("code", "field", "requested", "supported", "remedy")
        return {"text": str(self), **{name: getattr(self, name) for name in facts}}

    @classmethod
    def from_dict(cls, data: Mapping[str, str | None]) -> Reason:
        """The reason that `to_dict` wrote. TypeError for a value that is not text."""
        for name in ("text", *cls.__slots__):
            if not isinstance(data.get(name), str | None):
                raise TypeError(f"{name} of a reason must be text")
        # The text is a finished sentence; cls(...) would compose it again.
        # A plugin's sentence with line breaks could pass for lines of attnplug's own.
        text = shortened(data["text"] or "", _LONGEST)
        self = str.__new__(cls, " ".join(text.splitlines()))
        self.code = _short(data["code"]) or ""
        self.field, self.remedy = _short(data.get("field")), _short(data.get("remedy"))
        self.requested, self.supported = _short(data.get("requested")), _short(data.get("supported"))
        return self


# Characters of a reason and of each of its facts that are shown: a plugin may give text of any length.
_LONGEST = 4000


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST else shortened(text, _LONGEST)


def plain_reason(item: object) -> Reason:
    """A plugin's reason as a Reason of plain and short texts.

    Raises:
        TypeError: it is a Reason without its facts.
    """
    if type(item) is Reason:
        # `str.__new__` makes a Reason without facts, of any text.
        facts = [getattr(item, name, item) for name in Reason.__slots__]
        if type(facts[0]) is not str or not facts[0] or any(each is item for each in facts):
            raise TypeError("a reason without its code; make it by Reason(fact, code=...)")
        texts = (item, *(each for each in facts if each is not None))
        if (
            all(type(each) in (str, Reason) and len(each) <= _LONGEST for each in texts)
            and item.isprintable()
        ):
            return item
    if not isinstance(item, Reason):
        return Reason(plain_text(str(item)), code="combination")
    # A subclass of Reason may answer anything later.
    data = {name: None if fact is None else plain_text(fact) for name, fact in item.to_dict().items()}
    return Reason.from_dict(data)


# Values that a reason reads at most: a plugin may declare an endless iterator.
_MOST = 1000


def _words(value: object) -> str | None:
    if isinstance(value, Iterable) and not isinstance(value, str):
        items = list(itertools.islice(value, _MOST))
        value = _ranges(items) or ", ".join(str(item) for item in items)
    return None if value in (None, "") else str(value)


def _ranges(items: list[object]) -> str | None:
    """Numbers in words; None if one is no int."""
    # A long run of sizes is shown as its ends, because nobody reads thirty numbers.
    sizes = [item for item in items if type(item) is int]
    if len(sizes) < len(items):
        return None
    listed: list[str] = []
    at = 0
    while at < len(sizes):
        end = at + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[at + 1] - sizes[at] > 0:
            end += 1
        if end < len(sizes) and end - at + 1 >= _MANY:
            listed.append(f"{sizes[at]} to {sizes[end]} in steps of {sizes[end] - sizes[end - 1]}")
            at = end + 1
        else:
            listed.append(str(sizes[at]))
            at += 1
    return ", ".join(listed)


def _limit(words: str) -> str:
    if ", " in words or " in steps of " in words:
        return f"one of {words}"
    return words.replace("multiples of", "a multiple of")


@dataclasses.dataclass(frozen=True, slots=True)
class CodeHelp:
    """Help for one code of REASON_CODES.

    Args:
        seen: a sentence of such a reason; "..." may be any text.
        why: the cause.
        steps: what a user can do, the best first.
    """

    seen: str
    why: str
    steps: tuple[str, ...]


_OTHER_BACKEND = (
    "Use another backend: the model asks for it. `attnplug select CONFIG --why` shows those that serve it."
)
_ASK_AUTHOR = "Report it to the author of the plugin, with the sentence and `attnplug doctor --json`."

REASON_HELP: Mapping[str, CodeHelp] = {
    "head_size": CodeHelp(
        "head_size not supported: 80 is not one of 64, 128, 256",
        "The backend has no kernel for queries, keys or values of this size.",
        (
            _OTHER_BACKEND,
            "If you wrote the `LayerSpec`, check that `head_size` is that of one head, not of all heads.",
        ),
    ),
    "dtype": CodeHelp(
        "dtype not supported: float32 is not one of float16, bfloat16",
        "The backend computes queries, keys and values in other types only.",
        ("Load the model in a type that the reason lists.", _OTHER_BACKEND),
    ),
    "kv_cache_dtype": CodeHelp(
        "kv_cache_dtype not supported: fp8 is not auto",
        "The backend cannot store the KV cache in this type. `auto` is the type of the layer.",
        (
            "Choose a type that the reason lists, such as `--kv-cache-dtype auto`. `fp8` means `fp8_e4m3`.",
            _OTHER_BACKEND,
        ),
    ),
    "kv_format": CodeHelp(
        "no KV format has the name acme_3bit",
        "No loaded plugin offers the format, or its pages cannot have the layer's heads.",
        (
            "Install the plugin that offers the format, or choose another `--kv-cache-dtype`.",
            "The reason names the head sizes that the format has.",
        ),
    ),
    "block_size": CodeHelp(
        "block_size not supported: 16 is not a multiple of 256; leave block_size unset and the backend chooses",
        "The backend reads KV blocks of other sizes, or two backends of one layer read no size in common.",
        (
            "Leave `block_size` unset, so that the backend chooses.",
            "Choose a size that the reason lists, if your engine's blocks can have it.",
        ),
    ),
    "sink": CodeHelp(
        "sinks not supported",
        "The model adds a learned number to each head's softmax (gpt-oss). A kernel without it gives wrong numbers.",
        (_OTHER_BACKEND,),
    ),
    "mla": CodeHelp(
        "MLA not supported",
        "The model uses latent attention (DeepSeek, Kimi) and the backend does not, or the other way round.",
        (
            "Ask for a plan by phase, as `attnplug select CONFIG` does: many backends serve the prefill alone.",
            _OTHER_BACKEND,
        ),
    ),
    "sparse": CodeHelp(
        "sparse token_topk 2048 not supported",
        "Each query attends only keys that an indexer picks, and the backend reads no selection of this kind.",
        (
            _OTHER_BACKEND,
            "A backend that serves sparse layers alone refuses all others: use it for sparse layers only.",
        ),
    ),
    "invariance": CodeHelp(
        "invariance batch+rows not supported: kind rows is not batch",
        "The layer asks for equal bits however a step is made, and the backend's sums depend on it.",
        (
            _OTHER_BACKEND,
            "Ask for the words that it keeps, or for none: results then agree up to rounding.",
        ),
    ),
    "mm_prefix": CodeHelp(
        "multimodal prefix spans not supported",
        "The tokens of an image see each other in both directions (Gemma-3), which the backend's mask cannot express.",
        (
            _OTHER_BACKEND,
            "If you serve text only, read the text part of the configuration, which has no such layers.",
        ),
    ),
    "compute_capability": CodeHelp(
        "compute capability not supported: 7.5",
        "The backend's kernels are not made for this generation of GPUs, or the device was named without one.",
        (
            "Name the GPU, such as `--device h100`, if the reason says that the capability is not known.",
            "Use another GPU or another backend: no setting helps.",
        ),
    ),
    "device_type": CodeHelp(
        "device type not supported: cpu is not cuda",
        "The backend runs on other devices. On a CPU, only TORCH is built in.",
        (
            "Ask about the device that will run the model, such as `--device h100`. It need not be here.",
            "If it is your backend, set `device_types`: the default is `cuda` alone.",
        ),
    ),
    "attn_type": CodeHelp(
        "attention type not supported: encoder_only is not one of decoder, encoder_decoder",
        "The layer belongs to an encoder, or attends an encoder's keys, and the backend serves other layers.",
        (_OTHER_BACKEND,),
    ),
    "phase": CodeHelp(
        "phase not supported: prefill is not decode; select per phase",
        "The backend serves prefill or decode alone, and was asked to serve both.",
        (
            "Ask for a plan by phase, as `attnplug select CONFIG` and `attnplug.plan` do by default.",
            "Use a rule for the phase, such as `--backend TRITON,prefill=TORCH`.",
        ),
    ),
    "combination": CodeHelp(
        "combination not supported: fp8_e4m3 needs compute capability 8.9; fp8_e5m2 does not",
        "The backend serves each value alone, but not these together. The sentence names them.",
        ("Change the value that the sentence says can change.", _OTHER_BACKEND),
    ),
    "feature": CodeHelp(
        "alibi not supported",
        "The layer asks for a feature that the backend does not declare. The code ends with its name: `feature.alibi`.",
        (
            _OTHER_BACKEND,
            "If it is your backend and the kernel honours the feature, add the flag to `features`.",
            "If you wrote the `LayerSpec`, ask only for what the layer needs: `needs_lse` is such a field.",
        ),
    ),
    "host_lengths": CodeHelp(
        "(this release does not report it)",
        "The backend plans on the host and needs the lengths of all sequences there.",
        ("Give each batch `seq_lens_host`; `StepBatchBuilder` does.",),
    ),
    "kv_cache_layout": CodeHelp(
        "KV layouts differ: TOKENS_FIRST has NHD, HEADS_FIRST has HND",
        "Two backends for one layer read the KV cache in different orders, shapes or halves.",
        (
            "Leave out one of the two rules, so that attnplug chooses a backend that fits the other.",
            "If `ATTNPLUG_KV_CACHE_LAYOUT` is set, unset it.",
        ),
    ),
    "not_installed": CodeHelp(
        "flash-attn not installed; pip install 'flash-attn<3,>=2.7'",
        "The backend needs a distribution that is not installed in this environment.",
        (
            "Run the command of the reason, in the environment of attnplug.",
            "To ask what would be served with it, add `--assume-installed all`.",
        ),
    ),
    "version": CodeHelp(
        "triton version not supported: 3.0 is not >=3.6; pip install 'triton>=3.6'",
        "The distribution is installed in a version with which the backend was not made to work.",
        (
            "Run the command of the reason.",
            "Some versions need another torch: see the page on kernel libraries.",
        ),
    ),
    "import_failed": CodeHelp(
        "ACME cannot be imported here: get_impl_cls raised ImportError: ...; attnplug doctor ACME shows more",
        "The distribution is installed, and its kernels or the plugin's module cannot be imported.",
        (
            "Run `attnplug doctor ACME`: it imports the backend in a process of its own, and shows the error.",
            "Reinstall the library for your torch and CUDA versions. A missing symbol means a build for others.",
        ),
    ),
    "blocked": CodeHelp(
        "acme is left out by ATTNPLUG_BLOCK_PLUGINS",
        "A variable of the environment keeps the plugin from being loaded.",
        ("Change the variable that the reason names, and start the process again.",),
    ),
    "conflict": CodeHelp(
        "ACME is offered by more than one distribution; ask for ACME@one or ACME@two",
        "Two installed distributions offer a backend of one name, so attnplug chooses neither by itself.",
        ("Ask for one of them, as `ACME@distribution`.", "Uninstall the other one."),
    ),
    "api_version": CodeHelp(
        "acme is for plugin interface 2 to 3; this attnplug offers 1",
        "The plugin was made for another version of the plugin interface.",
        ("Install a version of the plugin for this attnplug, or update attnplug.",),
    ),
    "plugin_error": CodeHelp(
        "acme.AcmeBackend raised ... in get_priority; tell its author",
        "The plugin's code raised an error, returned an invalid value, or does not follow the interface.",
        (
            _ASK_AUTHOR,
            "If it is your plugin, run `attnplug conformance NAME`; the sentence says what to write.",
            "`ATTNPLUG_BLOCK_PLUGINS=name` keeps the plugin from being loaded.",
        ),
    ),
    "policy": CodeHelp(
        "(this release does not report it)", "A rule of the site excludes the backend.", ("Change the rule.",)
    ),
    "refuted": CodeHelp(
        "refuted when ACME was run here on ...; run it again with attnplug matrix --verify --backend ACME, ...",
        "`attnplug matrix --verify` ran the backend on this machine with these versions, and its numbers were wrong.",
        (
            "Update the library: a new version is not refused until it has been run.",
            "Run it again with the command of the reason.",
            "To use it all the same, pass `--allow-refuted NAME`. The decision notes it.",
        ),
    ),
    "context_parallel": CodeHelp(
        "alibi not supported under context parallelism: a rank's keys are not at consecutive positions; ...",
        "Ranks would share the tokens of the layer, and the layer needs the true positions of all keys at once.",
        (
            "Plan the model without `context_parallel`, and share its heads by tensor parallelism instead.",
            "For a block size, choose an interleave that divides it.",
        ),
    ),
}
"""Help for every code, in the order of listed reasons."""

REASON_CODES: tuple[str, ...] = tuple(REASON_HELP)
"""Every stable code, in the order of listed reasons. Features report `feature.<name>`."""
