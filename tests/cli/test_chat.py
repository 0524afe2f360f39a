"""``kimi-jax chat`` without a terminal: a model that says what it is told to, and what is made of it."""

import io
import json
import signal
import sys
from types import SimpleNamespace

import pytest

from kimi_jax.cli import chat as verb
from kimi_jax.cli.chat import Chat
from kimi_jax.cli.generate import DIM, PLAIN
from kimi_jax.cli.main import main
from kimi_jax.completion import Piece
from kimi_jax.prompts import PromptReader
from kimi_jax.text.errors import ChatError
from kimi_jax.text.render import render
from tests.serve.model import folder
from tests.text.data import TINY

OPTIONS = {"thinking": True, "effort": "max", "temperature": 0.5}
ANSWER = [Piece(reasoning="H"), Piece(reasoning="m."), Piece(text="Yes", token_ids=(1, 2)), Piece("!", token_ids=(3,))]


class Model:
    """Answers with pieces from a script, one list an answer, and notes what it was asked."""

    tokenizer, runner, prompts = TINY, SimpleNamespace(capacity=1000), PromptReader(None, TINY, None)

    def __init__(self, *answers):
        self.answers, self.asked, self.closed = list(answers), [], 0

    def stream(self, messages, max_tokens, **options):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.asked.append(([dict(message) for message in messages], max_tokens, options))
        return self._pieces(answer)

    def _pieces(self, answer):
        try:
            for piece in answer:
                if piece is signal.SIGINT:
                    signal.raise_signal(signal.SIGINT)
                else:
                    yield piece
            if not answer or not isinstance(answer[-1], Piece) or not answer[-1].finish_reason:
                yield Piece(finish_reason="stop")
        finally:
            self.closed += 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def talk():
    """Says some lines to a model: (what came out, what was noted, the conversation)."""

    def talk(model, *lines, out=None, **more):
        out, notes = out or io.StringIO(), io.StringIO()
        chat = Chat(model, dict(OPTIONS), out=out, notes=notes, **more)
        chat.talk(lines)
        return out.getvalue(), notes.getvalue(), chat.messages

    return talk


def test_an_answer_and_its_history(talk):
    model = Model(ANSWER, [Piece("Two.")])
    out, notes, messages = talk(model, "One?", "", "Two?", messages=[{"role": "system", "content": "Be brief."}])
    assert out == "Hm.\n\nYes!\nTwo.\n"
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes!"},  # red when thoughts are forgotten
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Two."},
    ]
    assert model.asked[1][0] == messages[:-1]
    prompt = len(TINY.encode_segments(render(messages[:2])))
    assert model.asked[0][1:] == (1000 - prompt, OPTIONS)  # red when an answer has a small limit of its own
    assert "3 tokens, " in notes
    assert f"context {prompt + 3:,} of 1,000" in notes
    assert model.closed == 2


def test_thoughts_are_dim_on_a_terminal_only(talk):
    assert talk(Model(ANSWER), "One?", out=Terminal())[0].startswith(f"{DIM}H{PLAIN}{DIM}m.{PLAIN}\n\nYes!")
    assert DIM not in talk(Model(ANSWER), "One?")[0]


def test_ctrl_c_stops_the_answer_alone(talk):
    before = signal.getsignal(signal.SIGINT)
    model = Model([Piece("Ye"), signal.SIGINT, Piece("s"), Piece(" and no")], [Piece("Two.")])
    out, notes, messages = talk(model, "One?", "Two?")
    assert out == "Yes\nTwo.\n"  # red when it raises, or when the rest is waited for
    assert "[stopped; " in notes
    assert messages[1] == {"role": "assistant", "content": "Yes"}
    assert model.closed == 2  # red when the stopped answer keeps the engine busy
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_raises(talk):
    with pytest.raises(KeyboardInterrupt):
        talk(Model([signal.SIGINT, signal.SIGINT, Piece("s")]), "One?")


def test_what_cannot_be_answered_is_taken_back(talk):
    _, notes, messages = talk(Model(ChatError("no such thing"), ANSWER), "One?", "Two?")
    assert "no such thing" in notes
    assert [message["content"] for message in messages] == ["Two?", "Yes!"]  # red when the message stays
    _, notes, messages = talk(Model([Piece("Ye"), Piece(finish_reason="error")]), "One?")
    assert "not finite" in notes
    assert messages == []


def test_reset_keeps_what_the_system_says(talk):
    system = {"role": "system", "content": "Be brief."}
    model = Model(ANSWER, ANSWER)
    _, _, messages = talk(model, "One?", "/reset", "Two?", messages=[system])
    assert model.asked[1][0] == [system, {"role": "user", "content": "Two?"}]
    assert len(messages) == 3


def test_retry_asks_the_last_message_again(talk):
    model = Model(ANSWER, [Piece("No.")])
    _, notes, messages = talk(model, "/retry", "One?", "/retry")
    assert model.asked[0] == model.asked[1]
    assert [message["content"] for message in messages] == ["One?", "No."]
    assert "no message to answer" in notes


def test_save_writes_what_messages_reads(talk, tmp_path, monkeypatch):
    file = tmp_path / "talk.json"
    model = Model(ANSWER)
    *_, messages = talk(model, "Grüß?", f"/save {file}", f"/save {tmp_path}", "/save")
    assert json.loads(file.read_text()) == {"messages": messages}
    assert "Grüß" in file.read_text()
    again = Model([Piece("Go on.")])
    monkeypatch.setattr(verb, "load_model", lambda args: again)
    monkeypatch.setattr(sys, "stdin", io.StringIO("And?\n"))
    assert main(["chat", "--messages", str(file), "--effort", "low"]) == 0
    assert again.asked[0][0] == [*messages, {"role": "user", "content": "And?"}]
    assert again.asked[0][2] == {
        **{"temperature": 1.0, "top_p": 0.95, "top_k": 0, "seed": None, "thinking": True, "effort": "low"}
    }


def test_thinking_is_changed_for_the_answers_that_follow(talk):
    model = Model(ANSWER, ANSWER, ANSWER)
    _, notes, _ = talk(model, "/think off", "One?", "/think low", "Two?", "/think a lot", "Three?")
    assert [asked[2]["thinking"] for asked in model.asked] == [False, True, True]
    assert [asked[2]["effort"] for asked in model.asked] == ["max", "low", "low"]
    assert "/think takes low, high, max or off" in notes


def test_commands_that_are_none_and_the_way_out(talk):
    model = Model(ANSWER)
    _, notes, _ = talk(model, "/help", "/fly me", "/quit", "never asked")
    assert all(f"/{name}" in notes for name in ("reset", "retry", "save", "think", "quit"))
    assert "/fly is no command" in notes
    assert model.asked == []


def test_lines_from_the_terminal(monkeypatch):
    typed = iter(["One \\", "line?", KeyboardInterrupt(), "a\\", KeyboardInterrupt(), "Two?", EOFError()])
    asked = []

    def answer(prompt):
        asked.append(prompt)
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    assert list(verb._typed()) == ["One \nline?", "Two?"]  # red when Ctrl-C leaves, or keeps half a message
    assert asked[:2] == [verb.PROMPT, verb.MORE]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temp", "-1"], "temperature = -1.0"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--effort", "huge"], "invalid choice"),
        (["--messages", "no-such-file.json"], "cannot be read"),
        (["--messages", "{tmp}/list.json"], "is no conversation"),
    ],
)
def test_refused_before_anything_is_loaded(capsys, monkeypatch, tmp_path, words, said):
    (tmp_path / "list.json").write_text('["Hi"]')
    monkeypatch.setattr(verb, "load_model", None)  # red (TypeError) when the model is loaded first
    assert main(["chat", *(word.format(tmp=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_a_model_without_words(capsys, monkeypatch):
    monkeypatch.setattr(verb, "load_model", lambda args: SimpleNamespace(tokenizer=None))
    assert main(["chat"]) == 2
    assert "no tokenizer files" in capsys.readouterr().err


@pytest.mark.slow  # compiles two programs
def test_with_a_model_of_its_own(capsys, monkeypatch):
    """The whole way once: a checkpoint, its tokenizer, and what the engine draws."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("/fly\nHello\n"))
    words = ["--model", str(folder()), "--dtype", "float32", "--max-tokens", "3", "--temp", "0", "--no-thinking"]
    assert main(["chat", *words]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "/fly is no command" in err
    assert "[length; 3 tokens, " in err
    assert "of 1,024]" in err
