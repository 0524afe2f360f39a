"""What a trained draft gains over bigram counts: a small target learns a made-up language, then a draft learns the target.

``python -m kimi_jax.evals.draft_gain --out FOLDER`` makes everything from seeds, in minutes on a CPU: the target (KDA and latent
attention, dense MLPs), answers sampled from it, a draft trained on them, and a draft that holds the bigram counts of the same
answers. Both then draft in the engine for prompts that nobody saw, greedily and at temperature 1; ``length`` is tokens per step.

In the language, words are fixed runs of letters, and each word has two successors, one of which is likelier. A letter alone says
little about the next one; who knows the word knows the rest of it.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.checkpoint.names import sources
from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint
from kimi_jax.config import load_config
from kimi_jax.model import Params, abstract, bind
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import BFLOAT16, Precision
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json
from kimi_jax.train.bigram import bigram_draft
from kimi_jax.train.draft_data import Sample
from kimi_jax.train.draft_export import export_draft
from kimi_jax.train.forward import forward
from kimi_jax.train.loop import Watch, run, unseen
from kimi_jax.train.metrics import Metrics
from kimi_jax.train.schedule import warmup_cosine
from kimi_jax.train.state import TrainState, begin

FIRST_LETTER, LETTERS = 8, 28
"""Ids of the letters; those below are special in every model."""

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "full_attention": (2,),
    "attn_res_block_size": 1,
    "intermediate_size": 192,
    "kda_heads": 4,
    "kda_head_dim": 24,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "routed_expert_hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Language:
    """Words and who follows whom.

    Attributes:
      words: letters of each word, as ids.
      after: the likelier and the other successor of each word, [words, 2].
      likelier: probability of the first.
    """

    words: tuple[tuple[int, ...], ...]
    after: Int[np.ndarray, "words two"]
    likelier: float = 0.8

    @classmethod
    def made(cls, seed: int = 0, words: int = 48) -> "Language":
        """Words of 4 to 8 random letters."""
        random = np.random.default_rng([seed, 10])
        made = [
            tuple(random.integers(FIRST_LETTER, FIRST_LETTER + LETTERS, random.integers(4, 9)).tolist())
            for _ in range(words)
        ]
        return cls(tuple(made), np.stack([random.permutation(words), random.permutation(words)], axis=1))

    def text(self, length: int, random: np.random.Generator) -> list[int]:
        """Letters from the start of a random word on."""
        word, letters = int(random.integers(len(self.words))), []
        while len(letters) < length:
            letters += self.words[word]
            word = int(self.after[word, int(random.random() >= self.likelier)])
        return letters[:length]

    def batch(self, rows: int, length: int, seed: int, step: int) -> Int[np.ndarray, "rows tokens"]:
        """Texts of one update, a function of seed and step."""
        random = np.random.default_rng([seed, 11, step])
        return np.array([self.text(length, random) for _ in range(rows)], np.int32)


def make_target(
    folder: Path,
    language: Language,
    *,
    steps: int,
    rows: int = 16,
    length: int = 64,
    seed: int = 0,
    watch: Watch = unseen,
) -> Path:
    """Teaches a small model the language and writes its checkpoint."""
    config = config_json(**SIZES)
    config["text_config"]["first_k_dense_replace"] = SIZES["num_hidden_layers"]
    raw = write_random_checkpoint(folder / "random", config, seed=seed, tokenizer=False)
    model = kimi_jax.load(raw, dtype="float32", max_seq_len=length)
    graph = model.runner.steps.graph
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(warmup_cosine(4e-3, steps // 20, steps), 0.9, 0.95)
    )

    def loss(params: Params, ids: Any) -> Any:
        bound = bind(graph, params)
        scores = bound.logits(forward(bound, ids, jnp.full(rows, length)).hidden[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]))

    @partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, ids: Any) -> tuple[TrainState, dict[str, Any]]:
        value, slope = jax.value_and_grad(loss)(state.params, ids)
        changes, opt_state = optimizer.update(slope, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        return TrainState(state.step + 1, params, opt_state), {"loss": value}  # pyright: ignore[reportArgumentType]

    params = {name: jnp.array(array) for name, array in model.runner.params.items()}
    state = begin(params, optimizer.init(params))
    metrics = Metrics(folder / "target.jsonl")
    state = run(
        update, state, partial(language.batch, rows, length, seed), steps=steps, metrics=metrics, every=50, watch=watch
    )
    target = folder / "target"
    write_checkpoint(target, _stored(model, state.params))
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def _stored(model: Kimi, params: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Trained parameters as the release stores them; a dense model stacks nothing."""
    found = {}
    for name, source in sources(abstract(model.config, Precision(), Parallel.single())[1]).items():
        values = np.asarray(params[name], np.float32)
        values = np.concatenate([values, np.zeros(8, np.float32)]) if source.padded else values
        values = values.astype(BFLOAT16 if source.dtype == "BF16" else np.float32)
        found[source.names[0]] = TensorSource(source.dtype, values.shape, lambda values=values: values)
    return found


def write_bigram(folder: Path, target: Path, samples: list[Sample]) -> Path:
    """The baseline's draft."""
    spec, arrays = bigram_draft(load_config(target), samples)
    return export_draft(folder, spec, arrays, "float32")


def measure(
    target: Path, draft: Path, prompts: list[list[int]], tokens: int, kinds: Collection[str] = ("greedy", "sampled")
) -> dict[str, float]:
    """Tokens per step of a draft in the engine, over all prompts, greedily and at temperature 1; in the float32 mode."""
    model = kimi_jax.load(target, dtype="float32", draft=draft, max_seq_len=len(prompts[0]) + tokens, prefill_chunk=16)
    found = {}
    for name in kinds:
        temperature = 0.0 if name == "greedy" else 1.0
        answers = model.generate_batch(prompts, tokens, temperature=temperature, seed=5, ignore_eos=True)
        used = [answer.usage.drafts for answer in answers]
        steps = sum(one.steps for one in used if one)
        found[name] = round(1 + sum(one.accepted for one in used if one) / max(steps, 1), 3)
    return found


def unseen_prompts(language: Language, count: int = 16, length: int = 12, seed: int = 1) -> list[list[int]]:
    """Texts of another seed than those the target learned."""
    random = np.random.default_rng([seed, 12])
    return [language.text(length, random) for _ in range(count)]


def main(words: list[str] | None = None) -> int:
    """Makes everything, prints one JSON object."""
    parser = argparse.ArgumentParser(description="a trained draft beside bigram counts")
    parser.add_argument("--out", required=True, help="folder for target, drafts and measurements; must be new")
    parser.add_argument("--target-steps", type=int, default=1000)
    parser.add_argument("--draft-steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--backbone", default="gqa", choices=("gqa", "mla"))
    parser.add_argument("--tokens", type=int, default=96, help="of each measured answer")
    args = parser.parse_args(words)
    out, language = Path(args.out), Language.made()
    begun = time.monotonic()
    target = make_target(out, language, steps=args.target_steps, watch=_tell)
    taught = time.monotonic()
    sizes = ["--steps", args.draft_steps, "--sample", args.samples, "--batch", 8, "--seq-len", 64, "--anchors", 16]
    sizes += ["--layers", 2, "--block", 7, "--lr", 3e-3, "--markov-rank", 32, "--dtype", "float32"]
    asked = ["train", "draft", "--model", target, "--out", out / "draft", "--backbone", args.backbone, *sizes, "--json"]
    print("kimi-jax", *asked, file=sys.stderr)
    done = subprocess.run([sys.executable, "-m", "kimi_jax.cli.main", *map(str, asked)], check=False)
    if done.returncode:
        return done.returncode
    trained = time.monotonic()
    lines = (out / "draft" / "training" / "data.jsonl").read_text().splitlines()
    samples = [Sample(tuple(entry["ids"]), entry["prompt"]) for entry in map(json.loads, lines)]
    bigram = write_bigram(out / "bigram", target, samples)
    prompts = unseen_prompts(language)
    found: dict[str, Any] = {"target_loss": round(Metrics(out / "target.jsonl").read()[-1]["loss"], 4)}
    found |= {"target_seconds": round(taught - begun), "draft_seconds": round(trained - taught)}
    found |= {
        name: measure(target, draft, prompts, args.tokens)
        for name, draft in (("draft", out / "draft"), ("bigram", bigram))
    }
    print(json.dumps(found))
    return 0


def _tell(done: int, total: int, measured: dict[str, float]) -> None:
    print(f"target {done}/{total} loss {measured['loss']:.4f}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
