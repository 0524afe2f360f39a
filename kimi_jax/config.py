"""Kimi configurations: frozen records made from a released config.json, fully checked before anything is built.

Layers are counted from 0 here; the two lists in the file count from 1. Sources: text-model and K3.1 Pro notes in
docs/model.md.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from kimi_jax import config_keys as keys
from kimi_jax.config_section import LARGEST, LIST_LIMIT, Section, one_of, shown
from kimi_jax.problems import ProblemsError

AttentionKind = Literal["kda", "mla"]

SHIPPED = {"k3": "kimi-k3.json", "k3.1-pro": "kimi-k3.1-pro.json"}
"""Configurations known by name, without any checkpoint."""

LATENT_EPS = 1e-6
"""Epsilon of the two latent norms (q_a, kv_a): the official code builds them with its class default."""

MAX_ENDS = 8
"""Ids that may end a generation; the tokenizer adds its own, and the device keeps a fixed number."""


class ConfigError(ProblemsError):
    """A config.json that cannot be run as asked; lists every reason."""


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention: a linear attention layer with a per-channel decay gate."""

    heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None

    @property
    def width(self) -> int:
        """Channels of q, k and v together over the heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Gated multi-head latent attention without positions."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    shared_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Channels of one query head: its own part and the part matched with the shared key."""
        return self.nope_dim + self.shared_dim

    @property
    def row_dim(self) -> int:
        """Channels of one cached token: normalised latent, then shared key."""
        return self.kv_rank + self.shared_dim


@dataclass(frozen=True)
class MoeConfig:
    """Stable LatentMoE: routed experts work in a latent space, shared experts on the hidden vector."""

    experts: int
    top_k: int
    width: int
    latent: int
    shared_width: int
    renormalize: bool
    scale: float


@dataclass(frozen=True)
class IndexerConfig:
    """Learned selection of keys for sparse latent attention (K3.1 Pro)."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT tower and projector."""

    patch: int
    hidden: int
    layers: int
    heads: int
    qkv_width: int
    mlp_width: int
    position_rows: int
    position_columns: int
    position_frames: int
    projector_width: int
    text_hidden: int
    projector_eps: float


@dataclass(frozen=True)
class KimiConfig:
    """Everything the text model, its caches and its loader need to know.

    Attributes:
      attention: kind of every layer, 0-based.
      dense_layers: how many leading layers have a dense MLP instead of experts.
      block_size: layers between two Attention Residuals sources.
      eos: ids that end a generation.
      tied_head: the file claims that the output head is the embedding.
    """

    architecture: str
    vocab: int
    hidden: int
    attention: tuple[AttentionKind, ...]
    dense_layers: int
    dense_width: int
    block_size: int
    rms_eps: float
    situ_beta: float
    situ_linear_beta: float | None
    max_positions: int
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    indexer: IndexerConfig | None
    vision: VisionConfig | None
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    media_placeholder: int | None
    tied_head: bool = False
    name: str = field(default="", compare=False)

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def blocks(self) -> int:
        """Finished block sources that the last layer sees (Attention Residuals)."""
        return -(-self.layers // self.block_size)

    def starts_block(self, layer: int) -> bool:
        return layer % self.block_size == 0

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    def layers_of(self, kind: AttentionKind) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.attention) if k == kind)


def _token_ids(top: Section, text: Section, key: str, vocab: int, most: int = 1) -> tuple[int, ...]:
    section = one_of(top, text, key)
    value = section.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        section.complain(key, f"= {shown(value)}; token ids must lie in 0..{vocab - 1}")
        return ()
    if len(ids) > most:
        section.complain(key, f"= {shown(value)}; at most {most} can be used")
    return tuple(ids)


def _read_kda(text: Section, layers: int | None) -> tuple[KdaConfig, tuple[AttentionKind, ...] | None]:
    """The linear attention's sizes and the kind of every layer; None where the lists cannot be used."""
    linear = text.section("linear_attn_config")
    if linear is None:
        if text.sound("linear_attn_config"):
            text.complain("linear_attn_config", "is missing")
        return KdaConfig(1, 1, 1, -5.0), None
    linear.refuse_unknown(keys.LINEAR_ATTENTION)
    linear.require(keys.LINEAR_FIXED, present=tuple(keys.LINEAR_FIXED))
    bound: float | None = None
    if linear.values.get("gate_lower_bound") is not None:
        bound = linear.number("gate_lower_bound", -5.0, -1e-3)
    kda = KdaConfig(
        heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_width=linear.integer("short_conv_kernel_size", 2, 64),
        gate_lower_bound=bound,
    )
    full = linear.layer_list("full_attn_layers", layers or LIST_LIMIT)
    delta = linear.layer_list("kda_layers", layers or LIST_LIMIT)
    if layers is None or not linear.sound("full_attn_layers", "kda_layers"):
        return kda, None
    both = sorted(set(full) & set(delta))
    neither = sorted(set(range(layers)) - set(full) - set(delta))
    if both:
        linear.complain("kda_layers", f"and full_attn_layers both name layers {shown([i + 1 for i in both])}")
    if neither:
        linear.complain("kda_layers", f"and full_attn_layers leave out layers {shown([i + 1 for i in neither])}")
    return kda, tuple("mla" if i in set(full) else "kda" for i in range(layers))


def _read_indexer(top: Section, text: Section, attention: tuple[AttentionKind, ...] | None) -> IndexerConfig | None:
    section = one_of(top, text, "dsa_config").section("dsa_config")
    if section is None:
        return None
    aliases = keys.INDEXER_ALIASES
    section.refuse_unknown(tuple(alias for names in aliases.values() for alias in names))
    chosen = {}
    for name, spellings in aliases.items():
        present = [s for s in spellings if s in section.values]
        if len(present) > 1:
            section.complain(present[1], f"says the same as {present[0]}; give one of them")
        chosen[name] = present[0] if present else spellings[0]
    layers = section.layer_list(chosen["layers"], len(attention) if attention else LIST_LIMIT)
    if attention and section.sound(chosen["layers"]):
        latent = tuple(i for i, kind in enumerate(attention) if kind == "mla")
        odd = sorted(set(layers) ^ set(latent))
        if odd:
            section.complain(chosen["layers"], f"and full_attn_layers disagree on layers {shown([i + 1 for i in odd])}")
    return IndexerConfig(
        heads=section.integer(chosen["heads"]),
        head_dim=section.integer(chosen["head_dim"]),
        top_k=section.integer(chosen["top_k"]),
    )


def _check_expert_format(top: Section, text: Section) -> None:
    quant = one_of(top, text, "quantization_config").section("quantization_config")
    if quant is None:
        if text.sound("quantization_config") and top.sound("quantization_config"):
            text.complain("quantization_config", "is missing; the routed experts must be mxfp4-pack-quantized")
        return
    quant.refuse_unknown((*keys.QUANTIZATION_FIXED, *keys.QUANTIZATION_INERT, "config_groups"))
    quant.require(keys.QUANTIZATION_FIXED, present=("format",))
    groups = quant.section("config_groups")
    if quant.sound("config_groups") and not (groups and groups.values):
        quant.complain("config_groups", "is missing; it must hold one group of mxfp4-pack-quantized weights")
    for name in groups.values if groups else ():
        group = groups.section(name) if groups else None
        if group is None:
            continue
        group.refuse_unknown((*keys.GROUP_FIXED, *keys.GROUP_INERT, "weights"))
        group.require(keys.GROUP_FIXED)
        weights = group.section("weights")
        if weights is None:
            if group.sound("weights"):
                group.complain("weights", "is missing")
            continue
        weights.refuse_unknown((*keys.EXPERT_FORMAT, *keys.EXPERT_FIXED, *keys.EXPERT_INERT))
        weights.require(keys.EXPERT_FORMAT, present=tuple(keys.EXPERT_FORMAT))
        weights.require(keys.EXPERT_FIXED)


def _read_vision(top: Section, hidden: int | None) -> VisionConfig | None:
    vision = top.section("vision_config")
    if vision is None:
        return None
    vision.refuse_unknown((*keys.VISION_POSITIVE, *keys.VISION_FIXED, *keys.VISION_INERT, "projector_ln_eps"))
    vision.require({key: (values, "") for key, values in keys.VISION_FIXED.items()})
    sizes = {key: vision.integer(key) for key in keys.VISION_POSITIVE}
    if hidden and vision.sound("text_hidden_size") and sizes["text_hidden_size"] != hidden:
        vision.complain("text_hidden_size", f"= {sizes['text_hidden_size']}, but text_config.hidden_size = {hidden}")
    whole = sizes["qkv_hidden_size"] % sizes["vt_num_attention_heads"] == 0
    if vision.sound("qkv_hidden_size", "vt_num_attention_heads") and not whole:
        vision.complain(
            "qkv_hidden_size", f"is not a multiple of vt_num_attention_heads = {sizes['vt_num_attention_heads']}"
        )
    return VisionConfig(
        patch=sizes["patch_size"],
        hidden=sizes["vt_hidden_size"],
        layers=sizes["vt_num_hidden_layers"],
        heads=sizes["vt_num_attention_heads"],
        qkv_width=sizes["qkv_hidden_size"],
        mlp_width=sizes["vt_intermediate_size"],
        position_rows=sizes["init_pos_emb_height"],
        position_columns=sizes["init_pos_emb_width"],
        position_frames=sizes["init_pos_emb_time"],
        projector_width=sizes["mm_hidden_size"],
        text_hidden=sizes["text_hidden_size"],
        projector_eps=vision.number("projector_ln_eps", 1e-12, 1e-1, 1e-5),
    )


def _check_together(text: Section, config: KimiConfig) -> None:
    moe = config.moe
    for key, size in (("moe_intermediate_size", moe.width), ("routed_expert_hidden_size", moe.latent)):
        if text.sound(key) and size % 32:
            text.complain(key, f"= {size} is not a multiple of 32, the group of one MXFP4 scale")
    if text.sound("num_experts_per_token", "num_experts") and moe.top_k > moe.experts:
        text.complain("num_experts_per_token", f"= {moe.top_k} is more than num_experts = {moe.experts}")
    # not config.layers: the lists that it comes from may be what is wrong
    layers = text.values.get("num_hidden_layers", 0)
    if text.sound("first_k_dense_replace", "num_hidden_layers") and config.dense_layers > layers:
        text.complain("first_k_dense_replace", f"= {config.dense_layers} is more than num_hidden_layers = {layers}")
    heads = config.mla.heads
    groups = text.integer("num_key_value_heads") if "num_key_value_heads" in text.values else heads
    if text.sound("num_key_value_heads", "num_attention_heads") and groups != heads:
        text.complain("num_key_value_heads", f"= {groups}; latent attention needs num_attention_heads = {heads}")


def parse(values: Mapping[str, Any], name: str = "config.json") -> KimiConfig:
    """Checks a whole config.json and makes the frozen record.

    Args:
      values: the parsed JSON object, in the released nesting (``text_config``, ``vision_config``).
      name: what errors call it.

    Raises:
      ConfigError: lists every problem: missing or ill-typed keys, unknown keys, layer lists that do not fit, parts that
        are not built.
    """
    problems: list[str] = []
    top = Section(values, "", problems)
    top.refuse_unknown((*keys.TOP_READ, *keys.TOP_INERT))
    text = top.section("text_config")
    if text is None:
        found = shown(values.get("architectures") or values.get("model_type") or "an unknown model")
        raise ConfigError(
            f"{name} is not a Kimi-K3 configuration",
            [f"it describes {found} and has no text_config"] if top.sound("text_config") else problems[-1:],
            f"Architectures that are built: {', '.join(keys.ARCHITECTURES)}.",
        )
    text.refuse_unknown((*keys.TEXT_READ, *keys.TEXT_FIXED, *keys.TEXT_INERT))
    text.require(keys.TEXT_FIXED, present=keys.TEXT_PRESENT)
    sizes = {key: text.integer(key) for key in keys.TEXT_POSITIVE}
    if sizes["num_hidden_layers"] > LIST_LIMIT:
        text.complain("num_hidden_layers", f"= {sizes['num_hidden_layers']}; at most {LIST_LIMIT} are accepted")
    layers = sizes["num_hidden_layers"] if text.sound("num_hidden_layers") else None
    architecture = _architecture(top)
    kda, attention = _read_kda(text, layers)
    indexer = _read_indexer(top, text, attention)
    if architecture in keys.ARCHITECTURES and keys.ARCHITECTURES[architecture] != (indexer is not None):
        says = "needs a dsa_config" if indexer is None else "has no indexer, but a dsa_config is given"
        problems.append(f"architectures = {architecture} {says}")
    _check_expert_format(top, text)
    linear_beta = None
    if "activation_situ_linear_beta" not in text.values:
        text.complain("activation_situ_linear_beta", "is missing; give null for an unbounded linear half")
    if text.values.get("activation_situ_linear_beta") is not None:
        linear_beta = text.number("activation_situ_linear_beta", 1e-3, 1e4)
    vocab = sizes["vocab_size"] if text.sound("vocab_size") else LARGEST
    bos, pad, media = (
        _token_ids(top, text, key, vocab) for key in ("bos_token_id", "pad_token_id", "media_placeholder_token_id")
    )
    eos = _token_ids(top, text, "eos_token_id", vocab, most=MAX_ENDS)
    tied = [section.boolean("tie_word_embeddings", False) for section in (top, text)]
    config = KimiConfig(
        architecture=architecture,
        vocab=vocab,
        hidden=sizes["hidden_size"],
        attention=attention or (),
        dense_layers=text.integer("first_k_dense_replace", 0),
        dense_width=sizes["intermediate_size"],
        block_size=sizes["attn_res_block_size"],
        rms_eps=text.number("rms_norm_eps", 1e-12, 1e-1),
        situ_beta=text.number("activation_situ_beta", 1e-3, 1e4),
        situ_linear_beta=linear_beta,
        max_positions=sizes["max_position_embeddings"],
        kda=kda,
        mla=MlaConfig(
            heads=sizes["num_attention_heads"],
            q_rank=sizes["q_lora_rank"],
            kv_rank=sizes["kv_lora_rank"],
            nope_dim=sizes["qk_nope_head_dim"],
            shared_dim=sizes["qk_rope_head_dim"],
            value_dim=sizes["v_head_dim"],
        ),
        moe=MoeConfig(
            experts=sizes["num_experts"],
            top_k=sizes["num_experts_per_token"],
            width=sizes["moe_intermediate_size"],
            latent=sizes["routed_expert_hidden_size"],
            shared_width=sizes["num_shared_experts"] * sizes["moe_intermediate_size"],
            renormalize=text.boolean("moe_renormalize", True),
            scale=text.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        ),
        indexer=indexer,
        vision=_read_vision(top, sizes["hidden_size"] if text.sound("hidden_size") else None),
        bos=bos[0] if bos else None,
        eos=eos,
        pad=pad[0] if pad else None,
        media_placeholder=media[0] if media else None,
        tied_head=any(tied),
        name=name,
    )
    _check_together(text, config)
    if problems:
        hint = f"Architectures that are built: {', '.join(keys.ARCHITECTURES)}."
        raise ConfigError(f"{name} cannot be run", problems, hint)
    return config


def _architecture(top: Section) -> str:
    listed = top.values.get("architectures")
    found = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""
    if found not in keys.ARCHITECTURES:
        top.complain("architectures", f"= {shown(listed)}; built are {', '.join(keys.ARCHITECTURES)}")
    kind = top.values.get("model_type", keys.MODEL_TYPES[0])
    if kind not in keys.MODEL_TYPES:
        top.complain("model_type", f"= {shown(kind)}; built are {', '.join(keys.MODEL_TYPES)}")
    return found


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _reject_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"the key {shown(repeated[0])} is there twice")
    return dict(pairs)


def load_config(source: str | Path) -> KimiConfig:
    """Reads a configuration by shipped name (``k3``, ``k3.1-pro``), file, or model folder.

    Raises:
      ConfigError: the file is missing, is not JSON, or does not pass :func:`parse`.
    """
    if str(source) in SHIPPED:
        text = resources.files("kimi_jax").joinpath("configs", SHIPPED[str(source)]).read_text()
        return parse(json.loads(text), str(source))
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    hint = f"Give a model folder, a config.json, or one of: {', '.join(SHIPPED)}."
    if file.exists() and not file.is_file():
        raise ConfigError(f"No configuration at {source}", [f"{file} is no regular file"], hint)  # a pipe would block
    try:
        content = file.read_text(encoding="utf-8")
        values = json.loads(content, parse_constant=_reject_constant, object_pairs_hook=_reject_repeats)
    except OSError as error:
        raise ConfigError(f"No configuration at {source}", [error.strerror or str(error)], hint) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON", [str(error)[:200]], hint) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a configuration", [f"it holds {shown(values)}, not an object"], hint)
    return parse(values, str(file))
