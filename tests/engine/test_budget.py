"""Pages from bytes: what an engine is told to hold must be what its arrays take."""

import dataclasses

import pytest

from kimi_jax.config import load_config
from kimi_jax.draft.published import named_draft
from kimi_jax.draft.steps import DraftedSteps, with_draft_axes
from kimi_jax.engine import budget
from kimi_jax.engine.limits import LimitsError, check_limits
from kimi_jax.loop import Steps
from kimi_jax.placement.device import load_device
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import abstract_mesh
from kimi_jax.planning.plan import plan
from kimi_jax.precision import LATENTS, choose_precision
from kimi_jax.vision_steps import VisionSteps, call_bytes
from tests.parity import quick

GIB = 1 << 30


def steps(layout: str = "dp2-tp4", capacity: int = 96, dtype: str = "bfloat16", device: str = "mi355x", config=None):
    placed, chosen = load_layout(layout), load_device(device)
    precision = choose_precision(dtype, None, chosen.platform, None)
    mesh = abstract_mesh(placed, chosen)
    return Steps(config or load_config(quick.folder()), placed, mesh, precision, capacity)


def k3(capacity: int = 1 << 18):
    made = steps("tp8", capacity, config=load_config("k3"))
    return dataclasses.replace(made, precision=choose_precision("bfloat16", "fp8", "rocm", None))


class TestK3:
    """On the published node, where the planner says the same from its own tables."""

    def test_the_parts_are_those_of_the_plan(self):
        one = budget.costs(k3(), page=64, chunk=8192)
        found = plan("k3", "tp8", "mi355x", context=8192, prefill_chunk=8192).sizes
        assert one.weights == found.weight_bytes
        assert one.page * 128 == found.state["latent"].per_device
        states = found.state["kda_state"].per_device + found.state["kda_conv"].per_device
        assert one.checkpoint == states
        counts = 5 * load_config("k3").vocab // 8  # a bool and an int32 for every id of this device
        assert one.slot == states + counts
        assert one.scratch == found.state["attn_res"].per_device

    def test_a_tower_takes_its_part(self):
        # red when pages are dealt where the tower lies, or works
        made = k3()
        vision = made.config.vision
        tower = VisionSteps(vision, made.layout, made.mesh, made.precision)
        one, seeing = (budget.costs(made, 64, 8192, given) for given in (None, tower))
        with_vision = plan("k3", "tp8", "mi355x", context=8192, prefill_chunk=8192, vision="replicated").sizes
        assert seeing.weights == with_vision.weight_bytes
        assert seeing.scratch == call_bytes(vision, made.layout, 67_584) > one.scratch
        asked = {"device_bytes": load_device("mi355x").hbm_bytes, "share": 0.93}
        assert budget.engine_limits(made, **asked, tower=tower).pages < budget.engine_limits(made, **asked).pages

    @pytest.mark.parametrize(("name", "token"), [("k3-mla", 5 * 576), ("k3.1-gqa", 20_480 // 8)])
    def test_a_draft_takes_its_part(self, name, token):
        # red when pages are dealt where the draft's weights lie, or hold no rows of its context (DSpark notes, section 6)
        made, spec = k3(), named_draft(name)
        own = {field.name: getattr(made, field.name) for field in dataclasses.fields(Steps)}
        own["layout"] = with_draft_axes(made.layout, spec)
        drafted = DraftedSteps(**own, drafter=spec)
        one, alone = budget.costs(drafted, 64, 8192), budget.costs(made, 64, 8192)
        assert one.page - alone.page == 64 * token
        assert (
            1 << 30 < one.weights - alone.weights < 2 << 30
        )  # heads and MLPs over 8 devices, projections and tables whole
        assert one.scratch - alone.scratch == 8192 * len(spec.taps) * 7168 * 2
        assert (one.slot, one.checkpoint) == (alone.slot, alone.checkpoint)

    def test_sizes_fill_the_share_of_the_memory(self):
        asked = {"slots": 64, "chunk": 2048, "device_bytes": load_device("mi355x").hbm_bytes, "share": 0.93}
        made = k3()
        limits, one = budget.engine_limits(made, **asked), budget.costs(made, 64, 2048)
        check_limits(limits, 1 << 18, 1)
        used = one.need(64, limits.pages) + limits.checkpoints * one.checkpoint
        usable = int(asked["device_bytes"] * 0.93)
        assert usable - one.page < used <= usable
        assert limits.spacing == 4096  # a checkpoint's memory holds the rows of 4,063 tokens
        assert limits.checkpoints * one.checkpoint < (usable - one.need(64, 4096)) // 4 < limits.pages * one.page

        without = budget.engine_limits(made, **asked, prefix=False)
        assert without.checkpoints == 0
        assert without.pages > limits.pages


def total(made: Steps, limits) -> int:
    one = budget.costs(made, limits.page, limits.chunk)
    groups = made.parallel.size("batch")
    return one.need(limits.slots // groups, limits.pages // groups) + limits.checkpoints // groups * one.checkpoint


@pytest.mark.parametrize("spare", [0, 1000, 100_000])
def test_no_size_asks_for_more_than_there_is(spare):
    made = steps()
    one = budget.costs(made, 32, 96)
    least = one.need(4, 3) + spare
    limits = budget.engine_limits(made, slots=7, chunk=512, device_bytes=least, share=1.0)
    check_limits(limits, made.capacity, 2)
    assert (limits.slots, limits.page, limits.chunk) == (8, 32, 96)
    assert least - one.page - one.checkpoint < total(made, limits) <= least


class TestRefused:
    """A device with a little less than is needed: the change that is named is enough, as the planner's is."""

    def ask(self, made=None, slots=8, share=0.9, **options):
        made = made or steps()
        one = budget.costs(made, 32, 96)
        exact = one.need(slots // 2, 3)
        options.setdefault("device_bytes", int((exact - 1) / share))
        with pytest.raises(LimitsError, match="does not fit its devices") as caught:
            budget.engine_limits(made, slots=slots, share=share, **options)
        return caught.value, one

    def test_the_problem_names_every_part(self):
        error, _ = self.ask()
        for part in ("weights", "a prefill call", "8 slots", "6 pages", "90% of"):
            assert part in error.problems[0]
        assert error.hint == "Smallest change that would fit: 91% of the memory instead of 90%."

    def test_fewer_slots(self):
        error, one = self.ask(share=0.97)
        assert error.hint == "Smallest change that would fit: 6 slots instead of 8."
        budget.engine_limits(steps(), slots=6, share=0.97, device_bytes=int((one.need(4, 3) - 1) / 0.97))

    def test_narrow_rows(self):
        error, _ = self.ask(slots=2, share=0.97)
        assert error.hint == "Smallest change that would fit: latent rows of one byte (kv_dtype fp8)."

    def test_shorter_sequences(self):
        made = steps()
        narrow = dataclasses.replace(made, precision=dataclasses.replace(made.precision, latent=LATENTS["fp8"]))
        error, _ = self.ask(narrow, slots=2, share=0.97)
        assert "sequences of 64 tokens instead of 96 (max_seq_len)" in error.hint

    def test_more_devices(self):
        error, _ = self.ask(device_bytes=1000)
        assert "take more devices" in error.hint

    def test_checkpoints_that_were_asked_for(self):
        made = steps()
        one = budget.costs(made, 32, 96)
        room = one.need(4, 3) + 2 * one.checkpoint
        with pytest.raises(LimitsError, match="6 checkpoints take") as caught:
            budget.engine_limits(made, checkpoints=6, device_bytes=room, share=1.0)
        assert caught.value.hint == "Take checkpoints=4 or fewer."
        limits = budget.engine_limits(made, checkpoints=4, device_bytes=room, share=1.0)
        assert (limits.checkpoints, limits.pages) == (4, 6)

    def test_pages_that_were_asked_for(self):
        error, _ = self.ask(
            pages=8, device_bytes=int((budget.costs(steps(), 32, 96).need(4, 4) - 1) / 0.97), share=0.97
        )
        assert "8 pages" in error.problems[0]

    def test_too_few_pages_are_not_made_more(self):
        limits = budget.engine_limits(steps(), pages=2, device_bytes=1 << 40)
        assert limits.pages == 2  # red when another number than the one asked for is taken in silence
        with pytest.raises(LimitsError, match="give pages=6"):
            check_limits(limits, 96, 2)


@pytest.mark.parametrize(
    ("capacity", "impl", "page"), [(96, "pallas", 32), (128, "pallas", 64), (40, "pallas", 32), (40, "reference", 40)]
)
def test_a_page_that_fits_sequence_and_kernels(capacity, impl, page):
    made = steps("single", capacity, device="cpu" if impl == "reference" else "mi355x")
    assert budget.fitting_page(made) == page


class TestSpacing:
    def test_at_least_a_chunk_and_whole_pages(self):
        one = budget.Costs(0, 0, 0, checkpoint=1000, page=100)
        assert budget.spacing(one, page=16, chunk=16) == 160
        assert budget.spacing(one, page=16, chunk=500) == 512  # red when short prompts would split at every page
        assert budget.spacing(dataclasses.replace(one, checkpoint=1001), page=16, chunk=16) == 176
