"""The second tier: which contents lie in which slot, and which go first."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.memory.host_tier import HostTier, TierEntry


def store(tier: HostTier, *names: bytes) -> list[int | None]:
    return [tier.store(name, is_draft_filled=False) for name in names]


def test_a_tier_needs_a_slot():
    with pytest.raises(ValueError, match="num_slots is 0, at least 1 is needed"):
        HostTier(0)


def test_each_contents_has_a_slot_of_its_own():
    tier = HostTier(3)

    assert [0, 1, 2] == store(tier, b"a", b"b", b"c")
    assert [TierEntry(i, is_draft_filled=False) for i in range(3)] == [tier.find(name) for name in (b"a", b"b", b"c")]
    assert 3 == tier.num_used_slots


def test_what_is_there_is_not_copied_again():
    tier = HostTier(2)

    assert [0, None] == store(tier, b"a", b"a")
    assert 1 == tier.num_used_slots


def test_the_least_recently_used_goes_first():
    tier = HostTier(2)
    store(tier, b"a", b"b")
    tier.find(b"a")

    assert [1] == store(tier, b"c")
    assert [True, False, True] == [tier.find(name) is not None for name in (b"a", b"b", b"c")]


def test_asking_for_what_is_there_again_counts_as_use():
    tier = HostTier(2)
    store(tier, b"a", b"b", b"a", b"c")

    assert tier.find(b"a") is not None
    assert tier.find(b"b") is None


def test_hits_end_at_the_first_gap():
    tier = HostTier(3)
    store(tier, b"a", b"b", b"d")

    assert [0, 1] == [entry.slot for entry in tier.leading_hits([b"a", b"b", b"c", b"d"])]
    assert [] == tier.leading_hits([b"c", b"d"])


def test_whether_the_draft_models_half_is_there_is_remembered():
    tier = HostTier(2)
    tier.store(b"a", is_draft_filled=True)
    store(tier, b"b")

    assert [True, False] == [entry.is_draft_filled for entry in tier.leading_hits([b"a", b"b"])]


def test_what_a_failed_step_was_to_store_is_not_found_and_its_slots_are_free():
    tier = HostTier(3)
    store(tier, b"a", b"b", b"c")
    tier.forget({0, 2})

    assert [False, True, False] == [tier.find(name) is not None for name in (b"a", b"b", b"c")]
    assert {0, 2} == set(store(tier, b"d", b"e"))


def test_clearing_forgets_all_and_frees_all():
    tier = HostTier(2)
    store(tier, b"a", b"b")
    tier.clear()

    assert (0, None) == (tier.num_used_slots, tier.find(b"a"))
    assert {0, 1} == set(store(tier, b"c", b"d"))
    assert tier.find(b"c") is not None


class PlainTier:
    """The same from lists alone: contents in order of use, and what lies in each slot."""

    def __init__(self, num_slots: int) -> None:
        self.order: list[bytes] = []
        self.num_slots = num_slots

    def use(self, name: bytes) -> bool:
        found = name in self.order
        if found:
            self.order.remove(name)
            self.order.append(name)
        return found

    def store(self, name: bytes) -> None:
        if not self.use(name):
            self.order = [*self.order, name][-self.num_slots :]


names = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


@given(
    st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["store", "store", "find", "forget"]), names), max_size=30)
)
def test_it_holds_what_a_plain_list_of_the_most_recently_used_holds(num_slots: int, calls: Sequence[tuple[str, bytes]]):
    tier, plain = HostTier(num_slots), PlainTier(num_slots)
    slots: dict[int, bytes] = {}
    for call, name in calls:
        match call:
            case "store":
                plain.store(name)
                if (slot := tier.store(name, is_draft_filled=False)) is not None:
                    slots[slot] = name
            case "find":
                entry = tier.find(name)
                assert plain.use(name) == (entry is not None)
                assert entry is None or name == slots[entry.slot]
            case "forget":
                tier.forget({slot for slot, there in slots.items() if there == name})
                plain.order = [other for other in plain.order if other != name]
        assert len(plain.order) == tier.num_used_slots
    assert {name: name for name in plain.order} == {
        name: slots[entry.slot] for name in (b"a", b"b", b"c", b"d", b"e") if (entry := tier.find(name)) is not None
    }
