"""The planner: exhaustively over small sets of rows, and by properties over larger ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charrm.engines.classes import NumericClasses
from charrm.engines.plan import Limits, Pack, Plan, Slice, make_plan

Rows = Sequence[Sequence[int]]
Key = tuple[tuple[int, ...], int, int]


def classes(tail: int = 1, edges: tuple[int, ...] = (), **changes: Any) -> NumericClasses:
    facts: dict[str, Any] = {
        "min_rows": 1, "min_length": 1, "max_length": 4096, "linear_rows_invariant": True,
        "norm_rows_invariant": True, "head_rows_invariant": True, "torch_version": "0",
        "device": "none", "cpu_capability": "none", "threads": 1, "dtype": "bfloat16",
    }  # fmt: skip
    return NumericClasses(softmax_tail=tail, width_edges=edges, **(facts | changes))


def limits(pack_tokens: int = 1000, attention_bytes: int = 10**9, **changes: int) -> Limits:
    costs = {"score_bytes": 6, "key_bytes": 8, "query_bytes": 8, "query_chunk": 4, "width_step": 4}
    return Limits(pack_tokens, attention_bytes, **(costs | changes))


def entries(path: tuple[Slice, ...]) -> list[int]:
    return [i for part in path for i in range(part.entry, part.entry + part.size)]


def key_of(ids: Sequence[int], position: int, rules: NumericClasses) -> Key:
    """What decides a token's bits, written down without the planner."""
    length = len(ids)
    settled = length - length % rules.softmax_tail
    above = [edge for edge in rules.width_edges if length > edge]
    return tuple(ids[: position + 1]), len(above), length if position >= settled else 0


def keys_of(pack: Pack) -> list[Key]:
    """The key of every entry of a pack, read from its segments."""
    keys: dict[int, Key] = {}
    for segment in pack.segments:
        path = entries(segment.path)
        assert len(path) == segment.start + segment.length
        tokens = tuple(pack.tokens[i] for i in path)
        for offset in range(segment.length):
            entry, position = segment.entry + offset, segment.start + offset
            assert path[position] == entry
            assert entry not in keys
            keys[entry] = tokens[: position + 1], segment.width_class, segment.exact
    assert sorted(keys) == list(range(len(pack.tokens)))
    return [keys[i] for i in range(len(pack.tokens))]


def check(plan: Plan, rows: Rows, rules: NumericClasses, bounds: Limits) -> None:
    covered = list(plan.alone)
    assert all(not rules.min_length <= len(rows[i]) <= rules.max_length for i in plan.alone)
    for pack in plan.packs:
        assert len(pack.tokens) <= bounds.pack_tokens or len(pack.rows) == 1
        keys = keys_of(pack)
        assert len(set(keys)) == len(keys), "a key is computed twice in one pack"
        used = set()
        for row in pack.rows:
            ids = rows[row.indices[0]]
            path = entries(row.path)
            assert [keys[i] for i in path] == [key_of(ids, j, rules) for j in range(len(ids))]
            assert [pack.positions[i] for i in path] == list(range(len(ids)))
            assert row.last_entry == path[-1]
            assert all(list(rows[i]) == list(ids) for i in row.indices)
            covered += row.indices
            used |= set(path)
        assert used == set(range(len(pack.tokens))), "an entry that no row needs"
        check_groups(pack, rules, bounds)
    assert sorted(covered) == list(range(len(rows)))
    assert plan.total_tokens == sum(map(len, rows))
    alone = sum(len(rows[i]) for i in plan.alone)
    assert plan.unique_tokens == alone + sum(len(pack.tokens) for pack in plan.packs)


def check_groups(pack: Pack, rules: NumericClasses, bounds: Limits) -> None:
    queried: Counter[int] = Counter()
    for group in pack.groups:
        assert bounds.cost(len(group.items), group.queries, group.width) <= bounds.attention_bytes
        assert group.queries == max(rules.min_rows, *(item.size for item in group.items), 0)
        for item in group.items:
            queried.update(range(item.entry, item.entry + item.size))
            segment = pack.segments[item.segment]
            assert item.entry - segment.entry == item.position - segment.start
            assert 1 <= item.size <= bounds.query_chunk
            if segment.exact:
                assert group.width == segment.exact
                continue
            low, high = rules.widths(segment.width_class)
            assert low <= group.width <= high
            assert group.width >= item.end
            assert group.width % rules.softmax_tail == 0
    assert queried == Counter(range(len(pack.tokens)))


def unique_keys(rows: Rows, rules: NumericClasses) -> int:
    return len({key_of(ids, j, rules) for ids in rows for j in range(len(ids))})


SMALL = [ids for n in (1, 2, 3) for ids in product((0, 1), repeat=n)]


@pytest.mark.parametrize("rules", [classes(), classes(2), classes(1, (2,)), classes(2, (2,))])
def test_every_small_set(rules: NumericClasses) -> None:
    """All 1,470 sets of up to 4 of the 14 rows of at most 3 of two letters."""
    count = 0
    for size in (1, 2, 3, 4):
        for rows in combinations(SMALL, size):
            for bounds in (limits(), limits(4)):
                plan = make_plan(rows, rules, bounds)
                check(plan, rows, rules, bounds)
                if bounds.pack_tokens == 1000:
                    assert plan.unique_tokens == unique_keys(rows, rules)
            count += 1
    assert count == 1470


def test_the_check_notices_wrong_classes() -> None:
    """The control: a plan made under laxer rules does not pass."""
    rows, bounds = [(0, 1, 0), (0, 1)], limits()
    for lax, strict in ((classes(), classes(2)), (classes(), classes(1, (2,)))):
        check(make_plan(rows, strict, bounds), rows, strict, bounds)
        with pytest.raises(AssertionError):
            check(make_plan(rows, lax, bounds), rows, strict, bounds)


@st.composite
def related_rows(draw: st.DrawFn) -> list[list[int]]:
    """Rows grown from one another: cut, continued, repeated, or one token changed."""
    token = st.integers(0, 3)
    rows = [draw(st.lists(token, min_size=1, max_size=60))]
    for _ in range(draw(st.integers(0, 12))):
        row = list(draw(st.sampled_from(rows)))
        row = row[: draw(st.integers(0, len(row)))] + draw(st.lists(token, max_size=20))
        if row and draw(st.booleans()):
            row[draw(st.integers(0, len(row) - 1))] = 4
        rows.append(row or [5])
    return rows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=related_rows(),
    tail=st.sampled_from([1, 2, 4, 8]),
    edges=st.sampled_from([(), (16,), (16, 40)]),
    min_length=st.sampled_from([1, 4]),
    min_rows=st.sampled_from([1, 3]),
    pack_tokens=st.sampled_from([1, 30, 90, 5000]),
    attention_bytes=st.sampled_from([3000, 10**6]),
)
def test_properties(
    rows: list[list[int]],
    tail: int,
    edges: tuple[int, ...],
    min_length: int,
    min_rows: int,
    pack_tokens: int,
    attention_bytes: int,
) -> None:
    rules = classes(tail, edges, min_length=min_length, min_rows=min_rows)
    bounds = limits(pack_tokens, attention_bytes)
    plan = make_plan(rows, rules, bounds)
    check(plan, rows, rules, bounds)
    kept = [row for row in rows if len(row) >= min_length]
    if pack_tokens == 5000:
        alone = sum(len(row) for row in rows if len(row) < min_length)
        assert plan.unique_tokens == alone + unique_keys(kept, rules)


def test_duplicates_collapse_and_order_does_not_matter() -> None:
    rows = [[1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 4]]
    plan = make_plan(rows, classes(), limits())
    [pack] = plan.packs
    assert sorted(row.indices for row in pack.rows) == [(0, 2), (1,), (3,)]
    assert (plan.total_tokens, plan.unique_tokens, plan.token_ratio) == (11, 4, 2.75)
    assert make_plan(rows[::-1], classes(), limits()).packs[0].tokens == pack.tokens
    nothing = make_plan([], classes(), limits())
    assert (nothing.packs, nothing.alone, nothing.token_ratio) == ((), (), 1.0)


def test_rows_that_share_stay_together() -> None:
    """Two families of four in mixed order need two packs of one family each."""
    rows = [[family] * 20 + [last] for last in range(4) for family in (1, 2)]
    plan = make_plan(rows, classes(), limits(24))
    assert [len(pack.tokens) for pack in plan.packs] == [24, 24]
    families = [{rows[i][0] for row in pack.rows for i in row.indices} for pack in plan.packs]
    assert families == [{1}, {2}]


def test_siblings_are_batched() -> None:
    """Forty answers to one prompt, of 9 to 12 tokens, take few products instead of forty."""
    prompt = list(range(3, 103))
    rows = [prompt + [200 + i] * (9 + i % 4) for i in range(40)]
    [pack] = make_plan(rows, classes(), limits(query_chunk=256, width_step=64)).packs
    assert len(pack.segments) == 40
    assert len(pack.groups) <= 3
    assert max(len(group.items) for group in pack.groups) >= 39
