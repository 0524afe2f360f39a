"""The two published tables of Kimi-K3 under TP8, every printed digit, and what the digits leave open."""

import json
import subprocess
import sys

import pytest

import kimi_jax
from kimi_jax.cli.main import main
from kimi_jax.planning.sizes import RELEASED_A_LOG

GIB = 2**30
WEIGHTS = {
    "dense_mlp": "1.453 0.182",
    "routed": "1446.456 180.807",
    "shared": "24.310 3.039",
    "kda_gemm": "61.214 7.763",
    "mla_gemm": "11.145 2.029",
    "norm": "0.006 0.006",
    "other": "16.275 11.231",
}
STATE = {"latent": "14.496", "kda_state": "0.054", "kda_conv": "0.002", "attn_res": "0.940"}
FILE_BYTES = 1_560_860_324_864
FILE_PARAMETERS = 2_779_931_837_184


def printed(row) -> str:
    return f"{row['whole_bytes'] / 1e9:.3f} {row['device_bytes'] / 1e9:.3f}"


@pytest.fixture(scope="module")
def shown(published):
    return published.to_json()


def test_weights(shown):
    # Red when a category rule moves a tensor, a latent projection is cut, or unloaded vision leaves the whole column.
    assert {name: printed(row) for name, row in shown["weights"]["rows"].items()} == WEIGHTS
    total = shown["weights"]["total"]
    assert printed(total) == "1560.860 205.057"
    assert f"{total['device_gib']:.3f} {total['padding_bytes']}" == "190.974 0"


def test_running_state(shown):
    # Red when rows are stored in two bytes, heads of the state stay whole, or the chunk holds its running sum too.
    assert {name: printed(row).split()[1] for name, row in shown["state"]["rows"].items()} == STATE
    assert printed(shown["state"]["total"]).split()[1] == "15.491"


def test_memory_line(shown):
    # Red when capacity is read as 288e9 bytes, or scratch is left out of what is needed.
    memory = shown["memory"]
    assert f"{memory['need_gib']:.3f} of {memory['capacity_gib']:.0f}" == "205.401 of 288"
    assert f"{memory['percent']:.1f} {memory['left_gib']:.3f}" == "71.3 82.599"
    assert memory["need_bytes"] == shown["weights"]["total"]["device_bytes"] + shown["state"]["total"]["device_bytes"]


def test_two_byte_rows_are_the_other_number():
    # Red when the dtype of the rows is ignored.
    wide = kimi_jax.plan("k3", "tp8", kv_dtype="bfloat16").to_json()
    assert printed(wide["state"]["rows"]["latent"]) == "28.991 28.991"
    assert wide["state"]["device_bytes_per_token"] == 24 * 576 * 2


def test_the_command_prints_the_same(shown, capsys):
    # Red when the command has defaults of its own.
    words = ["--layout", "tp8", "--device", "mi355x", "--context", "1048576", "--json"]
    assert main(["plan", "k3", *words]) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == shown


def test_parameters(published, pro):
    # Red when scales are counted, codes are not unpacked, all experts are active, or the file's padding is dropped.
    assert published.parameters.total == FILE_PARAMETERS
    assert 103.0e9 < published.parameters.active_without_head < published.parameters.active < 104.2e9
    assert pro.parameters.total - FILE_PARAMETERS == 24 * 7_438_592


def test_the_digits_do_not_say_how_wide_a_log_is_but_the_byte_count_does(published):
    # Red when A_log is placed as wide as the file stores it: 128 entries, 96 of them values.
    config = published.ask.config
    unused = len(config.layers_of("kda")) * (RELEASED_A_LOG[config.kda.heads] - config.kda.heads) * 4
    whole = published.to_json()["weights"]["total"]["whole_bytes"]
    assert whole + unused == FILE_BYTES
    wide = published.weight_bytes + len(config.layers_of("kda")) * (128 - 96 // 8) * 4  # stored form, on every device
    assert f"{wide / 1e9:.3f}" == f"{published.weight_bytes / 1e9:.3f}" == "205.057"
    specs = published.ask.weights
    assert {specs[name].shape for name in specs if name.endswith("A_log")} == {(96,)}


def test_the_text_shows_the_tables(published):
    # Red when a number is missing from the readable form.
    text = str(published)
    for piece in [*" ".join(WEIGHTS.values()).split(), *STATE.values(), "190.974", "205.401", "71.3 %", "82.599"]:
        assert piece in text
    assert max(map(len, text.splitlines())) < 180


def test_no_device_is_touched():
    # Red when planning makes an array.
    probe = (
        "import kimi_jax; from kimi_jax.config import parse; from kimi_jax.testing.configs import config_json;"
        "kimi_jax.plan(parse(config_json()), 'tp8');"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_active_experts_are_the_chosen_ones(published):
    # Red when the active count takes another share of the experts.
    config, moe = published.ask.config, published.ask.config.moe
    routed = (config.layers - 1) * moe.experts * 3 * moe.width * moe.latent
    vision, unused = 401_214_464 + 46_144_512, 69 * 32
    rest = FILE_PARAMETERS - routed - vision - unused - (config.vocab - 1) * config.hidden
    assert published.parameters.active == rest + routed // moe.experts * moe.top_k
