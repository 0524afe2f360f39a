"""The generators: the same everywhere, split in two without overlap, and right."""

import hashlib
import json
import re
from dataclasses import replace

import pytest

from kimi_jax.text.images import image_parts
from kimi_jax.train.data.check import faults
from kimi_jax.train.data.encode import conversation
from kimi_jax.train.data.example import SPLITS
from kimi_jax.train.data.score import CALLS, Given, GivenCall, reference, score, scores
from kimi_jax.train.data.tasks import DEFAULT_MODE, MODES, PICTURES, TASKS, TaskError, example, examples, mixture
from kimi_jax.train.data.working import SIGNS, worked, wrong_equations, wrong_working

NAMES = (*TASKS, "needle:300")


def shown(one):
    """Everything of an example that a model could see."""
    text = "".join(segment.text for segment in conversation(one))
    return text.encode() + b"".join(image.tobytes() for image in one.images)


def test_examples_are_the_same_everywhere():
    digest = hashlib.sha256(
        b"".join(shown(example(name, split, 1, at)) for name in NAMES for split in SPLITS for at in range(8))
    )
    # Red when a word, a template or the order of draws changes: weights trained on the old ones would be scored on others.
    assert digest.hexdigest() == "990a655b05962d631c75647c9c23f5b5dff9d75c54bf32c9298807bd106b4f4b"


def test_a_mixture_is_a_function_of_seed_and_index():
    stream = mixture(seed=3)
    ahead = [shown(stream(at)) for at in range(20)]
    assert [shown(stream(at)) for at in reversed(range(20))] == ahead[::-1]  # red when a draw depends on those before
    assert [shown(mixture(seed=4)(at)) for at in range(20)] != ahead
    assert {stream(at).task for at in range(300)} == set(TASKS)  # red when a weight is lost


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_right_and_no_prompt_is_in_both_halves(name):
    prompts = {split: set() for split in SPLITS}
    for split in SPLITS:
        for at in range(60):
            one = example(name, split, 2, at)
            assert faults(one) == []  # red with a wrong carry in `working`, or a schema that its arguments do not fit
            asked = json.dumps([[message["content"] for message in one.prompt], one.tools])
            prompts[split].add(asked.encode() + b"".join(image.tobytes() for image in one.images))
            assert len(image_parts(one.messages, bare=True)) == len(one.images)
            assert bool(one.images) == (name in PICTURES)
    assert not prompts["train"] & prompts["held-out"]  # red when `template` draws for both halves from all


def test_held_out_templates_use_known_words():
    def words(split, seed):
        contents = [
            message["content"]
            for name in TASKS
            for at in range(200)
            for message in example(name, split, seed, at).prompt
        ]
        texts = [content if isinstance(content, str) else content[-1]["text"] for content in contents]
        return {word for text in texts for word in re.findall("[A-Za-z]+", text)}

    known = words("train", 5)
    strange = words("held-out", 5) - known
    # Red when a held-out template brings words of its own, which no training has given a meaning.
    assert {word for word in strange if not known & {f"{word}s", f"{word}es"}} == set()


def test_modes_are_drawn_as_often_as_they_say():
    drawn = [(one.thinking, one.effort) for one in (example("sum", "train", 0, at) for at in range(1500))]
    for mode, share in MODES:
        assert drawn.count(mode) / len(drawn) == pytest.approx(share, abs=0.04)
    assert DEFAULT_MODE in dict(MODES)
    thoughts = [
        example("three-step", "train", 0, 1, (True, effort)).reply["reasoning_content"] for effort in ("low", "max")
    ]
    assert 0 < len(thoughts[0]) < len(thoughts[1])  # red when effort changes nothing
    plain = example("two-step", "train", 0, 1, (False, None)).reply["content"]
    assert plain.count("=") >= 2  # without thoughts, the working is in the answer


@pytest.mark.parametrize("name", [*TASKS, "needle:300"])
def test_planted_errors_are_found(name):
    one = example(name, "train", 7, 0, DEFAULT_MODE)
    wrong = "I have 987654 wrong words."
    assert faults(replace(one, messages=(*one.prompt, {**one.reply, "content": wrong, "tool_calls": []})))
    assert score(one, Given(wrong)) == 0.0  # red when a scorer looks for nothing
    other = next(o for o in examples(name, "train", 8, DEFAULT_MODE) if o.answer != one.answer)
    assert score(one, reference(other)) == 0.0
    if name not in ("call", "parallel-calls", "word", "number", "talk", "chat", "no-call"):
        told = replace(one, answer="987654", messages=(*one.prompt, {**one.reply, "content": "987654"}))
        assert score(told, reference(told)) == 1.0
        assert faults(told)  # red when nothing is computed again


@pytest.mark.parametrize("sign", SIGNS)
def test_working_is_found_wrong_where_it_is(sign):
    for left in range(1, 130):
        for right in (1, 2, 7, 9, 40 if sign in "+-" else 3):
            if (sign == "-" and right > left) or (sign == "/" and left % right):
                continue
            text = worked(left, sign, right)
            assert wrong_equations(text) == wrong_working(text) == []  # red with a carry or a borrowed one that is lost
            step = text.rpartition("=")[2].partition(",")[0].split()[0]  # the result of the last step
            assert wrong_equations(
                text.replace(f"={step}", f"={int(step) + 1}")
            )  # red with a checker that reads no equation
    lost = {"+": "47+38: 7+8=15, 4+3=7, so 85", "-": "83-47: 13-7=6, 8-4=4, so 36", "*": "37*4: 7*4=28, 3*4=12, so 148",
            "/": "84/6: 8/6=1 rest 2, 4/4=1, so 14"}[sign]  # fmt: skip
    assert wrong_working(lost) == [lost] and wrong_equations(lost) == []


def test_calls_are_scored_by_schema_and_by_value():
    one = next(
        o for o in examples("call", "held-out", 0) if any(isinstance(v, int) for v in o.answer[0]["arguments"].values())
    )
    name, arguments = one.answer[0]["name"], one.answer[0]["arguments"]
    other = {key: value + 1 if type(value) is int else value for key, value in arguments.items()}
    cases = [
        (name, json.dumps(arguments), True, True),
        (name, json.dumps(other), False, True),
        (name, json.dumps({**arguments, "stray": 1}), False, False),  # red when additionalProperties is not read
        (name, "{", False, False),
        ("nobody", json.dumps(arguments), False, False),
    ]
    for called, text, right, valid in cases:
        found = scores(one, Given("", (GivenCall(called, text),)))
        assert (found.right or not right, found.valid) == (True, valid), (called, text)
    assert scores(one, Given("no")).valid is None
    assert one.task in CALLS


def test_schemas_are_read_as_jsonschema_reads_them():
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'kimi-jax[eval]'")
    from kimi_jax.train.data.schema import misfits

    odd = (None, True, 1, 2.0, 1.5, "x", [], ["x"], [1], {}, {"x": 1, "y": 2}, {"x": 1, "y": "2"})
    seen = 0
    for at in range(60):
        one = example("parallel-calls", "train", 9, at)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in one.tools}
        for call in one.answer:
            schema = schemas[call["name"]]
            tries = [{**call["arguments"], key: value} for key in schema["properties"] for value in odd]
            tries += [{k: v for k, v in call["arguments"].items() if k != key} for key in schema["properties"]]
            for arguments in tries:
                strict = jsonschema.Draft202012Validator(schema).is_valid(arguments)
                assert strict == (not list(misfits(schema, arguments))), (
                    schema,
                    arguments,
                )  # red without the type of a bool
                seen += not strict
    assert seen > 500


def test_what_does_not_exist_is_refused_by_name():
    with pytest.raises(TaskError, match='did you mean "needle"'):
        example("needel", "train", 0, 0)
    with pytest.raises(TaskError, match="needle:1000"):
        example("sort:50", "train", 0, 0)
    with pytest.raises(TaskError, match="2 problems"):
        mixture({"sort": 0.0, "nothing": 1.0})
    with pytest.raises(TaskError, match="held-out"):
        example("sort", "test", 0, 0)
