"""``kimi-jax train lm``: what is refused before a model is made."""

from kimi_jax.cli.main import main


def test_everything_wrong_is_said_at_once(tmp_path, capsys):
    # red when a run begins in a folder that exists, or only the first problem is named
    asked = ["--config", str(tmp_path / "nothing"), "--out", str(tmp_path), "--steps", "0", "--seq-lens", "64,x"]
    assert main(["train", "lm", *asked, "--warmup", "0.9", "--decay", "0.2"]) == 2
    said = capsys.readouterr().err
    for part in ("--steps 0", "--seq-lens 64,x", "--warmup 0.9", "no folder with a config.json", "exists"):
        assert part in said
