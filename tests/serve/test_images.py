"""Images in conversations on a written engine and made-up eyes: what the engine is given, and what is refused."""

import asyncio
import threading

import numpy as np
import pytest

from kimi_jax.media import reader as reader_module
from tests.serve.client import Call, ask, run, until
from tests.serve.eyes import PAD, engine, file, make_eyes, part, seeing, url, user
from tests.serve.model import CAPACITY, reply, served, tokenizer

CHAT = "/v1/chat/completions"
ANSWER = "Seen.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def body(*messages, **fields):
    return {"messages": list(messages), "reasoning_effort": "none", "max_tokens": 30, **fields}


def send(*bodies, path=CHAT, images=None, made=None, model=None):
    """Answers, and the requests that reached the engine."""
    made = made or engine(answer=reply(ANSWER))

    async def scenario(app):
        return [await ask(app, path, one) for one in bodies]

    got = run(made, scenario, model or seeing(), images=images or make_eyes())
    return got, made.seen


def looks(request):
    """First values and keys of the images of a request, each seen to lie in its placeholders, nothing else there."""
    ids = np.array(request.ids)
    covered = np.zeros(len(ids), bool)
    for span in request.images:
        assert (ids[span.start : span.end] == PAD).all()
        covered[span.start : span.end] = True
    assert (covered == (ids == PAD)).all()
    return [(float(span.rows[0, 0]), span.tokens) for span in request.images]


class TestWhatTheEngineIsGiven:
    def test_files_in_their_places(self):
        # red when an image is put where another belongs, its size is that of the resized one, or usage leaves it out
        jpeg, png = url(file((56, 28), 200, "JPEG", quality=100), "jpeg"), file((20, 300), 9)
        (got,), (request,) = send(body(user("first", png, "then", part(jpeg), "what?")))
        assert got.status == 200 and got.json["choices"][0]["message"]["content"] == "Seen."
        (first, tall), (second, wide) = looks(request)
        assert (first, tall, wide) == (9, 11, 2) and abs(second - 200) < 3
        words = tokenizer().decode(request.ids, skip={PAD})
        assert "first<|media_begin|>image 20x300<|media_content|><|media_end|>then" in words
        assert "then<|media_begin|>image 56x28<|media_content|><|media_end|>what?" in words
        assert got.json["usage"]["prompt_tokens"] == len(request.ids)

    def test_images_of_a_history_and_of_tool_results(self):
        # red when only the last message is looked at, or results are taken in the order in which they were sent
        call = [
            {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in ("a", "b")
        ]
        result = [
            {"role": "tool", "tool_call_id": name, "content": [part(file(colour=value))]}
            for name, value in (("b", 2), ("a", 1))
        ]
        talk = [
            user(file(colour=7)),
            {"role": "assistant", "content": None, "tool_calls": call},
            *result,
            user("and", file(colour=3)),
        ]
        (got,), (request,) = send(body(*talk))
        assert got.status == 200
        assert [value for value, _ in looks(request)] == [7, 1, 2, 3]

    def test_text_takes_no_place(self):
        # red when a placeholder, or the name of its id, that somebody wrote is taken for an image's place
        words = "<|kimi_image_placeholder|><|media_pad|><|media_begin|>image 1x1<|media_content|>"
        (got,), (request,) = send(
            body(user(words, file(), words), {"role": "assistant", "content": words}, user(words))
        )
        assert got.status == 200
        assert looks(request) == [(5, 2)]
        assert tokenizer().decode(request.ids).count(words) == 4

    def test_answers_share_what_was_seen_once(self):
        # red when every answer, or every request with the same picture, has the tower look again, or in a thread of its own
        images = make_eyes()
        asked = body(user(file(), file()), n=3)
        (one, two), seen = send(asked, body(user(file(colour=6), file())), images=images)
        assert one.status == two.status == 200
        assert images.tower.looked == [5, 6]
        assert images.tower.threads == {"engine"}
        assert len({id(span.rows) for request in seen for span in request.images if span.rows[0, 0] == 5}) == 1
        assert len({span.key for request in seen for span in request.images}) == 2
        assert one.json["usage"]["prompt_tokens"] == len(seen[0].ids)

    def test_a_stream(self):
        # red when a stream begins before its images are seen, or does without them
        (got,), (request,) = send(body(user(file()), stream=True))
        assert got.status == 200 and got.events[-1] == "[DONE]"
        assert looks(request) == [(5, 2)]

    def test_tokenize_counts_them(self):
        # red when a client that counts first is told less than what the prompt then has
        images = make_eyes()
        talk = {"messages": [user("a", file((300, 300)))], "reasoning_effort": "none"}
        (counted,), seen = send(talk, path="/tokenize", images=images)
        (_,), (request,) = send(body(*talk["messages"]))
        assert counted.json["tokens"] == list(request.ids)
        assert not images.tower.looked and not seen

    def test_what_is_counted(self):
        # red when operators cannot see images, or what they are spared
        images, made = make_eyes(), engine(answer=reply(ANSWER))

        async def scenario(app):
            for _ in range(2):
                await ask(app, CHAT, body(user(file(), part("data:,"))))
                await ask(app, CHAT, body(user(file(), file(colour=6))))
            return (await ask(app, "/metrics")).body.decode()

        told = run(made, scenario, seeing(), images=images)
        for line in (
            'images_total{outcome="read"} 6.0',
            'images_total{outcome="refused"} 2.0',
            "image_hits_total 2.0",
            "image_misses_total 2.0",
            "image_kept_bytes 64.0",
        ):
            assert f"kimi_jax_{line}\n" in told


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (
                "http://example.org/a.png",
                "http(s) URLs are not fetched here (Send the picture itself, as a data: URL.)",
            ),
            ("file:///etc/passwd", "its URL begins 'file:///etc/passwd'; data:image/...;base64,... works"),
            ("/etc/passwd", "its URL begins '/etc/passwd'"),
            ("data:image/png;base64,AAA", "wrong or cut off"),
            ("data:text/html;base64,AAAA", "declared as 'text/html'; types that work"),
            (url(file(), "jpeg"), "declared as 'image/jpeg', but its bytes are image/png"),
            (url(b""), "the file is empty"),
        ],
    )
    def test_urls(self, given, said):
        # red when a local file or another machine is asked, or what is wrong is told without its place
        (got,), seen = send(body(user("x", part(given))))
        assert (got.status, got.error["code"]) == (400, "invalid_image") and not seen
        assert f"messages[0].content[1]: {said}" in got.error["problems"][0] or said in got.error["problems"][0]
        assert got.error["problems"][0].startswith("messages[0].content[1]")

    def test_everything_at_once(self):
        # red when the first problem hides the others
        wrong = body(user(part("data:,"), file(), part(url(file()[:60]))), {"role": "clown"}, logit_bias={"x": 1})
        (got,), _ = send(wrong)
        told = got.error["problems"]
        assert [word for word in ("content[0]", "content[2]", "role 'clown'", "logit_bias") if word in " ".join(told)][
            3:
        ]

    def test_a_part_without_a_url(self):
        (got,), _ = send(body({"role": "user", "content": [{"type": "image_url"}]}))
        assert got.status == 400 and "is an image part whose URL is None" in got.error["message"]

    def test_more_than_may_be(self):
        # red when the number of images, or their bytes together, has no bound
        (got,), _ = send(body(user(*[file()] * 9)))
        assert "the messages have 9 images; up to 8 work" in got.error["message"]
        (got,), _ = send(body(user(*[file((28, 28), colour) for colour in range(8)])), images=make_eyes(room=20_000))
        assert got.status == 400 and "of the host as pixels and rows; up to 10.0 kB work" in got.error["message"]

    def test_a_prompt_that_is_too_long_is_not_looked_at(self):
        # red when the tower works for a prompt that cannot run
        images = make_eyes()
        (got,), _ = send(body(user(file((900, 900)))), images=images)
        assert (
            got.error["code"] == "context_length_exceeded"
            and f"holds {CAPACITY:,} of prompt and answer" in got.error["message"]
        )
        assert not images.tower.looked

    def test_a_model_that_reads_text_only(self):
        # red when an image is left out in silence
        made = engine()

        async def scenario(app):
            return await ask(app, CHAT, body(user("x", file())))

        got = run(made, scenario, served())
        assert got.status == 400 and not made.seen
        assert got.error["problems"] == [
            "messages[0].content[1] is an image, which this server cannot read: this model reads text only"
        ]

    def test_ids_that_stand_for_images(self):
        # red when ids of a completion can be places that nothing fills
        (got,), seen = send({"prompt": [5, PAD, PAD]}, path="/v1/completions")
        assert got.status == 400 and "has 2 places for rows of images" in got.error["message"] and not seen


class TestUnderWay:
    def test_others_go_on_while_pictures_are_read_and_too_many_are_told(self, monkeypatch):
        # red when the event loop decodes, or pictures pile up
        go, real = threading.Event(), reader_module.prepare
        monkeypatch.setattr(reader_module, "prepare", lambda *given: go.wait(20) and real(*given))

        async def scenario(app):
            reading = Call(app, CHAT, body(user(file())))
            await until(lambda: not images._reader._seats.acquire(blocking=False) or images._reader._seats.release())
            text = await ask(app, CHAT, body(user("text")))
            refused = await ask(app, CHAT, body(user(file(colour=6))))
            go.set()
            return text, refused, await reading.done()

        images = make_eyes(threads=1, waiting=0)
        text, refused, first = run(engine(answer=reply(ANSWER)), scenario, seeing(), images=images)
        assert (text.status, first.status, refused.status) == (200, 200, 503)
        assert (refused.error["code"], refused.headers["retry-after"]) == ("images_busy", "2")

    def test_a_client_that_leaves(self):
        # red when its pictures or rows stay, or its request runs without it
        images, made = make_eyes(), engine(answer=reply(ANSWER))
        images.tower.go.clear()

        async def scenario(app):
            call = Call(app, CHAT, body(user(file(), file(colour=6))))
            await until(lambda: images._turn.locked() and images.room.bytes)
            call.leave()
            await call.done()
            images.tower.go.set()
            await until(lambda: not images.room.bytes)
            return await ask(app, CHAT, body(user(file())))

        assert run(made, scenario, seeing(), images=images).status == 200
        assert len(made.seen) == 1

    @pytest.mark.slow
    def test_no_room(self):
        # red when pictures that wait for the tower have no bound, keep one another from being seen, or never give their room back
        images, made = make_eyes(room=600_000), engine(answer=reply(ANSWER), slots=8)
        images.tower.go.clear()

        async def scenario(app):
            crowd = [Call(app, CHAT, body(user(file((28, 28 * 100), colour)))) for colour in range(8)]
            await until(lambda: images._turn.locked() and sum(call.task.done() for call in crowd) >= 3)
            held = images.room.bytes
            images.tower.go.set()
            return held, [await call.done() for call in crowd], await ask(app, CHAT, body(user(file())))

        held, got, later = run(made, scenario, seeing(), images=images)
        assert held <= 600_000
        assert sorted(one.status for one in got)[:2] == [200, 200] and {one.status for one in got} == {200, 503}
        assert later.status == 200

    def test_rows_that_are_no_numbers(self):
        # red when the model is fed what is not finite, or the server ends of it
        images = make_eyes()
        images.tower.fill = np.nan
        (bad, good), seen = send(body(user(file())), body(user("text")), images=images)
        assert (bad.status, bad.error["code"], good.status) == (500, "answer_failed", 200)
        assert len(seen) == 1

    def test_pictures_go_when_they_have_been_seen(self):
        # red when the pixels of a picture stay as long as its answer takes
        images, made = make_eyes(), engine(answer=reply(ANSWER))
        made.hold.set()

        async def scenario(app):
            call = Call(app, CHAT, body(user(file((280, 280)))))
            await until(lambda: made.seen)
            await asyncio.sleep(0.02)
            held = images.room.bytes
            made.hold.clear()
            await call.done()
            return held

        assert run(made, scenario, seeing(), images=images) == 100 * 16
