"""Any arrivals, mix, chunking, prefix hits, preemptions and cancels: every request draws what it draws alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import life as lives
from tests.engine.life import Life


@settings(max_examples=300)
@given(st.data(), st.integers(1, 2), st.integers(1, 6), st.sampled_from([0, 0, 1, 3, 7]), lives.steps())
def test_every_request_draws_what_it_draws_alone(data, groups, block, drafts, steps):
    # red when anything reaches the wrong row, also where a step takes several ids and leaves rows of rejected ones behind
    life = Life(data.draw(lives.limits(groups)), groups, block, drafts)
    lives.live(life, steps)
    life.check()
