"""The epoch's order and how it is dealt over steps and ranks."""

from __future__ import annotations

import numpy as np
import pytest

from fastdata.errors import StateError, UsageError
from fastdata.order import BlockOrder, FullOrder, SequentialOrder, ShardLayout, Steps, make_order, permute
from fastdata.spec import BlockShuffle


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 4095, 10_000])
def test_a_permutation_holds_each_member_once(size: int) -> None:
    for key in range(5):
        assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_the_permutation_is_pinned_for_ever() -> None:
    assert permute(np.arange(10), 10, 0).tolist() == PINNED_10
    assert permute(np.arange(5), 1_000_000_007, 42).tolist() == PINNED_LARGE
    assert FullOrder(1000, seed=7, epoch=3).positions(0, 6).tolist() == PINNED_ORDER


def test_slices_of_an_order_agree_with_the_whole() -> None:
    order = FullOrder(1003, seed=1, epoch=2)
    whole = order.positions(0, 1003)
    assert np.array_equal(np.concatenate([order.positions(a, min(a + 97, 1003)) for a in range(0, 1003, 97)]), whole)


def test_a_permutation_looks_uniform() -> None:
    """Each of 16 members comes to the first place about equally often: chi-squared with 15 degrees of freedom."""
    first = [int(permute(np.zeros(1, np.int64), 16, key)[0]) for key in range(4000)]
    counts = np.bincount(first, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 37.7  # 99.9th percentile
    values = permute(np.arange(4096), 4096, 5)
    assert abs(np.corrcoef(np.arange(4096), values)[0, 1]) < 0.06


def test_epochs_and_seeds_differ() -> None:
    orders = [FullOrder(100, seed, epoch).positions(0, 100).tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6


def test_steps_deal_every_sample_once_and_equally_by_brute_force() -> None:
    for world_size in range(1, 9):
        for batch_size in range(2, 9):
            for size in range(8, 200):
                _check_steps(size, 0, batch_size, world_size)


def test_steps_hold_after_a_resume_at_any_place() -> None:
    for done in range(0, 60):
        for world_size in (1, 2, 3):
            try:
                _check_steps(60, done, 4, world_size)
            except StateError:
                assert 60 - done < world_size


def _check_steps(size: int, done: int, batch_size: int, world_size: int) -> None:
    steps = Steps(size, done, batch_size, 0, world_size, drop_last=False)
    assert len(steps) == -(-(size - done) // (batch_size * world_size))
    ends = [steps.end(k) for k in range(len(steps))]
    starts = [done, *ends[:-1]]
    assert ends[-1] == size
    for start, end in zip(starts, ends, strict=True):
        assert world_size <= end - start <= batch_size * world_size


def test_ranks_see_disjoint_parts_of_the_same_steps() -> None:
    order = FullOrder(101, 0, 0)
    per_rank = [list(Steps(101, 0, 8, rank, 4, drop_last=False).batches(order)) for rank in range(4)]
    assert {len(batches) for batches in per_rank} == {4}
    for step in range(4):
        sizes = [len(batches[step]) for batches in per_rank]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
    assert sorted(np.concatenate([b for batches in per_rank for b in batches]).tolist()) == list(range(101))


def test_a_step_of_all_ranks_is_a_prefix_of_the_order() -> None:
    order = FullOrder(50, 3, 1)
    first = [next(Steps(50, 0, 4, rank, 3, drop_last=False).batches(order)) for rank in range(3)]
    assert sorted(np.concatenate(first).tolist()) == sorted(order.positions(0, 12).tolist())


def test_drop_last_drops_what_is_not_full_on_every_rank() -> None:
    assert len(Steps(33, 0, 4, 0, 2, drop_last=True)) == 4
    assert len(Steps(32, 0, 4, 0, 2, drop_last=True)) == 4
    assert Steps(33, 0, 4, 0, 2, drop_last=True).end(3) == 32


def test_fewer_samples_than_ranks_is_an_error() -> None:
    with pytest.raises(UsageError, match="3 samples"):
        Steps(3, 0, 8, 0, 4, drop_last=False)


def test_batch_size_one_that_cannot_top_up_is_an_error() -> None:
    with pytest.raises(UsageError, match="batch_size=1"):
        Steps(9, 0, 1, 0, 4, drop_last=False)
    assert len(Steps(8, 0, 1, 0, 4, drop_last=False)) == 2


def _layout(sizes: list[int]) -> ShardLayout:
    total = sum(sizes)
    storage = np.random.default_rng(0).permutation(total)
    return ShardLayout(storage, np.concatenate([[0], np.cumsum(sizes)]))


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 100])
def test_block_order_holds_each_sample_once_and_reads_few_shards_at_a_time(shards: int) -> None:
    layout = _layout([7, 20, 33, 5, 5, 40, 1])
    order = BlockOrder(layout, BlockShuffle(shards), seed=1, epoch=0)
    whole = order.positions(0, 111)
    assert sorted(whole.tolist()) == list(range(111))
    assert np.array_equal(np.concatenate([order.positions(a, min(a + 10, 111)) for a in range(0, 111, 10)]), whole)
    shard_of = np.empty(111, np.int64)
    for shard in range(7):
        shard_of[layout.storage_order[layout.shard_starts[shard] : layout.shard_starts[shard + 1]]] = shard
    for place in (0, 50, 110):
        number = order.block_of(place)
        start, stop = order.places_of(number)
        block = order.as_stored(number, 0, stop - start)
        assert np.array_equal(np.sort(block), np.sort(whole[start:stop]))
        assert len(set(shard_of[block].tolist())) <= shards
        assert whole[place] in block


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
def test_a_rank_computes_its_own_places_alone(step: int) -> None:
    layout = _layout([7, 20, 33, 5, 5, 40, 1])
    blocks = BlockOrder(layout, BlockShuffle(2), seed=1, epoch=0)
    for order in (SequentialOrder(111), FullOrder(111, seed=1, epoch=0), blocks):
        for start in range(0, 111, 5):
            assert order.positions(start, 100, step).tolist() == order.positions(0, 111)[start:100:step].tolist()


def test_block_order_changes_with_the_epoch() -> None:
    layout = _layout([10] * 20)
    orders = {tuple(BlockOrder(layout, BlockShuffle(4), 0, epoch).positions(0, 200).tolist()) for epoch in range(3)}
    assert len(orders) == 3


def test_block_shuffle_on_a_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="no shards"):
        make_order(BlockShuffle(), 10, None, 0, 0)


PINNED_10: list[int] = [9, 4, 6, 7, 0, 5, 2, 8, 3, 1]
PINNED_LARGE: list[int] = [583522470, 170213468, 194575710, 237646685, 148957771]
PINNED_ORDER: list[int] = [828, 37, 250, 205, 54, 739]
