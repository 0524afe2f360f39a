"""Reading a compiled program's text: a small one by hand, in the form that the compiler prints."""

import pytest

from kimi_jax.placement.audit import audit
from kimi_jax.placement.flow import arguments, reads
from kimi_jax.placement.hlo import Frame, elements, parse, shape_bytes

LOOP = """HloModule jit_body, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, entry_computation_layout={()->()}

FileNames
1 "layers/kda.py"

FunctionNames
1 "Kda.__call__"
2 "Parallel.psum"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%product (param_0: bf16[1024,1024], param_1: bf16[1024]) -> f32[1024] {
  %param_0 = bf16[1024,1024]{1,0} parameter(0)
  %param_1 = bf16[1024]{0} parameter(1)
  %wide = f32[1024,1024]{1,0} convert(%param_0)
  ROOT %reduce.1 = f32[1024]{0} reduce(%wide, %param_1), dimensions={1}, to_apply=%add
}

%widen (param_0.1: bf16[1024,1024]) -> f32[1024,1024] {
  %param_0.1 = bf16[1024,1024]{1,0} parameter(0)
  ROOT %convert.1 = f32[1024,1024]{1,0} convert(%param_0.1)
}

%body (carried: (s32[], bf16[1024,1024], bf16[512,1024])) -> (s32[], bf16[1024,1024], bf16[512,1024]) {
  %carried = (s32[], bf16[1024,1024]{1,0}, /*index=2*/bf16[512,1024]{1,0}) parameter(0)
  %weight = bf16[1024,1024]{1,0} get-tuple-element(%carried), index=1
  %x = bf16[1024]{0} constant({...})
  %y = f32[1024]{0} fusion(%weight, %x), kind=kInput, calls=%product, metadata={op_name="dot_general" stack_frame_id=1}
  %wider = f32[1024,1024]{1,0} fusion(%weight), kind=kLoop, calls=%widen, metadata={op_name="convert" stack_frame_id=1}
  %sum-start = f32[1024]{0} all-reduce-start(%y), replica_groups={{0,1,2,3}}, to_apply=%add, metadata={stack_frame_id=2}
  %sum-done = f32[1024]{0} all-reduce-done(%sum-start), metadata={stack_frame_id=2}
  %gather = (s32[1,6]{1,0}, s32[8,6]{1,0}) all-gather-start(%sum-done), replica_groups=[1,8]<=[8], dimensions={0}
  %pair = f32[64]{0} all-reduce(%y), replica_groups=mesh['tensor'=4,'expert'=2] {'expert'}, to_apply=%add
  %cache = bf16[512,1024]{1,0} get-tuple-element(%carried), index=2
  %copy.1 = bf16[512,1024]{1,0} copy(%cache)
  %big = bf16[1024,1024]{1,0} copy(%cache)
  %i = s32[] get-tuple-element(%carried), index=0
  ROOT %out = (s32[], bf16[1024,1024]{1,0}, bf16[512,1024]{1,0}) tuple(%i, %weight, %copy.1)
}

ENTRY %main (p0: bf16[1024,1024], p1: bf16[512,1024]) -> bf16[512,1024] {
  %p0 = bf16[1024,1024]{1,0} parameter(0), sharding={replicated}, metadata={op_name="params[\\'w\\']"}
  %p1 = bf16[512,1024]{1,0} parameter(1), metadata={op_name="cache[0]"}
  %zero = s32[] constant(0)
  %start = (s32[], bf16[1024,1024]{1,0}, bf16[512,1024]{1,0}) tuple(%zero, %p0, %p1)
  %loop = (s32[], bf16[1024,1024]{1,0}, bf16[512,1024]{1,0}) while(%start), condition=%until, body=%body
  ROOT %result = bf16[512,1024]{1,0} get-tuple-element(%loop), index=2
}
"""

THUNKS = """000: kWhile [source | sink]
condition:
    001: kCustomKernel [source | sink] until grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        002: kCustomKernel [source | sink] y grid: [1, 1, 1]
        003: kWhile [source | sink]
          body:
            004: kCopy [source | sink] kCopy
            005: kAllReduce [source | sink] kAllReduce
006: kCopy [source | sink] kCopy
"""


class Memory:
    argument_size_in_bytes = output_size_in_bytes = alias_size_in_bytes = temp_size_in_bytes = 0


def label(frames: tuple[Frame, ...]) -> str:
    return "kda" if any(frame.function.startswith("Kda.") for frame in frames) else ""


@pytest.fixture(scope="module")
def program():
    return parse(LOOP)


@pytest.fixture(scope="module")
def found(program):
    return audit(program, Memory, label, THUNKS, loops_over_steps=True)


def test_sizes_of_shapes():
    # Red when a tuple counts only its first array, or a packed dtype counts a byte a value.
    assert shape_bytes("(s32[1,6]{1,0}, bf16[2,3]{1,0}, pred[5]{0}, u4[8]{0}, f8e4m3fn[7]{0})") == 24 + 12 + 5 + 4 + 7
    assert elements("(s32[], f32[2]{0})") == [4, 8]


def test_arguments_have_their_names_and_aliases(program, found):
    # Red when the escaped quotes of a name stay.
    assert [(a.name, a.bytes) for a in arguments(program)] == [("params['w']", 2 << 20), ("cache[0]", 1 << 20)]
    assert found.aliased == ("cache[0]",)


def test_a_stack_ends_at_the_outermost_call(program):
    # Red when the caller's number is not lowered by one.
    start = next(i for i in program.instructions if i.name == "sum-start")
    assert [frame.function for frame in program.stack(start)] == ["Parallel.psum", "Kda.__call__"]


def test_arguments_are_followed_into_loops(program):
    # Red when get-tuple-element does not hand on what the loop was started with.
    assert [(read.argument.name, read.instruction.name) for read in reads(program, 2 << 20)] == [
        ("params['w']", "y"),
        ("params['w']", "wider"),
    ]


def test_only_what_is_no_product_is_a_weight_reader(found):
    # Red when a product with one row counts, or a donated cache does.
    assert [(r.argument, r.instruction, r.writes, r.part) for r in found.readers] == [
        ("params['w']", "wider", 4 << 20, "kda")
    ]


def test_collectives_by_kind_size_part_and_participants(found):
    # Red when both halves of a pair count, the input of a gather counts as its result, or a form of groups is not read.
    assert [(c.kind, c.bytes, c.participants, c.part) for c in found.collectives] == [
        ("all-reduce", 4096, 4, "kda"),
        ("all-gather", 192, 8, "kda"),
        ("all-reduce", 256, 2, "kda"),
    ]


def test_copies_above_one_mebibyte(found):
    # Red when a copy of exactly 1 MiB counts.
    assert [(copy.instruction, copy.bytes) for copy in found.copies] == [("big", 2 << 20)]


def test_launches_by_depth(found):
    # Red when the copy after the loop counts as part of it, or a command buffer as a launch.
    launches = found.launches
    assert (launches.step, launches.inner, launches.outside) == (2, 2, 1)
    assert dict(launches.kinds) == {"kAllReduce": 1, "kCopy": 1, "kCustomKernel": 2}


def test_text_of_something_else_is_refused():
    # Red when a text without an entry gives an empty program.
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule nothing")
