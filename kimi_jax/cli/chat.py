"""``kimi-jax chat``: talk to the model in the terminal. Commands start with a slash; /help lists them."""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

from kimi_jax.cli.generate import DIM, PLAIN, read_json
from kimi_jax.cli.images import add_image_argument, as_url, image_problems
from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model
from kimi_jax.problems import ProblemsError
from kimi_jax.text.effort import EFFORTS

if TYPE_CHECKING:
    from kimi_jax.api import Kimi
    from kimi_jax.completion import Piece

PROMPT, MORE = "> ", ". "
GREETING = "Type a message; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("chat", help="talk to the model in the terminal")
    add_model_arguments(parser)
    parser.add_argument("--system", default=None, help="what the model is told before the conversation")
    parser.add_argument(
        "--messages", metavar="FILE", help="go on with a conversation from /save, or a list of messages"
    )
    add_image_argument(parser, "with the first message")
    parser.add_argument("--max-tokens", type=int, default=None, help="of one answer (default: what the context holds)")
    parser.add_argument("--temperature", "--temp", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--no-thinking", dest="thinking", action="store_false", help="answers without thoughts")
    parser.add_argument("--effort", choices=EFFORTS, default="max", help="how much to think (default: max)")


def run(args: argparse.Namespace) -> int:
    """Loads, then talks until the input ends."""
    messages = _first_messages(args)
    _check_numbers(args)
    model = load_model(args)
    if model.tokenizer is None:
        raise ArgumentError(
            "This model cannot talk", ["it has no tokenizer files"], "kimi-jax generate --ids FILE works."
        )
    names = ("temperature", "top_p", "top_k", "seed", "thinking", "effort")
    chat = Chat(model, {name: getattr(args, name) for name in names}, messages, args.max_tokens)
    for image in args.image:
        chat.attach(image)
    chat.talk(_typed() if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin))
    return 0


class Chat:
    """One conversation.

    Args:
      model: answers through `Kimi.stream`.
      options: of every answer, as `Kimi.generate` takes them.
      messages: the conversation so far; its system messages stay after /reset.
      max_tokens: of one answer; None for what the context holds.
      out: where answers go.
      notes: where everything else goes.
    """

    def __init__(
        self,
        model: "Kimi",
        options: dict[str, Any],
        messages: Iterable[dict[str, Any]] = (),
        max_tokens: int | None = None,
        out: TextIO | None = None,
        notes: TextIO | None = None,
    ) -> None:
        self.model, self.options, self.max_tokens = model, options, max_tokens
        self.messages = list(messages)
        self._attached: list[dict[str, Any]] = []
        self._out, self._notes = out or sys.stdout, notes or sys.stderr
        self._dim, self._plain = (DIM, PLAIN) if self._out.isatty() else ("", "")

    def talk(self, lines: Iterable[str]) -> None:
        """Answers each line, or does what it commands, until they end."""
        for line in lines:
            if not line.strip():
                continue
            try:
                if not line.startswith("/"):
                    self.answer([*self._attached, {"type": "text", "text": line}] if self._attached else line)
                    self._attached.clear()
                elif not self.command(line):
                    return
            except (ProblemsError, OSError) as error:
                self._note(str(error))

    def attach(self, image: str) -> None:
        """A picture, by file or URL, that goes before the text of the next message.

        Raises:
          MediaError: it cannot be read.
          PromptError: this model reads no images.
        """
        part = {"type": "image_url", "image_url": {"url": as_url(image)}}
        self.model.prompts.read([{"role": "user", "content": [part]}], ())
        self._attached.append(part)

    def answer(self, content: str | list[dict[str, Any]]) -> None:
        """Adds a message of the user and the model's answer to it. A message that cannot be answered is taken back."""
        self.messages.append({"role": "user", "content": content})
        try:
            self.messages.append(self._ask())
        except BaseException:
            self.messages.pop()
            raise

    def _ask(self) -> dict[str, Any]:
        used, holds = self.used(), self.model.runner.capacity
        limit = self.max_tokens or max(1, holds - used)
        began, first, count, first_count, finish = time.perf_counter(), 0.0, 0, 0, None
        said: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        with interrupts() as stopped:
            pieces = cast("Generator[Piece]", self.model.stream(self.messages, limit, **self.options))
            for piece in pieces:
                self._show(piece, said)
                count, finish = count + len(piece.token_ids), piece.finish_reason
                if not first:
                    first, first_count = time.perf_counter(), count
                if stopped.is_set():
                    finish = "stopped"
                    break
            pieces.close()
        print(self._plain, file=self._out, flush=True)
        if finish == "error":
            raise ArgumentError(
                "The answer broke off", ["the model's scores are not finite"], "Say it again, or /reset."
            )
        self._note(_summary(finish, count, first_count, began, first or began, used + count, holds))
        return {"role": "assistant"} | {
            name: "".join(parts) for name, parts in said.items() if name == "content" or parts
        }

    def used(self) -> int:
        """Tokens of the conversation as the model will read it next."""
        options = {name: self.options[name] for name in ("thinking", "effort") if name in self.options}
        return len(self.model.prompts.read(self.messages, (), **options).ids) if self.messages else 0

    def _show(self, piece: "Piece", said: dict[str, list[str]]) -> None:
        if piece.reasoning:
            said["reasoning_content"].append(piece.reasoning)
            print(f"{self._dim}{piece.reasoning}{self._plain}", end="", file=self._out, flush=True)
        if piece.text:
            if said["reasoning_content"] and not said["content"]:
                print("\n", file=self._out)
            said["content"].append(piece.text)
            print(piece.text, end="", file=self._out, flush=True)

    def command(self, line: str) -> bool:
        """Does what a line with a slash says. False to leave."""
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "image": self._image,
            "reset": self._reset,
            "retry": self._retry,
            "save": self._save,
            "think": self._think,
        }
        if name in commands:
            commands[name](rest.strip())
        else:
            self._note(f"/{name} is no command; /help lists those that are. A message cannot start with a slash.")
        return True

    def _help(self, _: str) -> None:
        self._note(
            "/image FILE   a picture to go before the next message; a URL works too\n"
            "/reset        forget the conversation\n"
            "/retry        answer the last message again\n"
            "/save FILE    write the conversation; --messages FILE goes on with it\n"
            f"/think HOW    {', '.join(EFFORTS)}, or off\n"
            "/quit         leave; so does Ctrl-D\n"
            "Ctrl-C stops an answer. A line that ends in \\ goes on in the next."
        )

    def _image(self, name: str) -> None:
        if not name:
            self._note("/image needs a file or a URL.")
            return
        self.attach(name)
        self._note(f"Pictures before the next message: {len(self._attached)}.")

    def _reset(self, _: str) -> None:
        self._attached.clear()
        self.messages = [message for message in self.messages if message.get("role") == "system"]
        self._note("The conversation is forgotten.")

    def _retry(self, _: str) -> None:
        asked = [place for place, message in enumerate(self.messages) if message.get("role") == "user"]
        if not asked:
            self._note("There is no message to answer again.")
            return
        text = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        self.answer(text)

    def _save(self, name: str) -> None:
        if not name:
            self._note("/save needs the name of a file.")
            return
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        Path(name).write_text(text + "\n", encoding="utf-8")
        self._note(f"Saved: {len(self.messages)} messages in {name}.")

    def _think(self, how: str) -> None:
        if how not in (*EFFORTS, "off"):
            self._note(f"/think takes {', '.join(EFFORTS)} or off.")
            return
        self.options |= {"thinking": False} if how == "off" else {"thinking": True, "effort": how}
        self._note("Answers come without thoughts." if how == "off" else f"Thinking effort: {how}.")

    def _note(self, text: str) -> None:
        print(f"{self._dim}{text}{self._plain}", file=self._notes, flush=True)


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of raising in the middle of a step; a second one raises."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _summary(
    finish: str | None, count: int, first_count: int, began: float, first: float, used: int, holds: int
) -> str:
    now = time.perf_counter()
    later, seconds = (count - first_count, now - first) if count > first_count else (count, now - began)
    how = "" if finish == "stop" else f"{finish}; "
    return (
        f"[{how}{count} tokens, {later / max(seconds, 1e-9):.1f} tok/s, first after {first - began:.2f} s; "
        f"context {used:,} of {holds:,}]"
    )


def _typed() -> Iterator[str]:
    """Messages from the terminal, with the line editing that it has."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it from then on
    print(GREETING, file=sys.stderr)
    lines: list[str] = []
    while True:
        try:
            lines.append(input(MORE if lines else PROMPT))
        except KeyboardInterrupt:
            print(file=sys.stderr)
            lines.clear()
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        if lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            continue
        yield "\n".join(lines)
        lines.clear()


def _first_messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": args.system}] if args.system else []
    if args.messages is None:
        return system
    value = read_json(Path(args.messages))
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        problems = ['expected {"messages": [...]} as /save writes it, or a list of messages']
        raise ArgumentError(f"{args.messages} is no conversation", problems)
    return [*system, *messages]


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuses, before a model is loaded, what no model could do."""
    from kimi_jax.engine.request import number_problems

    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if problems := [*number_problems(**given), *image_problems(args)]:
        raise ArgumentError("This cannot be said", problems)
