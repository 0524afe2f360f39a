"""The public face: load a model onto a mesh, score, generate, stream."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from kimi_jax.checkpoint import parameters
from kimi_jax.checkpoint.load import Progress, silent
from kimi_jax.checkpoint.resident import Requantiser, unpack_experts
from kimi_jax.completion import AnswerBuilder, Completion, Piece, Reading
from kimi_jax.config import SHIPPED, KimiConfig, load_config
from kimi_jax.draft.attach import DraftOptions, attach, read_draft
from kimi_jax.engine.drafted import DraftedRunner
from kimi_jax.engine.request import Request, check, check_ids
from kimi_jax.engine.runner import Runner
from kimi_jax.image_encoder import ImageEncoder, picture_settings
from kimi_jax.layers.vision import vision_only, vision_parameters
from kimi_jax.loop import Steps
from kimi_jax.media.fetch import FetchRules
from kimi_jax.model import abstract
from kimi_jax.ops.implementation import Impl, Implementations
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.compiler import platform_of
from kimi_jax.placement.layout import Layout, load_layout, validate
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import ExpertForm, Precision, choose_precision
from kimi_jax.problems import ProblemsError, nearest
from kimi_jax.prompts import Message, Prompt, PromptReader, image_list, image_lists
from kimi_jax.quant.fp8_policy import form_problems, fp8_policy
from kimi_jax.testing.shipped import SHIPPED_MODELS, shipped_model
from kimi_jax.text.stop import StopStrings
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.text.vocabulary import TokenizerMissing
from kimi_jax.vision_steps import VisionSteps

DEFAULT_SEQUENCE = 8192
"""Tokens a sequence can hold where the caller names no limit; the cache is allocated whole."""


class LoadError(ProblemsError):
    """A model that cannot be loaded as asked."""


@dataclass(frozen=True)
class _Asked:
    """A generate call made ready: the request and how to read its answer."""

    request: Request
    reading: Reading


class Kimi:
    """A loaded model. Made by :func:`load`.

    Attributes:
      config: sizes and layer kinds.
      layout: where every tensor lives.
      tokenizer: None when the folder has no tokenizer files; the model then works with ids only.
      vision: reads images; None where the model was loaded without a vision tower.
      no_vision: why it was, for errors.
      prompts: makes ids and pictures of what a caller hands in; :meth:`generate` begins with it.
    """

    def __init__(
        self,
        config: KimiConfig,
        layout: Layout,
        tokenizer: Tokenizer | None,
        runner: Runner,
        vision: ImageEncoder | None = None,
        no_vision: str = "",
    ) -> None:
        self.config, self.layout, self.tokenizer, self.runner = config, layout, tokenizer, runner
        self.vision, self.no_vision = vision, no_vision
        self.prompts = PromptReader(config, tokenizer, vision, no_vision)

    def logits(self, token_ids: Sequence[int], images: Any = ()) -> np.ndarray[Any, Any]:
        """Teacher-forced scores from an empty state, float32 [T, vocab].

        Args:
          token_ids: used as they are; a run of image placeholders for each image.
          images: as for :meth:`generate`.

        Raises:
          RequestError: ids outside the vocabulary, or more of them than a sequence holds.
          MediaError: an image that cannot be read, or placeholders that are not those of the images.
        """
        read = self.prompts.read_ids(token_ids, images)
        check_ids(read.ids, self.config.vocab, self.runner.capacity)
        return self.runner.logits(read.ids, self.prompts.spans(read))

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: bool | int | None = None,
        images: Any = None,
        tools: Sequence[Message] | None = None,
        **options: Any,
    ) -> Completion:
        """Continues a prompt to its end.

        Args:
          prompt: a str is one user message through the chat template, a list of messages a conversation; ids are used as they are.
          max_tokens: ids to draw at most.
          temperature: 0 takes the likeliest id.
          top_p: keep the likeliest ids whose probability reaches this.
          top_k: keep this many likeliest ids; 0 keeps all.
          seed: equal seeds give equal answers; a fresh one is drawn where omitted.
          stop: strings that end the answer and are no part of it.
          logprobs: True to get the log-probability of every drawn id.
          images: files as paths or bytes, ``data:`` URLs, or pictures made ready. Before a str; in place of the image parts
            without a URL of messages, in the order of the prompt; for the placeholders of ids. Other image parts of messages
            bring a ``data:`` URL (http and https with ``fetch_images``).
          tools: declared to the model, as a client of the OpenAI API sends them.
          options: ``thinking=True`` and ``effort="max"`` of a conversation, ``ignore_eos=False``.

        Raises:
          RequestError: something does not fit the model or its limits.
          ChatError: messages that cannot be rendered.
          MediaError: an image that cannot be read, or that has no place in the prompt.
          PromptError: text asked of a model without tokenizer files, images of one without a vision tower.
          LoadError: an option that is not built.
        """
        named = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "stop": stop}
        named |= {"logprobs": logprobs, "images": [image_list(images)], "tools": tools}
        return self.generate_batch([prompt], max_tokens, **named, **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], max_tokens: int = 256, images: Any = (), **options: Any
    ) -> list[Completion]:
        """Continues several prompts together; ``images`` is then a list of images for each prompt.

        In float32 each answer is what :meth:`generate` gives for it alone. In bfloat16 a product over more rows may add in another
        order, and one rounding can turn a close choice.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise LoadError("These prompts cannot be used", ["give a list of prompts; generate takes a single one"])
        each = image_lists(images, len(prompts))
        wanted = [
            self._ask(prompt, max_tokens, images=given, **options) for prompt, given in zip(prompts, each, strict=True)
        ]
        builders = [AnswerBuilder(asked.reading, len(asked.request.ids)) for asked in wanted]
        events = self.runner.run([asked.request for asked in wanted])
        for event in events:
            builders[event.request].push(event)
            if all(builder.finished for builder in builders):
                break
        return [builder.completion(logprobs=options.get("logprobs") not in (None, False)) for builder in builders]

    def stream(self, prompt: Prompt, max_tokens: int = 256, **options: Any) -> Iterator[Piece]:
        """Like :meth:`generate` with the same options, piece by piece; they are checked before the first piece is asked for."""
        asked = self._ask(prompt, max_tokens, **options)
        events = self.runner.run([asked.request])
        return self._pieces(events, AnswerBuilder(asked.reading, len(asked.request.ids)))

    @staticmethod
    def _pieces(events: Iterator[Any], builder: AnswerBuilder) -> Iterator[Piece]:
        for event in events:
            yield builder.push(event)
            if builder.finished:
                break

    def _ask(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: bool | int | None = None,
        images: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        effort: str | None = "max",
        ignore_eos: bool = False,
    ) -> _Asked:
        if logprobs not in (None, False, True, 0, 1):
            raise LoadError(
                "These log-probabilities cannot be given",
                [f"logprobs = {logprobs}; only those of the drawn ids are built: True"],
            )
        stop = _stop_strings(stop)
        read = self.prompts.read(prompt, images, tools, thinking, effort)
        if stop and self.tokenizer is None:
            raise self.prompts.no_text("stop strings")
        stop_ids = () if ignore_eos else self.stop_ids
        request = Request(
            read.ids, max_tokens, temperature, top_p, top_k, secrets.randbits(32) if seed is None else seed, stop_ids
        )
        if read.pictures:
            check(request, self.config.vocab, self.runner.capacity)  # before the tower works
            request = replace(request, images=self.prompts.spans(read))
        return _Asked(request, Reading(self.tokenizer, read.chat, thinking, bool(tools), stop, stop_ids))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those of the configuration and of the tokenizer."""
        return tuple(dict.fromkeys((*self.config.eos, *(self.tokenizer.stop_ids if self.tokenizer else ()))))


def load(
    path_or_name: str | Path,
    layout: str | Path | Layout = "single",
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    draft: Any = None,
    max_seq_len: int | None = None,
    *,
    experts: ExpertForm | None = None,
    impl: Impl | None = None,
    vision: bool | None = None,
    fetch_images: bool = False,
    prefill_chunk: int = 512,
    decode_block: int = 16,
    fp8: str | None = None,
    index_dtype: str | None = None,
    progress: Progress = silent,
) -> Kimi:
    """Reads a checkpoint straight into its place on the mesh.

    Args:
      path_or_name: a folder in Hugging Face layout, an orbax folder made by ``convert``, or a shipped name.
      layout: shipped name, layout file or Layout.
      dtype: ``bfloat16``, or ``float32`` for the exact mode.
      kv_dtype: dtype of latent-attention rows: ``bfloat16``, ``float32`` or ``fp8``; ``dtype`` where omitted.
      draft: folder of a DSpark draft trained for this model, or :class:`DraftOptions`: several tokens a step, the same answers.
      max_seq_len: tokens a sequence can hold, prompt and answer; the model's limit or 8192, whichever is smaller, where omitted.
      experts: how routed experts are kept: ``packed`` or ``codes`` (see ``Precision``); by platform where omitted.
      impl: what every op runs: ``reference``, ``pallas``, or ``interpret`` (kernels step by step, for tests); by platform
        where omitted.
      vision: False leaves the vision tower in its file; True insists on it. Where omitted, it is loaded if the folder has its
        configuration and ``preprocessor_config.json``.
      fetch_images: whether images may be http(s) URLs, which are then asked for over the network.
      prefill_chunk: most prompt tokens of a sequence in one call.
      decode_block: decode steps between two reads by the host.
      fp8: projections that are re-quantised to FP8 while they are read: ``ptpc``, the published treatment, or groups as ``plan``
        takes them; none where omitted.
      index_dtype: form of the index keys of K3.1 Pro: ``bfloat16``, ``float32``, ``fp8`` or ``mxfp4``; ``dtype`` where omitted.
      progress: called with each parameter's name and bytes as it lands.

    Raises:
      ConfigError, LayoutError, CheckpointError, TokenizerError, PrecisionError, SettingsError, LoadError: each lists everything
        wrong.
    """
    if not isinstance(path_or_name, str | Path):
        raise LoadError(
            "This model cannot be found", [f"{path_or_name!r} is no folder; give its path or a shipped name"]
        )
    if draft is not None and not isinstance(draft, str | Path | DraftOptions):
        raise LoadError("This draft cannot be found", [f"{draft!r} is no folder; give its path or DraftOptions"])
    folder = _model_folder(path_or_name)
    config = load_config(folder)
    placed = load_layout(layout)
    capacity = min(config.max_positions, DEFAULT_SEQUENCE) if max_seq_len is None else max_seq_len
    _check_numbers(config, capacity, prefill_chunk, decode_block)
    mesh = make_mesh(placed)
    platform = platform_of(mesh.devices.flat[0])
    impls = _implementations(impl, platform)
    # kernels read what a GPU holds, wherever they run
    precision = choose_precision(dtype, kv_dtype, "gpu" if impls.kernels else platform, experts, index_dtype)
    precision = replace(precision, fp8=_treatment(fp8, mesh.devices.flat[0]))
    steps = Steps(config, placed, mesh, precision, capacity, decode_block, impls)
    _refuse_unbuilt(config, placed)
    validate(placed, steps.parameters, config.name)
    drafting = DraftOptions(draft) if isinstance(draft, str | Path) else draft
    if drafting is not None:
        read_draft(steps, drafting)  # before the target's weights are
    tokenizer = _tokenizer(folder, config)
    settings, no_vision = picture_settings(folder, config, vision)
    tower = VisionSteps(config.vision, placed, mesh, precision) if settings and config.vision else None
    params = read_parameters(folder, config, steps, progress, tower)
    encoder = None
    if settings is not None and tower is not None:
        rules = FetchRules() if fetch_images else None
        encoder = ImageEncoder(tower, vision_only(params), settings, rules=rules)
        params = {name: array for name, array in params.items() if name not in encoder.params}
    allowed = np.ones(config.vocab, bool)
    if tokenizer is not None:
        allowed[[number for number in tokenizer.banned_ids if number < config.vocab]] = False
    runner = Runner(steps, params, allowed, prefill_chunk)
    if drafting is not None:
        runner = DraftedRunner(*attach(steps, params, drafting, progress), allowed, prefill_chunk)
    return Kimi(config, placed, tokenizer, runner, encoder, no_vision)


def _treatment(fp8: str | None, device: Any) -> str:
    """An FP8 treatment by its full name; a device must read the form of FP8 that it makes."""
    policy = fp8_policy(fp8)
    problems = form_problems(policy, str(getattr(device, "compute_capability", "")), device.device_kind)
    if problems:
        raise LoadError("These weights cannot be held", problems)
    return policy.name


def _implementations(impl: Impl | None, platform: str) -> Implementations:
    problems = []
    if impl not in (None, *get_args(Impl)):
        problems.append(f"no implementation is called {impl!r}; choose {', '.join(get_args(Impl))}")
    if impl == "pallas" and platform == "cpu":
        problems.append("impl 'pallas' on a CPU, which has no such kernels; 'interpret' runs them step by step")
    if problems:
        raise LoadError("These kernels cannot run", problems)
    return Implementations.of(platform) if impl is None else Implementations.all(impl)


def _model_folder(path_or_name: str | Path) -> Path:
    """The folder of a shipped model, made where it is not there yet, or the folder that a path names."""
    name, path = str(path_or_name), Path(path_or_name)
    made = shipped_model(name)
    if made is not None:
        return made
    if path.exists() or len(path.parts) != 1:
        return path
    if name in SHIPPED:
        raise LoadError(
            f"{name} has no weights here",
            [f"{name} is the name of a configuration, and there is no folder {name}"],
            f"Give the folder of its checkpoint. Without weights work: kimi-jax plan {name}, kimi-jax compile {name}.",
        )
    raise LoadError(f"No model is called {name!r}", [f"there is no such folder{nearest(name, SHIPPED_MODELS)}"])


def read_parameters(
    folder: Path, config: KimiConfig, steps: Steps, progress: Progress = silent, tower: VisionSteps | None = None
) -> dict[str, jax.Array]:
    """Every parameter of a checkpoint folder, released or converted, placed; those of the vision tower with ``tower``.

    Raises:
      CheckpointError: the folder does not hold exactly the tensors of its configuration.
    """
    mesh = steps.mesh
    assert isinstance(mesh, Mesh)  # arrays lie on devices
    stored = abstract(config, Precision(), Parallel.single())[1]
    policy = fp8_policy(steps.precision.fp8)
    packed = abstract(config, replace(steps.precision, experts="packed", fp8="none"), steps.parallel)[1]
    packed |= {name: stored[name] for name in packed if policy.covers(name)}
    if tower is not None:
        stored |= vision_parameters(config, Precision())
        packed |= tower.parameters
    params = parameters.read_parameters(
        folder, stored, packed, steps.layout, mesh, tied_head=config.tied_head, progress=progress,
        finish=Requantiser(policy, steps.parameters, steps.layout, mesh),
    )  # fmt: skip
    if steps.precision.experts == "packed":
        return params
    return unpack_experts(params, steps.parameters, steps.layout, mesh)


def _tokenizer(folder: Path, config: KimiConfig) -> Tokenizer | None:
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except TokenizerMissing:
        return None
    if tokenizer.vocab_size != config.vocab:
        raise LoadError(
            f"The tokenizer of {folder} does not fit its model",
            [f"it has {tokenizer.vocab_size} ids, the model's vocabulary has {config.vocab}"],
        )
    return tokenizer


def _check_numbers(config: KimiConfig, capacity: int, chunk: int, block: int) -> None:
    limits = (
        ("max_seq_len", capacity, 2, config.max_positions),
        ("prefill_chunk", chunk, 1, 1 << 16),
        ("decode_block", block, 1, 1024),
    )
    problems = [
        f"{name} = {value!r}; it must be an integer from {low:,} to {high:,}"
        for name, value, low, high in limits
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high
    ]
    if problems:
        raise LoadError("These limits cannot be used", problems)


def _refuse_unbuilt(config: KimiConfig, layout: Layout) -> None:
    problems = []
    if layout.parts("embed") > 1:
        problems.append(f'layout {layout.name} cuts embed: the hidden vector is kept whole by every step; map it to ""')
    if problems:
        raise LoadError(f"{config.name} cannot be run", problems)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    try:
        wanted = (stop,) if isinstance(stop, str) else tuple(stop or ())
        StopStrings(wanted)
    except (TypeError, ValueError) as error:
        raise LoadError("These stop strings cannot be used", [str(error)]) from None
    return wanted
