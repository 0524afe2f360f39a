"""What the server knows of the model that it serves: names, text and sizes. No arrays."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_jax.problems import ProblemsError
from kimi_jax.serve.errors import ApiError
from kimi_jax.text.errors import shown
from kimi_jax.text.grammar import Grammars
from kimi_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kimi_jax.api import Kimi
    from kimi_jax.engine.engine import Engine


class ServeError(ProblemsError):
    """A model that cannot be served as asked."""


@dataclass(frozen=True)
class Served:
    """A model behind one or more names.

    Attributes:
      names: that clients may use; the first is the one that answers carry.
      tokenizer: its vocabulary.
      grammars: makes the grammars of answers that must have a form.
      stop_ids: ids that end an answer.
      capacity: tokens that a sequence can hold, prompt and answer.
      queue: requests that the engine lets wait.
      created: when it was loaded, in seconds since 1970.
      scores_prompts: whether log-probabilities of prompt tokens are computed.
      placeholder: the id that stands for a row of an image; None where images are not read.
      no_images: why they are not.
      always_thinks: whether requests cannot ask for an answer without thoughts (K3.1 Pro notes, section 12).
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    grammars: Grammars
    stop_ids: tuple[int, ...]
    capacity: int
    queue: int
    created: int
    scores_prompts: bool = False
    placeholder: int | None = None
    no_images: str = "this model reads text only"
    always_thinks: bool = False

    @property
    def vocab(self) -> int:
        """Ids of the model and of its tokenizer: loading has checked that they agree."""
        return self.tokenizer.vocab_size

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 for a name that is none of the served ones; None stands for any."""
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404,
                f"No model {shown(name)} is served here",
                hint=f"Served: {served}.",
                code="model_not_found",
                param="model",
            )

    def listing(self) -> list[Mapping[str, object]]:
        """The entries of /v1/models."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "kimi-jax",
                "root": self.names[0],
                "max_model_len": self.capacity,
            }
            for name in self.names
        ]


def served(
    kimi: "Kimi", engine: "Engine", names: Sequence[str], *, scores_prompts: bool = False, images: bool = False
) -> Served:
    """A loaded model and its engine.

    Args:
      kimi: the model.
      engine: of it.
      names: that clients may use.
      scores_prompts: whether there is a scorer beside the engine.
      images: whether there are ``serve.images.Images`` beside it.

    Raises:
      ServeError: no tokenizer files: requests are text.
    """
    if kimi.tokenizer is None:
        raise ServeError(
            "This model cannot be served",
            [f"{kimi.config.name} has no tokenizer files beside it"],
            "Add tiktoken.model and tokenizer_config.json to the folder.",
        )
    grammars, queue = Grammars(kimi.tokenizer), engine.limits.queue
    return Served(
        tuple(names),
        kimi.tokenizer,
        grammars,
        kimi.stop_ids,
        engine.capacity,
        queue,
        int(time.time()),
        scores_prompts,
        kimi.config.media_placeholder if images else None,
        kimi.no_vision or "this server was started without images",
        always_thinks=kimi.config.indexer is not None,
    )
