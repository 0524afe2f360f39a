import pytest

from kimi_jax.testing import configs, shipped
from kimi_jax.testing.shipped import cache_folder, shipped_model

SMALL = {**configs.TINY, "num_hidden_layers": 2, "full_attention": (2,), "hidden_size": 64, "num_experts": 4}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(configs.SIZES, "tiny", SMALL)


def test_other_names_are_no_shipped_models(tmp_path):
    assert shipped_model("k3", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_made_once_and_whole(tmp_path, monkeypatch):
    made = shipped_model("random-tiny", tmp_path / "a" / "b")
    assert {"config.json", "tiktoken.model", "model.safetensors"} <= {path.name for path in made.iterdir()}
    monkeypatch.delattr(shipped, "write_random_checkpoint")
    assert shipped_model("random-tiny", tmp_path / "a" / "b") == made
    assert list(made.parent.iterdir()) == [made]  # red when the folder it is made in stays


def test_another_process_may_be_faster(tmp_path, monkeypatch):
    def write(folder, config):
        (folder / "config.json").touch()
        other = tmp_path / f"random-tiny-{shipped.REVISION}"
        other.mkdir()
        (other / "theirs").touch()

    monkeypatch.setattr(shipped, "write_random_checkpoint", write)
    made = shipped_model("random-tiny", tmp_path)
    assert [path.name for path in made.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [made]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_nothing(tmp_path, monkeypatch, error):
    def write(folder, config):
        (folder / "half").touch()
        raise error

    monkeypatch.setattr(shipped, "write_random_checkpoint", write)
    with pytest.raises(type(error)):
        shipped_model("random-tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []  # red: the next run would take the half for the whole


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, expected in (
        (str(tmp_path / "x"), tmp_path / "x"),
        ("", tmp_path / ".cache"),
        ("here", tmp_path / ".cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == expected / "kimi_jax"  # the specification says to ignore relative paths
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "kimi_jax"
