"""Every number that a client or a crowd of clients could make too large, with the reason for its limit."""

from dataclasses import dataclass, field

from kimi_jax.media.limits import Limits as PictureLimits

MESSAGES = 10_000
"""Messages of a conversation: the frame of one is at least 8 tokens, so more would fill a long context with frames."""

TOOLS = 512
"""Declared tools: about 200 tokens each is already a hundred thousand tokens of declarations."""

NAME = 256
"""Characters of a model, tool or schema name; clients make them, people read them."""

STOPS = 16
"""Stop strings: every character of an answer is compared with each of them on the host."""

STOP_LENGTH = 1024
"""Characters of a stop string; as much of the answer may be held back to decide."""

STOP_IDS = 12
"""Stop ids besides those of the model: the device keeps 16 in all."""

PROMPTS = 128
"""Prompts of one completion request: lm-eval and others send batches of up to 64."""

CHOICES = 16
"""Answers to one prompt; each takes a slot of the engine."""

ANSWERS = 256
"""Prompts times answers of one request."""

TOP_LOGPROBS = 20
"""Alternatives to a drawn id; the device reports this many (OpenAI's limit too)."""

PROMPT_SCORES = 1_000_000
"""Log-probabilities of prompt tokens in one answer, alternatives included: about 50 bytes of JSON each."""

BIASED_IDS = 300
"""Entries of logit_bias; the device keeps this many (OpenAI's limit too)."""

BIAS = 100.0
"""Largest bias: it already bans or forces an id (OpenAI's limit)."""

TEMPERATURE = 2.0
"""Beyond it answers are noise (OpenAI's limit)."""

PENALTY = 2.0
"""Presence and frequency penalties (OpenAI's limit)."""

REPETITION = (0.01, 100.0)
"""Repetition penalty divides and multiplies scores; outside this they leave what float32 tells apart."""

TOKENS = 1 << 30
"""max_tokens and top_k: fits 32 bits on the device. What a sequence cannot hold ends by length before that."""

SEED = 1 << 63
"""Seeds are 64-bit integers in OpenAI's API; the lower 32 bits are used."""

METADATA = 16
"""Entries of metadata, which is accepted and not used (OpenAI's limit)."""

JSON_MARKS = 2_000_000
"""Commas and brackets in a body: each may become a Python object of some 60 bytes. A million token ids need a million."""

TOKENIZED = 1 << 20
"""Tokens that /tokenize gives: the longest context of these models. More of a text is seconds of work for nothing."""

PROBLEMS = 20
"""Problems that an error lists; it says how many more there are."""


@dataclass(frozen=True)
class Limits:
    """Limits that an operator chooses.

    Attributes:
      body_bytes: of a request. A million tokens of text are about 5 MB, of ids 8 MB.
      body_seconds: until the whole body has come; slower clients hold a connection for nothing.
      requests: answered at once over all connections, waiting ones included; more get 429. Each may hold a body in memory.
      request_seconds: for a whole answer. A prompt of a million tokens takes minutes; nobody waits an hour.
      write_seconds: in which a client must take what is sent; one that reads nothing would hold its slot for ever.
      drain_seconds: for answers under way when the server is told to stop.
      silence_seconds: without anything to send, after which a stream carries a comment: proxies close silent connections, and
        a lost client is found.
      preparing: requests that are read, rendered and encoded at a time, in threads of their own; others wait.
    """

    body_bytes: int = 16 << 20
    body_seconds: float = 60.0
    requests: int = 1024
    request_seconds: float = 3600.0
    write_seconds: float = 60.0
    drain_seconds: float = 120.0
    silence_seconds: float = 15.0
    preparing: int = 4


@dataclass(frozen=True)
class ImageLimits:
    """Limits of images that an operator chooses.

    Attributes:
      images: of one request. At 2,691 tokens for a full HD picture 32 are more than most contexts hold.
      picture: bytes, pixels and seconds of one.
      threads: pictures that are decoded at a time, each in up to about 10 bytes a pixel of ``picture``.
      waiting: pictures that may wait for those; more get 503.
      memory_bytes: of the host for decoded pictures and rows, in use or kept for later, over all requests. A row of Kimi-K3 has
        14 KB and the pixels behind it 2 KB; half of it may be one request's.
    """

    images: int = 32
    picture: PictureLimits = field(default_factory=PictureLimits)
    threads: int = 2
    waiting: int = 64
    memory_bytes: int = 4 << 30
