"""PolicyContract: what every eviction policy promises; a new policy is one subclass."""

from __future__ import annotations

import random
from contextlib import closing
from hashlib import sha256
from itertools import islice

import pytest

from kvtier.policy.base import EvictionPolicy
from kvtier.policy.lru import Lru
from kvtier.types import BlockHash


def key(number: int) -> BlockHash:
    return BlockHash(sha256(str(number).encode()).digest())


class PolicyContract:
    """Give `make`."""

    def make(self) -> EvictionPolicy[BlockHash]:
        raise NotImplementedError

    def filled(self, count: int) -> EvictionPolicy[BlockHash]:
        policy = self.make()
        for stamp in range(count):
            policy.insert(key(stamp), stamp)
        return policy

    def test_every_resident_key_leaves_exactly_once(self) -> None:
        policy = self.filled(100)
        policy.touch([key(n) for n in range(0, 100, 3)], range(1000, 1034))
        assert sorted(policy.coldest()) == sorted(key(n) for n in range(100))
        assert len(policy) == 100

    def test_keys_that_came_sorted_leave_in_order_among_the_others(self) -> None:
        policy = self.make()
        policy.insert(key(5), 5)
        policy.insert_sorted([key(n) for n in (0, 2, 4, 6, 8)], [0, 2, 4, 6, 8])
        policy.insert(key(3), 3)
        assert list(policy.coldest()) == [key(n) for n in (0, 2, 3, 4, 5, 6, 8)]
        assert list(policy.coldest()) == [key(n) for n in (0, 2, 3, 4, 5, 6, 8)]
        assert len(policy) == 7
        assert set(policy) == {key(n) for n in (0, 2, 3, 4, 5, 6, 8)}
        policy.insert_sorted([key(1), key(7)], [1, 7])
        assert list(policy.coldest()) == [key(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8)]

    def test_keys_that_came_sorted_are_touched_removed_and_inserted_again(self) -> None:
        """Against a plain dict, in random order."""
        rng = random.Random(5)
        policy, model = self.make(), {key(n): n for n in range(60)}
        policy.insert_sorted(list(model), list(model.values()))
        for stamp in range(100, 700):
            chosen = rng.choice([key(n) for n in range(70)])
            if chosen not in model:
                policy.insert(chosen, stamp)
                model[chosen] = stamp
            elif rng.random() < 0.5:
                policy.remove(chosen)
                del model[chosen]
            else:
                policy.touch([chosen], [stamp])
                model[chosen] = stamp
            assert len(policy) == len(model)
            if stamp % 50 == 49:  # Walking through all of them moves the sorted ones.
                assert set(policy) == set(model)
                assert list(policy.coldest()) == sorted(model, key=lambda k: model[k])

    def test_walking_changes_nothing(self) -> None:
        policy = self.filled(50)
        first = list(policy.coldest())
        assert list(policy.coldest()) == first

    def test_an_early_close_changes_nothing(self) -> None:
        policy, undisturbed = self.filled(50), self.filled(50)
        for count in (0, 1, 7):
            with closing(policy.coldest()) as walk:
                assert len(list(islice(walk, count))) == count
        assert list(policy.coldest()) == list(undisturbed.coldest())

    def test_keys_passed_over_as_pinned_stay(self) -> None:
        policy = self.filled(20)
        order = list(policy.coldest())
        pinned, gone = set(order[:5]), []
        with closing(policy.coldest()) as walk:
            for found in walk:
                if found not in pinned:
                    policy.remove(found)
                    gone.append(found)
                if len(gone) == 10:
                    break
        assert gone == order[5:15]
        assert list(policy.coldest()) == order[:5] + order[15:]

    def test_a_removed_key_may_come_back(self) -> None:
        policy = self.filled(5)
        for stamp in range(100, 130):
            policy.remove(key(2))
            policy.insert(key(2), stamp)
            assert sorted(policy.coldest()) == sorted(key(n) for n in range(5))
        assert len(policy) == 5

    def test_removed_during_a_walk_and_inserted_after_it(self) -> None:
        policy = self.filled(5)
        with closing(policy.coldest()) as walk:
            found = next(walk)
            policy.remove(found)
        policy.insert(found, 100)
        assert sorted(policy.coldest()) == sorted(key(n) for n in range(5))

    def test_empty(self) -> None:
        assert list(self.make().coldest()) == []
        assert len(self.make()) == 0

    @pytest.mark.parametrize("seed", range(20))
    def test_random_calls_keep_the_set_of_residents(self, seed: int) -> None:
        policy = self.make()
        stamps = random_walk(policy, seed)
        assert len(policy) == len(stamps)
        assert sorted(policy.coldest()) == sorted(stamps)


def random_walk(policy: EvictionPolicy[BlockHash], seed: int) -> dict[BlockHash, int]:
    """Drive `policy` as the store does; what a naive dict says of its residents at the end."""
    rng = random.Random(seed)
    stamps: dict[BlockHash, int] = {}
    for stamp in range(0, 3000, 3):
        resident, found = sorted(stamps), key(rng.randrange(60))
        match rng.choice(["use", "use", "use", "touch", "remove", "evict"]):
            case "use" if found in stamps:
                policy.touch([found], [stamp])
                stamps[found] = stamp
            case "use":
                policy.insert(found, stamp)
                stamps[found] = stamp
            case "touch" if resident:
                chain = rng.sample(resident, min(len(resident), 3))
                policy.touch(chain, range(stamp, stamp + len(chain)))
                stamps.update(zip(chain, range(stamp, stamp + len(chain)), strict=True))
            case "remove" if resident:
                found = rng.choice(resident)
                policy.remove(found)
                del stamps[found]
            case "evict":
                pinned = set(rng.sample(resident, len(resident) // 4))
                with closing(policy.coldest()) as walk:
                    for victim in islice((k for k in walk if k not in pinned), rng.randrange(4)):
                        policy.remove(victim)
                        del stamps[victim]
    return stamps


class TestLru(PolicyContract):
    def make(self) -> EvictionPolicy[BlockHash]:
        return Lru()

    @pytest.mark.parametrize("seed", range(20))
    def test_order_is_that_of_a_sorted_list(self, seed: int) -> None:
        policy = self.make()
        stamps = random_walk(policy, seed)
        assert list(policy.coldest()) == sorted(stamps, key=lambda k: stamps[k])

    def test_a_touch_moves_a_key_behind_all_colder_ones(self) -> None:
        policy = self.filled(4)
        policy.touch([key(0), key(2)], [11, 10])
        assert list(policy.coldest()) == [key(1), key(3), key(2), key(0)]

    def test_of_equal_stamps_the_earlier_inserted_leaves_first(self) -> None:
        policy = self.make()
        for number in (3, 1, 2):
            policy.insert(key(number), 7)
        policy.touch([key(1), key(3), key(2)], [8, 8, 8])
        assert list(policy.coldest()) == [key(3), key(1), key(2)]

    def test_memory_stays_bounded_while_keys_come_and_go(self) -> None:
        policy = Lru[BlockHash]()
        for stamp in range(10_000):
            policy.insert(key(stamp), stamp)
            policy.remove(key(stamp))
        assert len(policy) == 0
        assert len(policy._heap) < 200
