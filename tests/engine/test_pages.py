import pytest

from kimi_jax.engine.pages import Pool


def test_places_are_given_once_and_come_back_when_nobody_uses_them():
    pool = Pool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) is None
    assert pool.free == 1  # red when a take that fails keeps what it found
    pool.share([1])
    pool.drop([0, 1])
    assert (pool.free, pool.users(1)) == (2, 1)  # red when sharing does not count
    assert pool.take(2) == [3, 0]  # the one freed last comes last
    pool.drop([1])
    assert pool.take(1) == [1]


@pytest.mark.parametrize("act", [lambda pool: pool.drop([1]), lambda pool: pool.share([1]), lambda pool: pool.keep(1)])
def test_a_free_place_can_be_neither_shared_nor_dropped(act):
    pool = Pool(2)
    pool.take(1)
    with pytest.raises(ValueError, match="place 1 is free"):
        act(pool)


def test_what_the_cache_alone_uses_is_counted():
    pool = Pool(3)
    pool.take(2)
    pool.keep(0)
    assert pool.idle == 0
    pool.drop([0])
    assert pool.idle == 1
    pool.share([0])  # red when a reader of a kept page does not count: it could be given away under him
    assert pool.idle == 0
    pool.give_up(0)
    assert (pool.idle, pool.free) == (0, 1)
    pool.keep(1)
    pool.drop([1])
    pool.give_up(1)
    assert (pool.idle, pool.free) == (0, 2)


def test_the_cache_uses_a_place_at_most_once():
    pool = Pool(1)
    pool.take(1)
    with pytest.raises(ValueError, match="is not kept"):
        pool.give_up(0)
    pool.keep(0)
    with pytest.raises(ValueError, match="kept already"):
        pool.keep(0)
