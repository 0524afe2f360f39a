"""Bytes that a step reads and writes: small programs by hand, in the form that the compiler prints."""

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.placement.flow import updated_in_place
from kimi_jax.placement.hlo import Program, parse
from kimi_jax.placement.moved import Expected, Touch, moved

WEIGHT = 1024 * 1024 * 2
ROW = 1024 * 2

FUSIONS = """
%pick (table: bf16[4096,1024], id: s32[2]) -> bf16[2,1024] {
  %table = bf16[4096,1024]{1,0} parameter(0)
  %id = s32[2]{0} parameter(1)
  %flat = bf16[4096,1024]{1,0} bitcast(%table)
  ROOT %rows = bf16[2,1024]{1,0} gather(%flat, %id), offset_dims={1}
}

%put (log: f32[64,8], new: f32[1,8], at: s32[]) -> f32[64,8] {
  %log = f32[64,8]{1,0} parameter(0)
  %new = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put.1 = f32[64,8]{1,0} dynamic-update-slice(%log, %new, %at, %zero.1)
}
"""

CARRIED = "(s32[2]{0}, bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}, bf16[1,512,1024]{2,1,0}, f32[256,1024]{1,0}, f32[64,8]{1,0})"
"""Ids, weight, table, latents, state and a log of results."""

PROGRAM = """HloModule jit_body, is_scheduled=true, entry_computation_layout={()->()}
FUSIONS
%until (carried.1: (s32[], bf16[1024,1024])) -> pred[] {
  %carried.1 = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%body (carried: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %carried = CARRIED parameter(0)
  %ids = s32[2]{0} get-tuple-element(%carried), index=0
  %weight = bf16[1024,1024]{1,0} get-tuple-element(%carried), index=1
  %table.1 = bf16[4096,1024]{1,0} get-tuple-element(%carried), index=2
  %latent = bf16[1,512,1024]{2,1,0} get-tuple-element(%carried), index=3
  %state = f32[256,1024]{1,0} get-tuple-element(%carried), index=4
  %log.1 = f32[64,8]{1,0} get-tuple-element(%carried), index=5
  %x = bf16[2,1024]{1,0} fusion(%table.1, %ids), kind=kLoop, calls=%pick
  %y = bf16[2,1024]{1,0} custom-call(%x, %weight), KERNEL
BETWEEN
  %sum-start = bf16[2,1024]{1,0} all-reduce-start(%y), replica_groups={{0,1}}, to_apply=%add
  %sum-done = bf16[2,1024]{1,0} all-reduce-done(%sum-start)
  %held = bf16[1,512,1024]{2,1,0} custom-call(%latent, %sum-done), KERNEL, output_to_operand_aliasing={{}: (0, {})}, api=4
  %z = (f32[8]{0}, f32[256,1024]{1,0}) custom-call(%held, %state), KERNEL, output_to_operand_aliasing={{1}: (1, {})}, api=4
  %new.1 = f32[8]{0} get-tuple-element(%z), index=0
  %state.1 = f32[256,1024]{1,0} get-tuple-element(%z), index=1
  %row = f32[1,8]{1,0} bitcast(%new.1)
  %i = s32[] constant(3)
  %logged = f32[64,8]{1,0} fusion(%log.1, %row, %i), kind=kLoop, calls=%put
  ROOT %out = CARRIED tuple(%ids, %weight, %table.1, %held, %state.1, %logged)
}

ENTRY %main (p0: bf16[1024,1024], p1: bf16[4096,1024], p2: bf16[1,512,1024], p3: f32[256,1024]) -> f32[256,1024] {
  %p0 = bf16[1024,1024]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %p1 = bf16[4096,1024]{1,0} parameter(1), metadata={op_name="params[\\'table\\']"}
  %p2 = bf16[1,512,1024]{2,1,0} parameter(2), metadata={op_name="cache[0].latent"}
  %p3 = f32[256,1024]{1,0} parameter(3), metadata={op_name="cache[1].state"}
  %once = bf16[1024,1024]{1,0} copy(%p0)
  %first = s32[2]{0} constant({0, 1})
  %none = f32[64,8]{1,0} broadcast(%first)
  %start = CARRIED tuple(%first, %p0, %p1, %p2, %p3, %none)
  %loop = CARRIED while(%start), condition=%until, body=%body
  ROOT %result = f32[256,1024]{1,0} get-tuple-element(%loop), index=4
}
"""

X, LATENT, STATE = 2 * ROW, 512 * ROW, 256 * 1024 * 4

LEAST = WEIGHT + X + (ROW + LATENT) + 2 * STATE
"""The weight, two rows of the table, a row written and all read of the latents, the state read and written."""

TEMPS = 8 + 6 * X + 3 * 32 + 4
"""The ids read; x, y and their sum written and read; eight numbers written, read and put into the log at a place."""

KNOWN = {"cache[0].latent": Touch(updated=ROW)}
AGAIN = """
  %again = bf16[2,1024]{1,0} custom-call(%x, %weight), KERNEL
  %both = bf16[2,1024]{1,0} add(%y, %again)
"""
WIDENED = """
  %wide = f32[1024,1024]{1,0} convert(%weight)
  %used = bf16[2,1024]{1,0} custom-call(%x, %wide), KERNEL
"""


def read(between: str = "") -> Program:
    text = PROGRAM.replace("FUSIONS", FUSIONS).replace("BETWEEN", between)
    return parse(text.replace("CARRIED", CARRIED).replace("KERNEL", 'custom_call_target="__gpu$xla.gpu.triton"'))


def count(between: str = "", **touches: Touch):
    known = KNOWN | {f"params['{name}']": touch for name, touch in touches.items()}
    program = read(between)
    expected = Expected(LEAST, lambda name: known.get(name, Touch()))
    return moved(program, expected, lambda instruction: "sum" if "reduce" in instruction.opcode else "rest", 1)


def test_a_step_that_reads_everything_once():
    # Red when what happens once per call counts, picked rows count as their whole table, a latent row as its whole cache,
    # a state that is updated as read only, or both halves of an asynchronous pair.
    found = count()
    assert (found.arguments, found.temps) == (LEAST, TEMPS)
    assert found.ratio == 1 + TEMPS / LEAST
    assert (found.again, found.loops) == ((), 0)
    assert dict(found.parts) == {"rest": LEAST + TEMPS - 2 * X, "sum": 2 * X}


def test_a_weight_read_twice_counts_twice_and_is_named():
    # Red when the bytes of an argument are counted by argument instead of by reader.
    found = count(AGAIN)
    assert found.arguments == LEAST + WEIGHT
    assert found.temps == TEMPS + 5 * X  # x read and `again` written; y and `again` read, their sum written
    (again,) = found.again
    assert (again.argument, again.bytes, again.instructions) == ("params['w']", WEIGHT, ("y", "again"))


def test_a_weight_that_is_widened_first_moves_five_times_more():
    # Red when temporary arrays are left out: the widened copy is written and read beside the weight's second reading.
    found = count(WIDENED)
    assert found.arguments == LEAST + WEIGHT
    assert found.temps == TEMPS + 4 * WEIGHT + 2 * X


def test_of_experts_only_the_touched_share_counts():
    # Red when the share is not applied, or also to what is picked by the compiler's own slices.
    found = count(w=Touch(read=1 / 8), table=Touch(read=1 / 8))
    assert found.arguments == LEAST - WEIGHT * 7 / 8


def test_a_program_without_a_loop_is_one_step():
    # Red when the depth is not asked: a prefill chunk's instructions lie in the entry.
    program = read()
    found = moved(program, Expected(LEAST, lambda name: KNOWN.get(name, Touch())), lambda instruction: "", 0)
    assert found.arguments == LEAST + WEIGHT
    assert found.loops == 1  # red when nobody is told that the body of a loop counts once


@pytest.mark.parametrize(("name", "updated"), [("held", {0: "latent"}), ("z", {1: "state"}), ("logged", {0: "log.1"})])
def test_updates_in_place(name, updated):
    # Red when the number of a result or of an operand is read wrongly, or a fusion's update is not seen.
    program = read()
    found = next(each for each in program.instructions if each.name == name)
    assert updated_in_place(program, found) == updated


def test_every_branch_of_a_choice_counts():
    # red when what a condition guards is left out, or the choice itself reads all that its branches are given
    def step(few, cache):
        return jax.lax.cond(few, lambda: cache[:4].sum(), lambda: jnp.sort(cache[-8:])[0])

    text = jax.jit(step).lower(True, jnp.zeros(1 << 20)).compile().as_text()
    found = moved(parse(text), Expected(1.0, lambda _: Touch()), lambda _: "", depth=0)
    assert 4 * (4 + 8) <= found.bytes < 1000
