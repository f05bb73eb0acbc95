"""The pure part of streams: the buffer, the deal, and merging readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdata.errors import SourceError, UsageError
from fastdata.order import SequentialOrder, Steps
from fastdata.sources.sidebyside import read_side_by_side
from fastdata.stream_order import deal, deal_own, mix, shard_order


@given(st.integers(0, 60), st.integers(1, 80), st.integers(0, 2**64))
def test_a_buffer_gives_each_sample_once_and_repeats_by_seed(count: int, size: int, seed: int) -> None:
    first = list(mix(iter(range(count)), size, seed, epoch=1, rank=0))
    assert sorted(first) == list(range(count))
    assert first == list(mix(iter(range(count)), size, seed, epoch=1, rank=0))


def test_epochs_seeds_and_ranks_mix_differently() -> None:
    runs = [tuple(mix(iter(range(50)), 20, *key)) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len(set(runs)) == 4


def test_a_sample_leaves_the_buffer_only_when_it_is_full() -> None:
    read: list[int] = []

    def stream() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    next(mix(stream(), 30, 0, 0, 0))
    assert len(read) == 31


def test_a_buffer_of_everything_is_a_uniform_shuffle() -> None:
    firsts = [next(mix(iter(range(8)), 8, seed, 0, 0)) for seed in range(4000)]
    counts = [firsts.count(number) for number in range(8)]
    # Binomial(4000, 1/8): mean 500, standard deviation 20.9; six of them on each side.
    assert all(abs(count - 500) < 126 for count in counts)


def test_the_deal_of_a_stream_is_that_of_an_index() -> None:
    for world_size in range(1, 5):
        for batch_size in range(1, 5):
            for drop_last in (False, True):
                for size in range(1, 40):
                    _compare_deals(size, batch_size, world_size, drop_last)


def _compare_deals(size: int, batch_size: int, world_size: int, drop_last: bool) -> None:
    for rank in range(world_size):
        try:
            steps = Steps(size, 0, batch_size, rank, world_size, drop_last)
        except UsageError:
            with pytest.raises(SourceError):
                list(deal(iter(range(size)), batch_size, rank, world_size, drop_last=drop_last))
            continue
        expected = [batch.tolist() for batch in steps.batches(SequentialOrder(size))]
        dealt = list(deal(iter(range(size)), batch_size, rank, world_size, drop_last=drop_last))
        assert [step.samples for step in dealt] == expected
        assert [step.last for step in dealt] == [number == len(expected) - 1 for number in range(len(expected))]


def test_ranks_with_own_shards_take_as_many_samples_a_step_as_the_length_gives() -> None:
    for rank in range(2):
        steps = Steps(25, 0, 4, rank, 2, drop_last=False)
        counts = [len(step.samples) for step in deal_own(iter(range(1000)), steps)]
        assert counts == [len(batch) for batch in steps.batches(SequentialOrder(25))]


def test_the_order_of_shards_is_a_permutation_by_seed_and_epoch() -> None:
    orders = {tuple(shard_order(20, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_an_item_does_not_wait_for_those_that_come_after_it() -> None:
    class Stalling(Slow):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            yield from super().__iter__()
            self.stopped.wait(30)

    merged = read_side_by_side([Stalling(0, 5)], 1, 0, lambda _: 1)
    started = time.monotonic()
    assert [next(merged) for _ in range(5)] == [(0, i) for i in range(5)]
    merged.close()
    assert time.monotonic() - started < 5


class Slow:
    """Yields (reader, number), some of them late."""

    def __init__(self, name: int, count: int, fail: bool = False) -> None:
        self.name, self.count, self.fail, self.stopped = name, count, fail, threading.Event()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number in range(self.count):
            if (self.name + number) % 7 == 0:
                time.sleep(0.002)
            if self.stopped.is_set():
                return
            yield self.name, number
        if self.fail:
            raise ValueError("broken")

    def stop(self) -> None:
        self.stopped.set()


def test_merged_readers_give_one_order_whatever_their_speed() -> None:
    def run() -> list[tuple[int, int]]:
        return list(read_side_by_side([Slow(n, 5 + 13 * n) for n in range(6)], 3, 1, lambda _: 1))

    first = run()
    assert sorted(first) == sorted((n, i) for n in range(6) for i in range(5 + 13 * n))
    assert first[:6] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert all(run() == first for _ in range(3))


def test_a_reader_at_a_time_keeps_the_order_of_readers() -> None:
    merged = list(read_side_by_side([Slow(n, 20) for n in range(4)], 1, 2, lambda _: 1))
    assert merged == [(n, i) for n in range(4) for i in range(20)]


def test_an_error_of_a_reader_comes_to_the_consumer_at_its_place() -> None:
    merged = read_side_by_side([Slow(0, 20, fail=True), Slow(1, 20)], 1, 1, lambda _: 1)
    assert [next(merged) for _ in range(20)] == [(0, i) for i in range(20)]
    with pytest.raises(ValueError, match="broken"):
        next(merged)


def test_closing_ends_threads_that_are_ahead() -> None:
    before = threading.active_count()
    merged = read_side_by_side([Slow(n, 10_000) for n in range(5)], 3, 1, lambda _: 1)
    next(merged)
    assert threading.active_count() == before + 4
    merged.close()
    assert threading.active_count() == before


def test_few_large_items_wait() -> None:
    handed: list[int] = []

    class Large(Slow):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            for item in super().__iter__():
                handed.append(item[1])
                yield item

    merged = read_side_by_side([Large(1, 100)], 1, 0, lambda _: 1 << 20)
    next(merged)
    time.sleep(0.3)
    assert len(handed) <= 10  # four that wait and as many taken, and one that waits to be put
    merged.close()
