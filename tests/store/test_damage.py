"""The listed damaged ranges stay ordered by their begin, which lookups rely on."""

from ha.store.damage import DamageRegistry


def registry(*ranges: tuple[int, int], by_checksum: bool = False) -> DamageRegistry:
    made = DamageRegistry(lambda: 1)
    for begin, end in ranges:
        made.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=by_checksum)
    return made


def test_a_range_that_a_truncation_extends_is_found() -> None:
    damage = registry((100, 200))
    extended = damage.add(150, 250, file="f", reason="r", found_by="scrub", by_checksum=True)
    damage.truncate(240, lambda begin: 50)
    assert (extended.begin, extended.end) == (50, 240)
    assert damage.first_in(50, 60) is extended
    assert [each.begin for each in damage.open] == [50, 100]


def test_a_range_behind_one_that_was_shrunk_is_found() -> None:
    damage = registry((100, 200), (150, 250))
    shrunk, other = damage.open
    damage.shrink(shrunk, 180, "peer:1")
    assert damage.first_in(150, 160) is other
    assert [each.begin for each in damage.open] == [150, 180]
