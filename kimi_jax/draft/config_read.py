"""A draft checkpoint's config.json: every spelling in use, contradictions refused (DSpark notes, section 3)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kimi_jax.config_section import LIST_LIMIT, Section, shown
from kimi_jax.draft import config_rope
from kimi_jax.draft.config import DraftConfig, DraftError, GqaSizes, MlaSizes
from kimi_jax.draft.rope import RopeConfig

Stream = Literal["attn_res", "prefix"]

MOST_DRAFTS = 15
"""Tokens of a block with its anchor that one verification of the recurrent layers takes at once: 16."""

_GQA, _MLA = ("Qwen3DSparkModel", "qwen3"), ("K3DSparkModel", "k3_dspark")
_MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_TAPS = {
    "target_layer_ids": 0,
    "dspark_target_layer_ids": 0,
    "dflash_config.target_layer_ids": 0,
    "eagle_aux_hidden_state_layer_ids": 1,
    "aux_hidden_state_layer_ids": 1,
}
"""Keys that name the tapped layers, and what their convention adds to a layer counted from 0."""

_BLOCK = ("block_size", "dspark_block_size", "dflash_config.block_size")
_MASK = ("mask_token_id", "dspark_noise_token_id", "dflash_config.mask_token_id")
_CAUSAL = ("is_causal", "dflash_config.causal")

_FIXED = {
    "hidden_act": (("silu",), "SwiGLU"),
    "attention_bias": ((False,), ""),
    "mlp_bias": ((False,), ""),
    "mla_use_nope": ((False,), "a draft without rotation is another model"),
    "mla_use_output_gate": ((False,), "a draft with an output gate is another model"),
    "mla_use_qk_norm": ((False,), "a draft that normalises expanded queries and keys is another model"),
    "markov_head_type": (("vanilla",), "no published checkpoint names the tensors of the other heads"),
    "use_sliding_window": ((False,), ""),
    "sliding_window": ((None,), ""),
}
_HARMLESS = (
    *(
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "auto_map",
        "max_position_embeddings",
    ),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "initializer_range"),
    *("use_cache", "max_window_layers", "num_hidden_layers", "num_anchors", "target_model_type", "name_or_path"),
)
"""Keys that change nothing that is computed here, and those that are read elsewhere."""

_READ = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("vocab_size", "draft_vocab_size", "num_target_layers", "target_hidden_size", "aux_hidden_stream", "markov_rank"),
    *("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor", "layer_types", "is_neox_style"),
    *("rope_interleave", "logit_scale", "dspark_draft_topk", "dflash_config", *_MLA_SIZES, *config_rope.KEYS, *_FIXED),
)
_IN_DFLASH = ("target_layer_ids", "block_size", "mask_token_id", "causal")


@dataclass(frozen=True)
class DraftSpec:
    """One draft as its checkpoint describes it.

    Attributes:
      sizes: of its parameters and caches, the block and what a drafted position sees.
      taps: layers of the target whose outputs it reads, counted from 0, ascending.
      stream: which vector of a tapped layer: the mixture that the next layer would read, or the running sum.
      rope: its own rotary positions.
      mask_id: the id whose embedding stands at the positions to be drafted.
      logit_scale: multiplies scores and bias alike.
      top_k: best scores that the bias corrects, nothing else being drafted; 0 corrects all.
      confidence: whether there is such a head, and whether the config says that it also reads the token before (None: not said).
    """

    sizes: DraftConfig
    taps: tuple[int, ...]
    stream: Stream
    rope: RopeConfig
    mask_id: int
    logit_scale: float = 1.0
    top_k: int = 0
    confidence: tuple[bool, bool | None] = (True, None)

    @property
    def drafts(self) -> int:
        """Tokens drafted in one step."""
        return self.sizes.block


def load_spec(folder: str | Path, stream: Stream | None = None) -> DraftSpec:
    """Reads the config.json of a draft folder.

    Raises:
      DraftError: it cannot be read, or cannot be run; every reason is listed.
    """
    file = Path(folder) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DraftError(f"No draft can be read from {folder}", [f"config.json: {error}"]) from None
    if not isinstance(values, Mapping):
        raise DraftError(f"No draft can be read from {folder}", ["config.json holds no object"])
    return read_spec(values, str(folder), stream)


def read_spec(values: Mapping[str, Any], where: str, stream: Stream | None = None) -> DraftSpec:
    """The draft that a configuration describes.

    Args:
      values: the object in config.json.
      where: what errors call it.
      stream: the tapped stream where the configuration names none.

    Raises:
      DraftError: every unknown key, contradiction, missing value and thing that is not built.
    """
    problems: list[str] = []
    top = Section(values, "", problems)
    nested = top.section("dflash_config") or Section({}, "dflash_config.", problems)
    spellings = tuple(key for key in (*_TAPS, *_BLOCK, *_MASK, *_CAUSAL) if "." not in key)
    top.refuse_unknown((*_HARMLESS, *_READ, *spellings))
    nested.refuse_unknown(_IN_DFLASH)
    top.require(_FIXED)
    hidden, vocab = top.integer("hidden_size"), top.integer("vocab_size")
    _same(top, "draft_vocab_size", vocab, "a pruned vocabulary is not built")
    _same(top, "target_hidden_size", hidden, "embedding and head are the target's")
    if top.boolean("sample_from_anchor", "aux_hidden_state_layer_ids" not in values) is not True:
        top.complain("sample_from_anchor", "is false; only blocks whose anchor row is sampled are built")
    sizes = DraftConfig(
        "",
        _attention(top),
        markov_rank=top.integer("markov_rank"),
        hidden=hidden,
        vocab=vocab,
        layers=top.integer("num_hidden_layers", high=LIST_LIMIT),
        ffn=top.integer("intermediate_size"),
        taps=1,
        block=_agreed(top, _BLOCK, lambda s, key: s.integer(key, 1, MOST_DRAFTS)) or 1,
        sees="past" if _agreed(top, _CAUSAL, lambda s, key: s.boolean(key, False), False) else "block",
        eps=top.number("rms_norm_eps", 1e-12, 1e-2),
    )
    _layer_types(top)
    taps = _taps(top)
    _same(top, "num_target_layers", len(taps), "it counts the tapped layers")
    spec = DraftSpec(
        sizes=replace(sizes, taps=max(len(taps), 1)),
        taps=taps,
        stream=_stream(top, stream),
        rope=config_rope.read_rope(values, problems),
        mask_id=_agreed(top, _MASK, lambda s, key: s.integer(key, 0, max(vocab - 1, 0))) or 0,
        logit_scale=top.number("logit_scale", 1e-6, 1e6, 1.0),
        top_k=0 if values.get("dspark_draft_topk") is None else top.integer("dspark_draft_topk", 0, vocab),
        confidence=(
            top.boolean("enable_confidence_head", True),
            None if "confidence_head_with_markov" not in values else top.boolean("confidence_head_with_markov", True),
        ),
    )
    if problems:
        raise DraftError(f"The draft {where} cannot be used", problems)
    return spec


def _attention(top: Section) -> GqaSizes | MlaSizes:
    values = top.values
    architectures = values.get("architectures")
    named = {values.get("model_type")} | set(architectures if isinstance(architectures, list) else ())
    latent = "kv_lora_rank" in values
    gqa, mla = bool(named & set(_GQA)), bool(named & set(_MLA))
    if not gqa and not mla:
        top.complain("architectures", f"= {shown(architectures)}; only {_GQA[0]} and {_MLA[0]} are built")
    if gqa and (mla or latent):
        top.complain("model_type", "names the backbone with grouped queries, but there is kv_lora_rank")
    if mla and not latent:
        top.complain("model_type", "names the latent backbone, but there is no kv_lora_rank")
    for key, pairs in (("is_neox_style", False), ("rope_interleave", True)):
        if key in values and (pairs == latent) != top.boolean(key, True):
            turns = "neighbouring pairs" if latent else "halves"
            top.complain(key, f"= {shown(values[key])} does not go with this backbone, which rotates {turns}")
    heads = top.integer("num_attention_heads")
    if latent:
        return MlaSizes(heads, *(top.integer(key) for key in _MLA_SIZES))
    kv_heads, width = top.integer("num_key_value_heads"), top.integer("head_dim")
    if top.sound("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        top.complain("num_key_value_heads", f"= {kv_heads} does not divide num_attention_heads = {heads}")
    return GqaSizes(heads, kv_heads, width)


def _taps(top: Section) -> tuple[int, ...]:
    found = {key: value for key in _TAPS if (value := _lookup(top, key)) is not None}
    lists: dict[tuple[int, ...], str] = {}
    for key, value in found.items():
        good = isinstance(value, list) and value and all(type(layer) is int for layer in value)
        layers = tuple(layer - _TAPS[key] for layer in value) if good else ()
        if not good or min(layers) < 0 or list(layers) != sorted(set(layers)):
            top.complain(key, f"= {shown(value)}; it must be a list of layers in ascending order")
            continue
        lists.setdefault(layers, key)
    if not found:
        top.complain(
            "target_layer_ids", f"is missing; the tapped layers may also be called {', '.join(list(_TAPS)[1:])}"
        )
    if len(lists) > 1:
        told = "; ".join(f"{key}: {shown(list(layers))}" for layers, key in lists.items())
        top.complain("target_layer_ids", f"is contradicted; counted from 0 the tapped layers are {told}")
    return next(iter(lists), ())


def _stream(top: Section, asked: Stream | None) -> Stream:
    given, known = top.values.get("aux_hidden_stream"), get_args(Stream)
    if asked is not None and asked not in known:
        top.complain("aux_hidden_stream", f"asked for as {asked!r}; choose {' or '.join(known)}")
    if given is None:
        if asked is None:
            top.complain(
                "aux_hidden_stream",
                "is missing: say which stream of the target it was trained on, attn_res or prefix (option draft_stream)",
            )
        return asked or "attn_res"
    if given not in known:
        top.complain("aux_hidden_stream", f"= {shown(given)}; choose {' or '.join(known)}")
    elif asked not in (None, given):
        top.complain("aux_hidden_stream", f"= {shown(given)}, but {asked} is asked for")
    return given if given in known else "attn_res"


def _layer_types(top: Section) -> None:
    kinds = top.values.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        top.complain("layer_types", f"= {shown(kinds)}; only full_attention is built")


def _same(top: Section, key: str, expected: int, why: str) -> None:
    value = top.values.get(key)
    if value is not None and value != expected:
        top.complain(key, f"= {shown(value)}; only {expected} is built: {why}")


def _agreed(top: Section, keys: tuple[str, ...], read: Any, default: Any = None) -> Any:
    """The one value under several spellings; ``default`` None means that one of them must be there."""
    found = {key: read(*_place(top, key)) for key in keys if _lookup(top, key) is not None}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{key} = {shown(value)}" for key, value in found.items())
        top.complain(keys[0], f"is contradicted: {told}")
    if not found and default is None:
        top.complain(keys[0], f"is missing; it may also be called {' or '.join(keys[1:])}")
    return next(iter(found.values()), default)


def _place(top: Section, key: str) -> tuple[Section, str]:
    *outer, last = key.split(".")
    inside = top.values.get(outer[0], {}) if outer else top.values
    return Section(inside if isinstance(inside, Mapping) else {}, f"{outer[0]}." if outer else "", top.problems), last


def _lookup(top: Section, key: str) -> Any:
    section, last = _place(top, key)
    return section.values.get(last)
