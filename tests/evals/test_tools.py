"""``kimi-jax eval tools``: what is asked, and what each kind of wrong answer counts as."""

import json

import pytest

from kimi_jax.cli.main import main
from kimi_jax.evals.tool_cases import KINDS, kinds, made_cases
from kimi_jax.evals.tool_check import Verdict, judge, report
from kimi_jax.text.grammar import Grammars
from tests.evals.fake_server import FakeServer
from tests.text.data import TINY
from tests.text.walk import walk

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'kimi-jax[eval]'")


def example(schema, root):
    """A value that a schema of the cases admits."""
    if "$ref" in schema:
        return example(root["$defs"][schema["$ref"].split("/")[-1]], root)
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema["type"][0] if isinstance(schema["type"], list) else schema["type"]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(part, root) for name, part in properties.items()}
    if kind == "array":
        return [example(schema["items"], root)]
    text = "2026-12-24" if "pattern" in schema else "Grüß 'dich'"
    return {"string": text, "integer": schema.get("minimum"), "number": 2.5, "boolean": True}[kind]


def call(name, arguments, number=0):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text}}


def good(path, body):
    """The right call to each case."""
    choice = body.get("tool_choice")
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    name = choice["function"]["name"] if isinstance(choice, dict) else next(iter(tools))
    message = {"role": "assistant", "content": None, "tool_calls": [call(name, example(tools[name], tools[name]))]}
    if not body.get("stream"):
        return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    one = message["tool_calls"][0]
    text = one["function"]["arguments"]
    deltas = [{"role": "assistant"}, {"content": "Hm"}]
    deltas += [{"tool_calls": [{**one, "index": 0, "function": {"name": name, "arguments": ""}}]}]
    deltas += [
        {"tool_calls": [{"index": 0, "function": {"arguments": text[at : at + 5]}}]} for at in range(0, len(text), 5)
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}, {"choices": []}]


@pytest.fixture
def evaluate(capsys):
    """Runs the verb: (status, the JSON object, stderr, the server)."""

    def evaluate(answer, *words):
        with FakeServer(answer).running() as server:
            status = main(["eval", "tools", "--url", f"{server.url}/v1/", "--json", *map(str, words)])
        out, err = capsys.readouterr()
        return status, json.loads(out), err, server

    return evaluate


@pytest.mark.parametrize("words", [[], ["--stream"]])
def test_good_answers_are_without_fault(evaluate, words):
    status, found, _, server = evaluate(good, "--limit", 24, "--seed", 5, "--no-thinking", *words)
    assert (status, found["faults"], found["examples"]) == (0, {}, {})
    assert (found["requests"], found["calls"], found["without_fault"], found["valid_calls"]) == (24, 24, 1.0, 1.0)
    assert {kind: row["requests"] for kind, row in found["kinds"].items()} == dict.fromkeys(KINDS, 6)
    assert found["finish_reasons"] == {"tool_calls": 24}
    path, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["reasoning_effort"], body["max_tokens"]) == ("fake", "none", 4096)


def test_failures_are_a_fault_and_end_nothing(evaluate):
    seen = []

    def answer(path, body):
        seen.append(body)
        return {3: (500, {"error": {"message": "no"}}), 5: {"choices": []}}.get(len(seen)) or good(path, body)

    status, found, *_ = evaluate(answer, "--limit", 8, "--concurrency", 1)
    assert (status, found["requests"], found["without_fault"]) == (1, 8, 0.75)  # red when a failure ends the evaluation
    assert found["faults"] == {"request failed": 1, "malformed answer": 1}
    assert "HTTP 500: no" in found["examples"]["request failed"]


def test_a_table(capsys):
    with FakeServer(good).running() as server:
        assert main(["eval", "tools", "--url", server.url, "--limit", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["asked", "auto", "named", "required", "strict", "all", "finish"]
    assert lines[5].split() == ["all", "4", "100.0%", "100.0%", "4", "100.0%"]


TOOL = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 5}}, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("choice", "calls", "finish", "faults"),
    [
        (None, [call("f", {"n": 5})], "tool_calls", []),
        (None, [call("f", {"n": 5}, 1), call("g", {"n": 0}, 2)], "tool_calls", []),
        (None, [], "stop", []),
        (None, [], "length", []),
        ("required", [], "length", []),
        (None, [call("f", {"n": 5})], "length", []),
        ("required", [], "stop", ["no call"]),
        (NAMED, [], "stop", ["no call"]),
        (NAMED, [call("f", {"n": 5})], "tool_calls", ["another tool"]),
        ("none", [call("f", {"n": 5})], "tool_calls", ["call with tool_choice none"]),
        (None, [call("f", {"n": 6})], "tool_calls", ["schema"]),
        (None, [call("f", {})], "tool_calls", ["schema"]),
        (None, [call("f", [])], "tool_calls", ["schema"]),
        (None, [call("f", '{"n": 5')], "tool_calls", ["arguments are no JSON"]),
        (None, [call("f", "")], "tool_calls", ["arguments are no JSON"]),
        (None, [call("h", {"n": 5})], "tool_calls", ["unknown tool"]),
        (None, [call("f", {"n": 5}), call("f", {"n": 5})], "tool_calls", ["call id missing or twice"]),
        (None, [call("f", {"n": 5})], "stop", ["finish reason"]),
        (None, [], "tool_calls", ["finish reason"]),
        (None, [call("f", {"n": "5"}), call("h", "", 1)], "tool_calls", ["schema", "unknown tool"]),
    ],
)
def test_what_an_answer_is_worth(choice, calls, finish, faults):
    body = {"tools": TOOLS, **({"tool_choice": choice} if choice else {})}
    verdict = judge(body, "auto", {"tool_calls": calls} if calls else {}, finish)
    assert [name for name, _ in verdict.faults] == faults
    assert (verdict.calls, verdict.finish) == (len(calls), finish)


def test_rates():
    wrong = (("schema", "first"), ("schema", "second"), ("finish reason", "x"))
    found = report(
        [Verdict("auto", "stop"), Verdict("auto", "tool_calls", 3, wrong), Verdict("named", "tool_calls", 1)]
    )
    assert (found["without_fault"], found["with_calls"], found["calls"], found["valid_calls"]) == (
        0.6667,
        0.6667,
        4,
        0.5,
    )
    assert found["faults"] == {"schema": 1, "finish reason": 1}  # requests with it, not faults
    assert found["kinds"]["auto"]["valid_calls"] == 0.3333
    assert found["kinds"]["named"]["without_fault"] == 1.0
    assert report([])["without_fault"] is None


def test_cases_are_the_same_for_a_seed_and_have_valid_schemas():
    cases = made_cases(40, 1)
    assert cases == made_cases(40, 1) != made_cases(40, 2)
    assert list(kinds(cases)) == [*KINDS] * 10
    tools = {}
    for case in cases:
        names = [tool["function"]["name"] for tool in case["tools"]]
        assert len(set(names)) == len(names)
        tools |= dict(zip(names, case["tools"], strict=True))
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools.values()]
    grammar = Grammars(TINY).reply(thinking=True, tools=strict, tool_choice="required")
    assert walk(grammar, seed=1)  # red when a schema of ours cannot be enforced


def test_cases_from_a_file(evaluate, tmp_path):
    file = tmp_path / "cases.jsonl"
    cases = [{**case, "temperature": 2, "stream": True, "user": "u"} for case in made_cases(5, 3)]
    file.write_text("\n".join(map(json.dumps, cases)) + "\n\n")
    status, found, _, server = evaluate(good, "--cases", file, "--limit", 3, "--concurrency", 1)
    assert (status, found["requests"]) == (0, 3)
    bodies = [body for _, body in server.asked]
    assert [body["messages"] for body in bodies] == [case["messages"] for case in cases[:3]]
    assert {(body["temperature"], body["user"], "stream" in body) for body in bodies} == {(0.0, "u", False)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"messages": [], "tools": []}\n[]\n', "line 2 has no lists"),
        ('{"messages": []}', "line 1 has no lists"),
        ('{"messages": [], "tools": [{}]}', "line 1 has no lists of messages and of tools with names"),
        ("{", "line 1 is no JSON"),
        (None, "No such file"),
    ],
)
def test_files_that_hold_no_cases(capsys, tmp_path, content, said):
    file = tmp_path / "cases.jsonl"
    if content is not None:
        file.write_text(content)
    with FakeServer(good).running() as server:
        assert main(["eval", "tools", "--url", server.url, "--cases", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_case_whose_schema_is_none(evaluate, tmp_path):
    file = tmp_path / "cases.jsonl"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"required": "n"}}}]
    file.write_text(json.dumps({"messages": [], "tools": tools}))
    message = {"tool_calls": [call("f", {})]}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    assert evaluate(lambda path, body: answer, "--cases", file)[1]["faults"] == {"the case has no valid schema": 1}
