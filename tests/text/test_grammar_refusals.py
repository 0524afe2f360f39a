"""Forms that cannot be enforced: each is refused in time, and the message names the place."""

import re
import threading
import time

import pytest

from kimi_jax.text.errors import ChatError
from kimi_jax.text.grammar import MAX_TOOLS, GrammarError, Grammars
from kimi_jax.text.grammar_schema import MAX_BYTES, MAX_DEPTH, MAX_NESTING
from tests.text.data import TINY
from tests.text.forms import LOOSE, record, tool


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TINY)


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def steps(count):
    """Definitions of which each refers to the next: followed by recursion, thousands would end the process."""
    return {
        **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}]} for n in range(count)},
        f"a{count}": {"type": "string"},
    }


def chain(keyword, last):
    """References that double at each of 30 steps."""
    steps = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)}
    return {"$ref": "#/$defs/a0", "$defs": {**steps, "a30": last}}


class TestRefusals:
    @pytest.mark.parametrize(
        ("schema", "said"),
        [
            ({"type": "strin"}, "Invalid type: strin"),
            ({"not": {}}, 'Unimplemented keys: ["not"]'),
            ({"$ref": "#/$defs/none"}, "does not exist"),
            # red when such a form is taken: its answer would fail with status 500
            ({"$ref": "#"}, "$ref '#' leads back to itself"),
            (
                record({"a": {"$ref": "#/$defs/b"}}, **{"$defs": {"b": {"allOf": [{"$ref": "#/$defs/b"}]}}}),
                "leads back to itself",
            ),
            ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
            ({"type": "string", "pattern": "("}, "regex parse error"),
            ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
            ({"description": "x" * MAX_BYTES}, f"up to {MAX_BYTES:,} work"),
            (deep(MAX_DEPTH), f"up to {MAX_DEPTH} work"),
            (deep(5000), "nested deeper than 200"),
            ({"enum": [{1: 2}]}, "the key 1 is not a string"),
            ({"enum": ["\ud800"]}, "U+D800"),
            ({"minimum": float("nan")}, "finite"),
            ({"$ref": "#/$defs/a0", "$defs": steps(400)}, f"nest up to 1,206 deep; up to {MAX_NESTING:,} work"),
            # red for ever, and all of the memory, without a limit of what must hold together
            ({"allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(30)]}, "30 patterns and formats are given; up to 6"),
            (
                {"allOf": [record({"a": {"pattern": f".*a.{{{n}}}"}}) for n in range(30)]},
                "30 schemas must hold for one value",
            ),
            (
                {
                    "$ref": "#/$defs/p0",
                    "$defs": {f"p{n}": {"pattern": f".*a.{{{n}}}", "$ref": f"#/$defs/p{n + 1}"} for n in range(30)}
                    | {"p30": {"type": "string"}},
                },
                "31 schemas must hold for one value",
            ),
            (
                record(
                    {"a": {"allOf": [{"pattern": "a"}, {"pattern": "b"}, {"pattern": "c"}]}},
                    allOf=[
                        record(
                            {"a": {"allOf": [{"format": "date"}, {"pattern": "d"}, {"pattern": "e"}, {"pattern": "f"}]}}
                        )
                    ],
                ),
                "8 schemas must hold for one value (allOf, $ref) and 7 patterns",
            ),
            ({"patternProperties": {f"^k{n}_": {} for n in range(65)}}, "65 patternProperties; up to 64 work"),
        ],
    )
    def test_answer_schemas(self, grammars, schema, said):
        with pytest.raises(GrammarError, match=re.escape(said)) as refused:
            grammars.reply(thinking=True, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        assert "response_format.json_schema: " in str(refused.value)
        assert len(str(refused.value)) < 500

    @pytest.mark.parametrize(
        ("parameters", "said"),
        [
            ([], "a schema is an object, not list"),
            ({"type": "string"}, "the parameters of a strict tool are an object"),
            (record({"a": {"type": "string", "not": {}}}), "property 'a': 'not' of a string"),
            (record({"a": {"type": "string", "format": "hostname"}}), "format 'hostname' of a string is not enforced"),
            (record({"a": {"type": "string", "pattern": "(?=x)"}}), "property 'a': invalid regex"),
            (record({"a": {"type": "string", "minLength": "1"}}), "minLength is '1'"),
            (record({"a": {"$ref": "#/$defs/b"}}), "'#/$defs/b' names nothing in the schema"),
            (record({"a": {"$ref": "x.json"}}), "leads out of the schema"),
            (
                record({"a": {"type": "array", "uniqueItems": True}}),
                "property 'a': Unimplemented keys: [\"uniqueItems\"]",
            ),
            (record({"a": False}), "property 'a': no value satisfies it"),
            (record({"a": {"type": "string", "format": []}}), "format of type list of a string is not enforced"),
            (record({"a": {"$ref": "#b"}}), "$ref '#b' is no path"),
            (record({"\ud800": {}}), "U+D800"),
            (record({"a": {"$ref": "#/$defs/a0"}}, **{"$defs": steps(330)}), "references lead too far"),
            (record({"a": 5}), "no schema"),
            (record({}, minProperties=1, anyOf=[]), "minProperties cannot be enforced on the parameters"),
            (record({f"p{n}": {} for n in range(65)}), "65 properties; up to 64"),
            ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself"),
            ({"properties": {"a": {"type": "string", "$ref": "#/properties/a"}}}, "leads back to itself"),
            (
                record({"a": chain("anyOf", {"type": "string"})}, **{"$defs": chain("anyOf", {})["$defs"]}),
                "more than 512",
            ),
            (record({"a": {"type": "string", "minLength": 1 << 19, "pattern": "a.*b"}}), "the grammar is too large"),
        ],
    )
    def test_parameters(self, grammars, parameters, said):
        start = time.process_time()
        with pytest.raises(GrammarError, match=re.escape(said)) as refused:
            grammars.reply(thinking=True, tools=[tool("f", parameters)])
        assert "tool 'f'" in str(refused.value) or "too large" in said
        assert len(str(refused.value)) < 700
        assert time.process_time() - start < 3  # 0.1 s; red for ever when references are followed again and again

    def test_many_patterns_that_do_not_meet(self, grammars):
        parts = {f"P{n}": record({"id": {"format": "uuid"}, "code": {"pattern": f"^x{n}"}}) for n in range(9)}
        named = {f"p{n}": {"description": "...", "allOf": [{"$ref": f"#/$defs/P{n}"}]} for n in range(9)}
        forms = {"anyOf": [{"pattern": f"^{n}"} for n in range(9)]}
        schema = record({**named, "form": forms, "own": {"allOf": [{"pattern": "a"}, forms]}}, **{"$defs": parts})
        wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert grammars.reply(thinking=True, response_format=wanted)  # red when all patterns of a schema are counted

    @pytest.mark.parametrize("levels", [330])
    def test_a_schema_near_the_limit_of_nesting(self, grammars, levels):
        parts = {f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(levels)}
        schema = {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{levels}": {"type": "string"}}}
        wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        done = []
        before = threading.stack_size(256 << 10)  # red (the process ends) when the compiler runs on the caller's stack
        try:
            thread = threading.Thread(target=lambda: done.append(grammars.reply(thinking=True, response_format=wanted)))
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        assert len(done) == 1
        assert threading.stack_size() == before

    def test_all_problems_at_once(self, grammars):
        bad = record({"a": {"type": "string", "not": {}}, "b": {"$ref": "x.json"}})
        with pytest.raises(GrammarError, match="4 problems"):
            grammars.reply(thinking=True, tools=[tool("f", bad), tool("g", bad)])

    def test_tools_and_choices(self, grammars):
        for tools, choice, said in (
            ([{"type": "function"}], "required", "tools[0].function.name is None"),
            ([tool("f"), tool("f")], "auto", "tools[1] is called 'f' like another"),
            ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], "required", f"up to {MAX_TOOLS} work"),
            ([tool("f")], "must", "tool_choice is 'must'"),
            (None, "required", "the request has no tools"),
        ):
            with pytest.raises(ChatError, match=re.escape(said)):
                grammars.reply(thinking=True, tools=tools, tool_choice=choice)
        with pytest.raises(GrammarError, match="one of them works"):
            grammars.reply(
                thinking=True, tools=[LOOSE], tool_choice="required", response_format={"type": "json_object"}
            )
