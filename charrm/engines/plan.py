"""Plans shared work: rows' ids in, packs of unique tokens and batched attention out. No torch.

A token's values in the official forward depend on the ids up to it and on the *numeric class* of
its row: which width class the row's length L falls in, and, for the last `L % softmax_tail`
tokens, L itself. Tokens equal in both are computed once. Rows are sorted so that equal prefixes
are neighbours; each row then adds one run of new entries to its pack and attends to slices of
earlier runs, which is a path-compressed prefix tree without node objects.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from charrm.protocol import MAX_TOKENS

if TYPE_CHECKING:
    from charrm.engines.classes import NumericClasses

_KEY_BYTES = 8


class Slice(NamedTuple):
    """`size` entries of a pack from `entry` on, at consecutive positions."""

    entry: int
    size: int


@dataclass(frozen=True)
class Segment:
    """Consecutive new entries of one numeric class."""

    entry: int  # first entry in the pack
    start: int  # position of that entry in its row
    length: int
    width_class: int  # rows of this width class only
    exact: int  # the row's length L for tail tokens, 0 for settled ones
    path: tuple[Slice, ...]  # entries of positions 0 .. start + length - 1


class Queries(NamedTuple):
    """Part of a segment: `size` entries from `entry` on, the first at `position`."""

    segment: int
    entry: int
    position: int
    size: int

    @property
    def end(self) -> int:
        return self.position + self.size


@dataclass(frozen=True)
class Group:
    """Query runs whose attention has one width and goes through one batched product."""

    width: int
    queries: int  # every run is padded to this many
    items: tuple[Queries, ...]


@dataclass(frozen=True)
class PackedRow:
    """One distinct row: where it came from and where its values are."""

    indices: tuple[int, ...]  # input positions; duplicates collapse
    length: int
    path: tuple[Slice, ...]

    @property
    def last_entry(self) -> int:
        return self.path[-1].entry + self.path[-1].size - 1


@dataclass(frozen=True)
class Pack:
    """Rows computed together. Entry i is the token `tokens[i]` at position `positions[i]`."""

    tokens: list[int]
    positions: list[int]
    segments: tuple[Segment, ...]
    groups: tuple[Group, ...]
    rows: tuple[PackedRow, ...]


@dataclass(frozen=True)
class Plan:
    """Packs, and the input positions of rows too short or too long to share here."""

    packs: tuple[Pack, ...]
    alone: tuple[int, ...]
    total_tokens: int  # tokens of all rows as the official loop computes them
    unique_tokens: int  # tokens this plan computes

    @property
    def token_ratio(self) -> float:
        return self.total_tokens / self.unique_tokens if self.unique_tokens else 1.0


@dataclass(frozen=True)
class Limits:
    """Bounds of a plan; the byte costs are per attention score, key and query of one item."""

    pack_tokens: int
    attention_bytes: int
    score_bytes: int
    key_bytes: int
    query_bytes: int
    query_chunk: int
    width_step: int = 64

    def cost(self, items: int, queries: int, width: int) -> int:
        """Bytes that the attention of a group holds at its peak."""
        per_item = queries * width * self.score_bytes + width * self.key_bytes
        return items * (per_item + queries * self.query_bytes)

    def chunk(self, width: int, least: int) -> int:
        """Queries of one item at this width; at least `least`, which the engine has checked."""
        room = self.attention_bytes - width * self.key_bytes
        fits = room // (width * self.score_bytes + self.query_bytes)
        return max(least, min(self.query_chunk, fits))


def make_plan(rows: Sequence[Sequence[int]], classes: NumericClasses, limits: Limits) -> Plan:
    """Plan rows of 1 to 4,096 ids below 2**32.

    A pack holds at most `limits.pack_tokens` entries unless it is a single row that is longer.
    """
    same: dict[tuple[int, bytes], list[int]] = {}
    alone = []
    for index, ids in enumerate(rows):
        if not classes.min_length <= len(ids) <= classes.max_length:
            alone.append(index)
        else:
            whole = (classes.width_class(len(ids)), _key(ids, classes.softmax_tail))
            same.setdefault(whole, []).append(index)
    packs: list[Pack] = []
    pack: list[tuple[int, bytes, int]] = []  # width class, key, entries shared with the one before
    size, before = 0, (-1, b"")
    for width_class, key in sorted(same):
        shared = _common(before[1], key) if before[0] == width_class else 0
        if pack and size + len(key) // _KEY_BYTES - shared > limits.pack_tokens:
            packs.append(_build(pack, same, rows, classes, limits))
            pack, size, shared = [], 0, 0
        pack.append((width_class, key, shared))
        size += len(key) // _KEY_BYTES - shared
        before = (width_class, key)
    if pack:
        packs.append(_build(pack, same, rows, classes, limits))
    total = sum(map(len, rows))
    unique = sum(len(pack.tokens) for pack in packs) + sum(len(rows[i]) for i in alone)
    return Plan(tuple(packs), tuple(alone), total, unique)


def _key(ids: Sequence[int], tail: int) -> bytes:
    """8 bytes per token, ordered as numbers: L above the id for tail tokens, 0 for settled ones."""
    settled = len(ids) - len(ids) % tail
    mark = len(ids) << 32
    numbers = array("Q", ids[:settled])
    numbers.extend(mark | i for i in ids[settled:])
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Tokens at the start of two keys that are equal."""
    shorter = min(len(a), len(b)) // _KEY_BYTES
    # The first n for which the first n tokens differ, less one.
    differs = range(1, shorter + 1)
    view_a, view_b = memoryview(a), memoryview(b)
    return bisect_left(
        differs, True, key=lambda n: view_a[: n * _KEY_BYTES] != view_b[: n * _KEY_BYTES]
    )


def _build(
    pack: Iterable[tuple[int, bytes, int]],
    same: dict[tuple[int, bytes], list[int]],
    rows: Sequence[Sequence[int]],
    classes: NumericClasses,
    limits: Limits,
) -> Pack:
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    packed: list[PackedRow] = []
    path: tuple[Slice, ...] = ()
    for width_class, key, shared in pack:
        indices = same[width_class, key]
        ids = rows[indices[0]]
        settled = len(ids) - len(ids) % classes.softmax_tail
        path = _first(path, shared)
        for start, end, exact in (
            (shared, settled, 0),
            (max(shared, settled), len(ids), len(ids)),
        ):
            if start < end:
                entry = len(tokens)
                path = _extend(path, Slice(entry, end - start))
                segments.append(Segment(entry, start, end - start, width_class, exact, path))
                tokens += ids[start:end]
                positions += range(start, end)
        packed.append(PackedRow(tuple(indices), len(ids), path))
    groups = _group(segments, classes, limits)
    return Pack(tokens, positions, tuple(segments), tuple(groups), tuple(packed))


def _first(path: tuple[Slice, ...], count: int) -> tuple[Slice, ...]:
    kept = []
    for part in path:
        if count <= 0:
            break
        kept.append(Slice(part.entry, min(part.size, count)))
        count -= part.size
    return tuple(kept)


def _extend(path: tuple[Slice, ...], new: Slice) -> tuple[Slice, ...]:
    """Append a slice, merged with the last one where their entries are neighbours."""
    if path and path[-1].entry + path[-1].size == new.entry:
        return (*path[:-1], Slice(path[-1].entry, path[-1].size + new.size))
    return (*path, new)


def _group(segments: list[Segment], classes: NumericClasses, limits: Limits) -> list[Group]:
    """Cut segments into query runs and batch runs of one width and similar count."""
    by_width: dict[int, list[Queries]] = {}
    for number, segment in enumerate(segments):
        offset = 0
        while offset < segment.length:
            first = segment.start + offset
            last = segment.start + segment.length
            # The widest that the run could need bounds its count; then the width it does need.
            widest = width_of(segment, min(last, first + limits.query_chunk), classes, limits)
            count = min(segment.length - offset, limits.chunk(widest, classes.min_rows))
            run = Queries(number, segment.entry + offset, first, count)
            width = width_of(segment, run.end, classes, limits)
            by_width.setdefault(width, []).append(run)
            offset += count
    groups = []
    for width, runs in sorted(by_width.items()):
        runs.sort(key=lambda run: (-run.size, run.entry))
        items: list[Queries] = []
        queries = 0
        for run in runs:
            # Padding to the longest run of a group may cost at most about a third.
            alike = 4 * max(run.size, 8) >= 3 * queries
            if items and not (
                alike and limits.cost(len(items) + 1, queries, width) <= limits.attention_bytes
            ):
                groups.append(Group(width, queries, tuple(items)))
                items = []
            if not items:
                queries = max(run.size, classes.min_rows)
            items.append(run)
        groups.append(Group(width, queries, tuple(items)))
    return groups


def width_of(segment: Segment, end: int, classes: NumericClasses, limits: Limits) -> int:
    """Columns over which queries that end before position `end` are computed.

    Tail tokens: exactly L. Settled ones: any multiple of the softmax tail inside the segment's
    width class gives the same bits; `width_step` makes widths meet so that runs can be batched.
    """
    if segment.exact:
        return segment.exact
    tail = classes.softmax_tail
    low, high = classes.widths(segment.width_class)
    high -= high % tail
    step = tail * max(1, limits.width_step // tail)
    return min(high, max(_up(end, step), _up(low, tail), _up(classes.min_length, tail)))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def check_limits(limits: Limits, least_queries: int) -> bool:
    """Whether the narrowest run fits `attention_bytes` even at 4,096 columns."""
    narrowest = limits.cost(1, least_queries, MAX_TOKENS)
    return limits.pack_tokens >= 1 and narrowest <= limits.attention_bytes
