"""The start of a decode step: what each row feeds, and the rows' cached tokens cut into work of nearly equal size."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidConfig
from octavo.kernels.dependent_launch import await_predecessor, launch_options

ITEM_FIELDS = 8  # row, slot, split, splits, begin, end, position, lowest visible position


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where the plan writes what each of the B rows feeds; all int32, in the form of a `Batch`."""

    token_ids: Tensor  # [B]
    positions: Tensor  # [B]; -1: padding
    cache_slots: Tensor  # [B]: block * block_size + offset


@triton.jit(do_not_specialize=["num_rows", "num_places", "window"])
def decode_plan_kernel(
    slots,
    length,
    tokens,
    block_table,
    token_ids,
    positions,
    cache_slots,
    items,
    token_stride,
    table_stride,
    num_rows,
    num_places,
    window,
    padded_rows: tl.constexpr,
    places_a_program: tl.constexpr,
    tile: tl.constexpr,
    max_splits: tl.constexpr,
    min_tiles: tl.constexpr,
    block_size: tl.constexpr,
    new_in_cache: tl.constexpr,
    fill_rows: tl.constexpr,
    dependent: tl.constexpr,
):
    """One program fills `places_a_program` places; each looks at all rows, so that no second launch is needed.

    tiles_a_split = ceil(total / (places - rows)) leaves a place for every split, as
    sum(ceil(tiles / tiles_a_split)) <= total / tiles_a_split + rows <= places.
    """
    await_predecessor(dependent)
    b = tl.arange(0, padded_rows)
    slot = tl.load(slots + b, mask=b < num_rows, other=-1)
    live = slot >= 0
    n = tl.load(length + slot, mask=live, other=0)
    lowest = tl.where(window > 0, tl.maximum(n - window, 0), 0)
    first = lowest // tile * tile
    keys = n - 1 + new_in_cache
    tiles = tl.where(live, tl.maximum((keys - first + tile - 1) // tile, 1), 0)
    spare = tl.maximum(num_places - num_rows, 1)
    tiles_a_split = tl.maximum((tl.sum(tiles, 0) + spare - 1) // spare, min_tiles)
    tiles_a_split = tl.maximum(tiles_a_split, (tiles + max_splits - 1) // max_splits)
    splits = (tiles + tiles_a_split - 1) // tiles_a_split
    ends = tl.cumsum(splits, 0)
    total_splits = tl.sum(splits, 0)
    i = tl.program_id(0) * places_a_program + tl.arange(0, places_a_program)
    row = tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), 1)  # the first row whose end lies beyond the place
    mine = b[None, :] == row[:, None]
    my_splits = tl.sum(tl.where(mine, splits[None, :], 0), 1)
    split = i - tl.sum(tl.where(mine, (ends - splits)[None, :], 0), 1)
    # Even shares of the row's own tiles: the last split is not a small rest.
    my_tiles = tl.sum(tl.where(mine, tiles[None, :], 0), 1)
    my_keys = tl.sum(tl.where(mine, keys[None, :], 0), 1)
    my_first = tl.sum(tl.where(mine, first[None, :], 0), 1)
    begin = my_first + split * my_tiles // tl.maximum(my_splits, 1) * tile
    end = my_first + (split + 1) * my_tiles // tl.maximum(my_splits, 1) * tile
    place = items + i * 8
    here = i < num_places
    tl.store(place, tl.where(i < total_splits, row, -1), mask=here)
    tl.store(place + 1, tl.sum(tl.where(mine, slot[None, :], 0), 1), mask=here)
    tl.store(place + 2, split, mask=here)
    tl.store(place + 3, my_splits, mask=here)
    tl.store(place + 4, begin, mask=here)
    tl.store(place + 5, tl.minimum(end, my_keys), mask=here)
    tl.store(place + 6, my_keys - new_in_cache, mask=here)
    tl.store(place + 7, tl.sum(tl.where(mine, lowest[None, :], 0), 1), mask=here)
    if fill_rows and tl.program_id(0) == 0:
        position = n - 1
        row_slot = slot.to(tl.int64)
        token = tl.load(tokens + row_slot * token_stride + position, mask=live, other=0)
        block = tl.load(block_table + row_slot * table_stride + position // block_size, mask=live, other=0)
        # Padding rows point at block 0, the dump.
        cache_slot = tl.where(live, block * block_size + position % block_size, 0)
        tl.store(token_ids + b, token, mask=b < num_rows)
        tl.store(positions + b, position, mask=b < num_rows)
        tl.store(cache_slots + b, cache_slot, mask=b < num_rows)


def num_places(rows: int, num_kv_heads: int, max_splits: int, programs: int = 528) -> int:
    """Places of a plan for `rows` rows: one a row, and as many more as make about `programs` programs in all.

    528 is four programs on each of the 132 multiprocessors of an H100 or H200.
    """
    return max(min(rows + -(-programs // num_kv_heads), rows * max_splits), rows + 1)


def plan_decode(
    slots: Tensor,
    length: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    items: Tensor,
    *,
    tile: int,
    block_size: int,
    max_splits: int,
    min_tokens: int = 128,
    window: int | None = None,
    new_in_cache: bool = True,
    rows: DecodeRows | None = None,
    dependent: bool = False,
) -> None:
    """Fill `items` [places, 8] int32 for the B rows of `slots` [B] int32, -1 for a padding row.

    `length` [slots] int32 counts a sequence's tokens, the one being fed included; `tokens` [slots, max_len]
    and `block_table` [slots, blocks] are int32. An item is (row, slot, split, splits, begin, end, position,
    lowest): positions [begin, end) of a row's cache, of which those below `lowest` are outside the `window`;
    row is -1 at unused places. Written once a step and window, read by every layer: an attention program
    learns all it needs in one load, where row, slot and length in turn would be a chain of three.

    `new_in_cache`: the token being fed is in the cache by the time attention reads it. `tile`, `max_splits` and
    `min_tokens` (least tokens of a split) are those of the attention's configuration. With `rows` the plan
    also writes what each row feeds.

    Raises:
        InvalidConfig: fewer than B + 1 places.
    """
    num_rows, places = len(slots), len(items)
    if places <= num_rows:
        raise InvalidConfig(f"A plan for {num_rows} rows needs at least {num_rows + 1} places, not {places}.")
    padded = max(16, triton.next_power_of_2(num_rows))
    share = max(8, min(32, 8192 // padded))  # the plan compares each place with each row, in registers
    decode_plan_kernel[(triton.cdiv(places, share),)](
        slots,
        length,
        tokens,
        block_table,
        items if rows is None else rows.token_ids,
        items if rows is None else rows.positions,
        items if rows is None else rows.cache_slots,
        items,
        tokens.stride(0),
        block_table.stride(0),
        num_rows,
        places,
        window or 0,
        padded_rows=padded,
        places_a_program=share,
        tile=tile,
        max_splits=max_splits,
        min_tiles=max(1, min_tokens // tile),
        block_size=block_size,
        new_in_cache=int(new_in_cache),
        fill_rows=rows is not None,
        num_warps=4,
        **launch_options(dependent),
    )
