"""Configurations: what is read, and that everything wrong with a file is named at once and never ignored."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_jax import config_keys as keys
from kimi_jax.config import ConfigError, KimiConfig, load_config, parse
from kimi_jax.testing.configs import SIZES, config_json
from tests.conftest import FIXTURES

K3 = json.loads((FIXTURES.parent.parent / "kimi_jax/configs/kimi-k3.json").read_text())
K31_TINY = json.loads((FIXTURES / "k31-tiny" / "config.json").read_text())


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with values at dotted paths replaced (``__`` for a dot), or removed where the new value is ``...``."""
    result = copy.deepcopy(values)
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = result
        for key in outer:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return result


def tiny(**changes: Any) -> dict[str, Any]:
    return changed(config_json("tiny"), **changes)


def problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    return list(caught.value.problems)


def only_problem(values: dict[str, Any]) -> str:
    (problem,) = problems(values)  # red when one mistake is reported as several
    return problem


class TestFiles:
    def test_released_k3(self):
        config = load_config("k3")
        mla = [i for i in range(93) if i % 4 == 3 or i == 92]
        assert list(config.layers_of("mla")) == mla  # red when the lists are read as 0-based
        assert (config.layers, len(config.layers_of("kda")), config.blocks) == (93, 69, 8)
        assert [i for i in range(93) if config.starts_block(i)] == [0, 12, 24, 36, 48, 60, 72, 84]  # PF-13
        assert [i for i in range(93) if config.is_dense(i)] == [0]
        assert (config.hidden, config.vocab, config.dense_width) == (7168, 163840, 33792)
        assert (config.kda.width, config.kda.gate_lower_bound, config.kda.conv_width) == (12288, -5.0, 4)
        assert (config.mla.query_dim, config.mla.row_dim, config.mla.q_rank) == (192, 576, 1536)
        moe = config.moe
        # PF-14: red when the shared experts are counted with the routed ones
        assert (moe.experts, moe.top_k, moe.width, moe.latent, moe.shared_width) == (896, 16, 3072, 3584, 6144)
        assert (moe.scale, moe.renormalize) == (1.0, True)
        assert (config.bos, config.eos, config.pad, config.media_placeholder) == (163584, (163586,), 163839, 163605)
        assert config.indexer is None and not config.tied_head
        assert config.vision is not None and config.vision.text_hidden == 7168

    def test_reconstructed_k31_pro(self):
        config, k3 = load_config("k3.1-pro"), load_config("k3")
        indexer = config.indexer
        assert indexer is not None and (indexer.heads, indexer.head_dim, indexer.top_k) == (32, 128, 2048)
        assert (config.attention, config.mla, config.kda, config.moe) == (k3.attention, k3.mla, k3.kda, k3.moe)

    def test_tiny_k3(self, k3_tiny):
        config = load_config(k3_tiny)
        assert config.layers_of("mla") == (3, 7, 11, 12)
        assert (config.blocks, config.eos, config.vision) == (3, (2,), None)
        assert config == load_config(k3_tiny / "config.json")

    def test_tiny_k31(self):
        config = load_config(FIXTURES / "k31-tiny" / "config.json")
        assert config.indexer is not None and config.indexer.top_k == 8
        assert config.layers_of("mla") == (3, 7, 8)

    @pytest.mark.parametrize("size", SIZES)
    def test_sizes_of_the_tests(self, size):
        assert parse(config_json(size)).layers == SIZES[size]["num_hidden_layers"]

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (None, "No such file"),
            (b"{", "not valid JSON"),
            (b'"\xff"', "not valid JSON"),
            (b"[1]", "not an object"),
            (b'{"a": NaN}', "NaN is not a JSON number"),
            (b'{"text_config": {"vocab_size": 1, "vocab_size": 2}}', "vocab_size.* is there twice"),  # red: last wins
            (b"[" * 100_000, "not valid JSON"),
            (b'{"model_type": "llama"}', '"llama" and has no text_config'),
            (b'{"text_config": [], "model_type": "kimi_k3"}', r"text_config = \[\]; it must be an object"),
        ],
    )
    def test_a_file_that_is_none(self, tmp_path, content, match):
        file = tmp_path / "config.json"
        if content is not None:
            file.write_bytes(content)
        for source in (tmp_path, str(file)) if content else (file,):
            with pytest.raises(ConfigError, match=match):
                load_config(source)

    def test_text_in_any_locale(self, tmp_path):
        (tmp_path / "config.json").write_bytes(json.dumps(tiny(_note="naïve 你好"), ensure_ascii=False).encode())
        assert load_config(tmp_path) == parse(config_json("tiny"))


class TestProblems:
    def test_all_at_once(self):
        found = problems(
            tiny(
                text_config__hidden_size="wide",
                text_config__vocab_size=...,
                text_config__hidden_act="silu",
                text_config__rms_norm_eps=0,
                text_config__num_experts_per_token=17,
                text_config__linear_attn_config__num_heads=0,
                text_config__quantization_config__format="fp8",
                text_config__new_gate=True,
                model_type="kimi_k4",
            )
        )
        wanted = [
            "text_config.new_gate is not a known key and could change the mathematics",
            'text_config.hidden_act = "silu"; only "situ" is built: the only gated unit of the family is situ',
            'text_config.hidden_size = "wide"; it must be an integer from 1 to 2147483648',
            "text_config.vocab_size is missing; it must be an integer from 1 to 2147483648",
            'model_type = "kimi_k4"; built are kimi_k3, kimi_k31',
            "text_config.linear_attn_config.num_heads = 0; it must be an integer from 1 to 2147483648",
            'text_config.quantization_config.format = "fp8"; only "mxfp4-pack-quantized" is built: '
            "routed experts are read in their released form",
            "text_config.rms_norm_eps = 0; it must be a number from 1e-12 to 0.1",
            "text_config.num_experts_per_token = 17 is more than num_experts = 16",
        ]
        assert (
            found == wanted
        )  # red when the first problem ends the reading, or a missing size makes follow-up problems

    @pytest.mark.parametrize("key", keys.TEXT_POSITIVE)
    @pytest.mark.parametrize("value", [..., None, 0, -1, 1.0, True, "8", [8], 1 << 40])
    def test_sizes(self, key, value):
        said = only_problem(tiny(**{f"text_config__{key}": value}))
        assert said.startswith(f"text_config.{key} is missing" if value is ... else f"text_config.{key} = ")

    @pytest.mark.parametrize("key", ["num_heads", "head_dim", "short_conv_kernel_size"])
    def test_sizes_of_linear_attention(self, key):
        assert f"linear_attn_config.{key} = -3" in only_problem(tiny(**{f"text_config__linear_attn_config__{key}": -3}))

    @pytest.mark.parametrize("key", keys.TEXT_FIXED)
    def test_values_that_are_not_built(self, key):
        said = only_problem(tiny(**{f"text_config__{key}": "something else"}))
        assert said.startswith(
            f'text_config.{key} = "something else"; only '
        )  # red when the key moves to the inert ones

    @pytest.mark.parametrize("key", keys.TEXT_PRESENT)
    def test_keys_whose_default_is_another_model(self, key):
        assert f"text_config.{key} is missing; only " in only_problem(tiny(**{f"text_config__{key}": ...}))

    def test_rotary_positions_are_refused(self):  # PF-17: not built, so never ignored
        assert "rotary positions" in only_problem(tiny(text_config__mla_use_nope=False))
        assert "rotary positions" in only_problem(tiny(text_config__rope_scaling={"type": "yarn"}))
        assert "low-rank output gate" in only_problem(tiny(text_config__linear_attn_config__use_full_rank_gate=False))

    def test_keys_that_some_config_classes_invent(self):
        assert parse(tiny(text_config__rope_theta=10000.0, text_config__head_dim=74)) == parse(config_json("tiny"))

    @pytest.mark.parametrize("key", keys.TEXT_INERT)
    def test_inert_keys_change_nothing(self, key):
        assert parse(tiny(**{f"text_config__{key}": ["any", {"thing": 1}]})) == parse(config_json("tiny"))

    @pytest.mark.parametrize("key", keys.TOP_INERT)
    def test_inert_keys_of_the_top_change_nothing(self, key):
        assert parse(tiny(**{key: 7})) == parse(config_json("tiny"))

    @pytest.mark.parametrize(
        ("path", "near"),
        [
            ("activation_situ_beta", None),
            ("text_config__actvation_situ_beta", "activation_situ_beta"),
            ("text_config__routed_scaling_factors", "routed_scaling_factor"),
            ("text_config__vision_config", None),
            ("text_config__linear_attn_config__gate_upper_bound", "gate_lower_bound"),
            ("text_config__quantization_config__config_groups__group_0__weights__global_scale", None),
        ],
    )
    def test_unknown_keys(self, path, near):
        said = only_problem(tiny(**{path: 1.5}))
        assert said.startswith(path.replace("__", ".") + " is not a known key")
        assert near is None or said.endswith(f"did you mean {near}?")

    def test_a_key_is_quoted_without_harm(self):
        said = only_problem(tiny(**{"\x1b[2J" + "x" * 5000: 1}))
        assert "\x1b" not in said and len(said) < 200  # red when the key is printed as it is

    @pytest.mark.parametrize(
        ("full", "kda", "said"),
        [  # PF-14; nine layers
            ([4, 8, 9], [1, 2, 3, 5, 6, 7, 8], "both name layers [8]"),
            ([4, 8], [1, 2, 3, 5, 6, 7], "leave out layers [9]"),
            ([3, 7, 8, 0], [1, 2, 4, 5, 6, 9], "names [0]; layers are counted from 1 to 9"),
            ([4, 8, 9, 10], [1, 2, 3, 5, 6, 7], "names [10]; layers are counted from 1 to 9"),
            ([4, 4, 8, 9], [1, 2, 3, 5, 6, 7], "names [4] more than once"),
            ([4, 8, 9] * 1000, [1, 2, 3, 5, 6, 7], "names [4, 8, 9] more than once"),
            ([4, 8, 9.0], [1, 2, 3, 5, 6, 7], "must be a list of layer numbers"),
            ([4, 8, True], [1, 2, 3, 5, 6, 7], "must be a list of layer numbers"),
            ("4, 8", [1, 2, 3, 5, 6, 7], "must be a list of layer numbers"),
            (..., [1, 2, 3, 5, 6, 7], "full_attn_layers is missing"),
        ],
    )
    def test_layer_lists(self, full, kda, said):
        prefix = "text_config__linear_attn_config__"
        assert said in only_problem(tiny(**{f"{prefix}full_attn_layers": full, f"{prefix}kda_layers": kda}))

    def test_too_many_layers(self):
        assert only_problem(tiny(text_config__num_hidden_layers=513)).endswith("at most 512 are accepted")

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"text_config__moe_intermediate_size": 80}, "moe_intermediate_size = 80 is not a multiple of 32"),
            ({"text_config__routed_expert_hidden_size": 72}, "routed_expert_hidden_size = 72 is not a multiple of 32"),
            ({"text_config__num_experts_per_token": 17}, "= 17 is more than num_experts = 16"),
            ({"text_config__first_k_dense_replace": 10}, "= 10 is more than num_hidden_layers = 9"),
            ({"text_config__num_key_value_heads": 4}, "= 4; latent attention needs num_attention_heads = 8"),
            ({"text_config__eos_token_id": [5, 1024], "eos_token_id": ...}, "token ids must lie in 0..1023"),
            ({"text_config__eos_token_id": list(range(9)), "eos_token_id": ...}, "at most 8 can be used"),
            ({"text_config__bos_token_id": [1, 2], "bos_token_id": ...}, "bos_token_id = [1, 2]; at most 1"),
            ({"eos_token_id": 7}, "eos_token_id = 7, but text_config says 770"),
            ({"media_placeholder_token_id": -1}, "media_placeholder_token_id = -1"),
            ({"text_config__routed_scaling_factor": 0}, "routed_scaling_factor = 0; it must be a number"),
            ({"text_config__routed_scaling_factor": True}, "routed_scaling_factor = true; it must be a number"),
            ({"text_config__moe_layer_freq": True}, "moe_layer_freq = true; only 1 is built"),
            ({"text_config__activation_situ_beta": float("nan")}, "activation_situ_beta = NaN"),
            ({"text_config__activation_situ_linear_beta": "25"}, "activation_situ_linear_beta = "),
            ({"text_config__activation_situ_linear_beta": ...}, "activation_situ_linear_beta is missing; give null"),
            ({"text_config__linear_attn_config__gate_lower_bound": -6}, "gate_lower_bound = -6; it must be a number"),
            ({"text_config__tie_word_embeddings": 1}, "tie_word_embeddings = 1; it must be true or false"),
            ({"text_config__quantization_config": ...}, "quantization_config is missing"),
            ({"text_config__quantization_config": 4}, "quantization_config = 4; it must be an object"),
            ({"text_config__quantization_config__config_groups": {}}, "config_groups is missing"),
            ({"text_config__quantization_config__config_groups__group_0": {}}, "group_0.weights is missing"),
            ({"text_config__quantization_config__transform_config": {"R1": 1}}, "transformed weights are not built"),
            ({"architectures": ["KimiK31ForConditionalGeneration"]}, "needs a dsa_config"),
            ({"architectures": ["LlamaForCausalLM"]}, "built are KimiK3ForConditionalGeneration"),
            ({"architectures": None}, "architectures = null"),
        ],
    )
    def test_single_mistakes(self, changes, said):
        assert said in only_problem(tiny(**changes))

    @pytest.mark.parametrize("key", keys.EXPERT_FORMAT)
    def test_other_expert_formats(self, key):
        path = f"text_config__quantization_config__config_groups__group_0__weights__{key}"
        assert f"weights.{key} = 8; only " in only_problem(tiny(**{path: 8}))
        assert f"weights.{key} is missing" in only_problem(tiny(**{path: ...}))

    @pytest.mark.parametrize("key", keys.VISION_POSITIVE)
    def test_a_missing_size_of_the_tower_is_one_problem(self, key):
        assert only_problem(changed(K3, **{f"vision_config__{key}": ...})).startswith(f"vision_config.{key} is missing")

    def test_integers_of_thousands_of_digits(self):
        huge = (
            10**5000
        )  # json.loads refuses it, but parse also takes values made otherwise; red when the error quotes it
        assert len(problems(tiny(text_config__hidden_size=huge, text_config__new=huge, text_config__top_k=huge))) == 2

    def test_nesting_as_deep_as_the_parser_lets_through(self, tmp_path):
        for depth in range(900, 1000):
            file = tmp_path / f"{depth}.json"
            file.write_text(
                json.dumps(tiny(text_config__hidden_act="DEEP")).replace('"DEEP"', "[" * depth + "]" * depth)
            )
            with pytest.raises(ConfigError):
                load_config(file)  # red (RecursionError) when the error quotes the value without care


class TestReading:
    def test_what_may_be_left_out(self):
        config = parse(
            tiny(text_config__eos_token_id=..., eos_token_id=..., text_config__linear_attn_config__gate_lower_bound=...)
        )
        assert config.eos == ()
        assert config.kda.gate_lower_bound is None  # PF-09: the softplus form
        assert parse(tiny(text_config__activation_situ_linear_beta=None)).situ_linear_beta is None
        assert parse(tiny(text_config__num_key_value_heads=..., text_config__topk_method=...)) == parse(
            config_json("tiny")
        )

    def test_a_list_of_ends(self):  # PF-52
        assert parse(tiny(text_config__eos_token_id=[770, 769], eos_token_id=[770, 769])).eos == (770, 769)

    @pytest.mark.parametrize("path", ["tie_word_embeddings", "text_config__tie_word_embeddings"])
    def test_a_tied_head_in_either_place(self, path):
        assert parse(tiny(**{path: True})).tied_head

    def test_the_expert_format_may_stand_at_the_top(self):
        values = config_json("tiny")
        values["quantization_config"] = values["text_config"].pop("quantization_config")
        assert parse(values) == parse(config_json("tiny"))
        values["text_config"]["quantization_config"] = {**values["quantization_config"], "version": "2"}
        assert "but text_config says" in only_problem(values)  # red when one of the two is taken in silence

    def test_private_keys_are_notes(self):
        assert parse(tiny(_provenance={"a": 1}, text_config___name_or_path="")) == parse(config_json("tiny"))

    def test_vision(self):
        vision = K3["vision_config"]
        values = tiny(vision_config=changed(vision, text_hidden_size=128))
        config = parse(values)
        assert config.vision is not None and (config.vision.patch, config.vision.heads) == (14, 12)
        values["vision_config"] = vision | {"merge_type": "mean", "qkv_hidden_size": 1537, "new": 1, "patch_size": None}
        assert problems(values) == [
            "vision_config.new is not a known key and could change the mathematics",
            'vision_config.merge_type = "mean"; only "sd2_tpool" is built',
            "vision_config.patch_size = null; it must be an integer from 1 to 2147483648",
            "vision_config.text_hidden_size = 7168, but text_config.hidden_size = 128",
            "vision_config.qkv_hidden_size is not a multiple of vt_num_attention_heads = 12",
        ]


class TestIndexer:
    @pytest.mark.parametrize("pick", range(4))
    @pytest.mark.parametrize("at_top", [False, True])
    def test_aliases(self, pick, at_top):
        names = {field: spellings[min(pick, len(spellings) - 1)] for field, spellings in keys.INDEXER_ALIASES.items()}
        values = copy.deepcopy(K31_TINY)
        section = {names["heads"]: 4, names["head_dim"]: 16, names["top_k"]: 8, names["layers"]: [4, 8, 9]}
        del values["text_config"]["dsa_config"]
        (values if at_top else values["text_config"])["dsa_config"] = section
        assert parse(values) == parse(K31_TINY)  # red when only the first spelling, or one place, is known

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"text_config__dsa_config__dsa_layers": [4, 8]}, "disagree on layers [9]"),
            ({"text_config__dsa_config__dsa_layers": [3, 7, 8]}, "disagree on layers [3, 4, 7, 9]"),  # 0-based
            ({"text_config__dsa_config__dsa_layers": ...}, "dsa_layers is missing"),
            ({"text_config__dsa_config__index_topk": 0}, "index_topk = 0"),
            ({"text_config__dsa_config__topk": 8}, "topk says the same as index_topk"),
            ({"text_config__dsa_config__norm_eps": 1e-6}, "norm_eps is not a known key"),
            ({"architectures": ["KimiK3ForConditionalGeneration"]}, "has no indexer, but a dsa_config is given"),
        ],
    )
    def test_mistakes(self, changes, said):
        assert said in only_problem(changed(K31_TINY, **changes))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 20) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def paths(values: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [at, *(path for key, value in inner for path in paths(value, (*at, key)))]


BASES = [config_json("tiny"), K31_TINY]


class TestFuzz:
    """Any JSON is a configuration or a ConfigError."""

    @staticmethod
    def read(values: Any) -> None:
        try:
            config = parse(values)
        except ConfigError as error:
            assert error.problems and all(len(problem) < 400 for problem in error.problems)
        else:
            assert isinstance(config, KimiConfig) and config.layers == values["text_config"]["num_hidden_layers"]

    @given(st.dictionaries(st.sampled_from([*keys.TOP_READ, *keys.TOP_INERT, "x"]), json_values, max_size=8))
    def test_any_object(self, values):
        self.read(values)

    @settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def test_any_value_in_any_place(self, data):
        values = copy.deepcopy(data.draw(st.sampled_from(BASES)))
        for _ in range(data.draw(st.integers(1, 3))):
            *outer, last = data.draw(st.sampled_from([path for path in paths(values) if path]))
            place = values
            for key in outer:
                place = place[key]
            if isinstance(place, dict) and data.draw(st.booleans()):
                del place[last]
            else:
                place[last] = data.draw(json_values)
        self.read(values)

    @given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
    def test_any_file(self, tmp_path_factory, content):
        file = tmp_path_factory.getbasetemp() / "any.json"
        file.write_bytes(content)
        with pytest.raises(ConfigError):
            load_config(file)
