from concurrent.futures import ThreadPoolExecutor

from dtkernels.runtime.bounded_cache import BoundedCache


def test_the_oldest_entry_goes_and_reading_does_not_make_one_younger():
    cache = BoundedCache(2)
    assert cache.put("a", 1) == 1 and cache.put("b", 2) == 2
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert list(cache) == ["b", "c"] and cache.get("a") is None


def test_an_entry_that_is_replaced_evicts_none():
    cache = BoundedCache(2)
    for key, value in ("a", 1), ("b", 2), ("b", 3):
        cache.put(key, value)
    assert cache == {"a": 1, "b": 3}


def test_a_read_is_that_of_a_dict():
    assert BoundedCache.get is dict.get and BoundedCache.__getitem__ is dict.__getitem__ and not hasattr(BoundedCache(1), "__dict__")


def test_threads_may_add_at_the_same_time():
    cache = BoundedCache(8)

    def fill(start: int) -> None:
        for i in range(start, start + 2000):
            cache.put(i, i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(0, 8000, 2000)))
    assert len(cache) <= 8 + 4
