"""Kernels on groups: a program has a tile of one group, which it finds in a list.

Offsets inside a tile are 32 bits wide, from a place that is 64 bits wide: what a program holds are
mostly addresses, and with long ones they would not fit its registers.
"""

import triton
import triton.language as tl


@triton.jit
def _of_group(groups, field: tl.constexpr, group, n_groups):
    return tl.load(groups + field * n_groups + group)


@triton.jit
def _scores_of(groups, ends, group, n_groups):
    """Where the scores of a group start."""
    size = _of_group(groups, 1, group, n_groups)
    return tl.load(ends + 3 * n_groups + group) - size * _of_group(groups, 4, group, n_groups)


@triton.jit
def scores_of_tiles(
    hidden, weight, bias, entries, groups, ends, tiles, scores, n_groups, path, depth, hidden_row,
    weight_row, ROWS: tl.constexpr, CHILDREN: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of some rows of a group for some children of its node."""
    tile = tl.program_id(0)
    group = tl.load(tiles + tile)
    if group >= n_groups:
        return
    start = _of_group(groups, 0, group, n_groups)
    size = _of_group(groups, 1, group, n_groups)
    first_row = _of_group(groups, 2, group, n_groups)
    width = _of_group(groups, 3, group, n_groups)
    line = _of_group(groups, 4, group, n_groups)
    across = (width + CHILDREN - 1) // CHILDREN
    down = (size + ROWS - 1) // ROWS
    number = tile - (tl.load(ends + group) - across * down)
    first_member = number % down * ROWS
    first_child = number // down * CHILDREN
    member = tl.arange(0, ROWS)
    child = tl.arange(0, CHILDREN)
    asked = member < size - first_member
    there = child < width - first_child
    entry = tl.load(entries + start + first_member + member, mask=asked, other=0).to(tl.int32)
    states_of = hidden + (entry // path).to(tl.int64) * hidden_row
    vectors_of = weight + (first_row + first_child) * weight_row + child * weight_row
    total = tl.zeros((ROWS, CHILDREN), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        states = tl.load(
            states_of[:, None] + step[None, :], mask=asked[:, None] & inside[None, :], other=0.0
        )
        vectors = tl.load(
            vectors_of[:, None] + step[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        if WIDE:
            states = states.to(tl.float32)
            vectors = vectors.to(tl.float32)
        total = tl.dot(states, tl.trans(vectors), total, input_precision="ieee")
    if BIASED:
        of_children = tl.load(bias + first_row + first_child + child, mask=there, other=0.0)
        total += of_children.to(tl.float32)[None, :]
    into = _scores_of(groups, ends, group, n_groups) + first_member * line + first_child
    tl.store(
        scores + into + member[:, None] * line.to(tl.int32) + child[None, :],
        total,
        mask=asked[:, None] & there[None, :],
    )


@triton.jit
def log_probs_of_entries(
    scores, positions, entries, group_of, groups, ends, log_prob, lse, n_groups,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the child that each entry takes, and the logsumexp of its node."""
    place = tl.program_id(0).to(tl.int64)
    group = tl.load(group_of + place) - 1
    entry = tl.load(entries + place)
    start = _of_group(groups, 0, group, n_groups)
    width = _of_group(groups, 3, group, n_groups)
    line = _of_group(groups, 4, group, n_groups)
    scores += _scores_of(groups, ends, group, n_groups) + (place - start) * line
    if width == 0:
        tl.store(log_prob + entry, 0.0)
        return
    # One row decides between two children, the first of which has the score 0.
    binary = width == 1
    column = tl.load(positions + entry).to(tl.int64) - binary.to(tl.int64)
    peak = tl.where(binary, 0.0, -float("inf"))
    for first in range(0, width, BLOCK):
        child = first + tl.arange(0, BLOCK)
        score = tl.load(scores + child, mask=child < width, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(score, 0))
    # A bias of -inf takes children out; no difference of infinities where all are.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        child = first + tl.arange(0, BLOCK)
        score = tl.load(scores + child, mask=child < width, other=-float("inf"))
        total += tl.exp(score - peak)
    rest = tl.log(tl.sum(total, 0) + tl.where(binary, tl.exp(-peak), 0.0))
    chosen = tl.load(scores + column, mask=column >= 0, other=0.0)
    tl.store(log_prob + entry, (chosen - peak) - rest)
    tl.store(lse + place, peak + rest)


@triton.jit
def _slopes(scores, column, level, line, member, asked, child, first_child, there):
    """[the child is taken] - its probability, (rows, children); 0 beyond rows and children."""
    score = tl.load(
        scores + member[:, None] * line + child[None, :],
        mask=asked[:, None] & there[None, :],
        other=-float("inf"),
    )
    taken = (child[None, :] == (column - first_child)[:, None]) & asked[:, None]
    return tl.where(taken, 1.0, 0.0) - tl.exp(score - level[:, None])


@triton.jit
def _columns(positions, entry, width, asked):
    """Which of the rows of the node each entry takes; below 0 for none."""
    binary = (width == 1).to(tl.int32)
    return tl.load(positions + entry, mask=asked, other=-1) - binary


@triton.jit
def gradient_of_rows(
    weight, scores, positions, entries, lse, grad, groups, ends, tiles, parts, n_groups, shared,
    first_step, depth, last_step, weight_row, ROWS: tl.constexpr, CHILDREN: tl.constexpr,
    DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of each entry, for some of its numbers: from all children of the node."""
    tile = tl.program_id(0)
    group = tl.load(tiles + tile)
    if group >= n_groups:
        return
    start = _of_group(groups, 0, group, n_groups)
    size = _of_group(groups, 1, group, n_groups)
    first_row = _of_group(groups, 2, group, n_groups)
    width = _of_group(groups, 3, group, n_groups).to(tl.int32)
    line = _of_group(groups, 4, group, n_groups)
    number = tile - (tl.load(ends + n_groups + group) - (size + ROWS - 1) // ROWS)
    first_member = number * ROWS
    scores += _scores_of(groups, ends, group, n_groups) + first_member * line
    member = tl.arange(0, ROWS)
    asked = member < size - first_member
    place = start + first_member + member
    entry = tl.load(entries + place, mask=asked, other=0).to(tl.int32)
    column = _columns(positions, entry, width, asked)
    level = tl.load(lse + place, mask=asked, other=0.0)
    step = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = first_step + step < last_step
    child = tl.arange(0, CHILDREN)
    weight += first_row * weight_row + first_step
    total = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for first in range(0, width, CHILDREN):
        there = child < width - first
        slope = _slopes(
            scores + first, column, level, line.to(tl.int32), member, asked, child, first, there
        )
        vectors = tl.load(
            weight + child[:, None] * weight_row + step[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDE:
            vectors = vectors.to(tl.float32)
        weight += CHILDREN * weight_row
        total = tl.dot(slope.to(vectors.dtype), vectors, total, input_precision="ieee")
    # What comes from upstream is often too small for half precision: it is multiplied here.
    total *= tl.load(grad + entry // shared, mask=asked, other=0.0).to(tl.float32)[:, None]
    tl.store(
        parts + (entry.to(tl.int64) * depth)[:, None] + step[None, :],
        total,
        mask=asked[:, None] & inside[None, :],
    )


@triton.jit
def _add_rows(
    total, summed, hidden, scores, positions, entries, lse, grad, first, size, start, line, width,
    child, first_child, there, step, inside, back, path, shared, hidden_row, ROWS: tl.constexpr,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What some rows of a group add to the gradient of some children."""
    member = tl.arange(0, ROWS)
    asked = member < size - first
    place = start + first + member
    entry = tl.load(entries + place, mask=asked, other=0).to(tl.int32)
    column = _columns(positions, entry, width, asked)
    level = tl.load(lse + place, mask=asked, other=0.0)
    slope = _slopes(
        scores + first * line + first_child, column, level, line.to(tl.int32), member, asked,
        child, first_child, there,
    )  # fmt: skip
    slope *= tl.load(grad + entry // shared, mask=asked, other=0.0).to(tl.float32)[:, None] / back
    if TO_BIAS:
        summed += tl.sum(slope, 0)
    if TO_WEIGHT:
        states_of = hidden + (entry // path).to(tl.int64) * hidden_row
        states = tl.load(
            states_of[:, None] + step[None, :], mask=asked[:, None] & inside[None, :], other=0.0
        )
        if WIDE:
            states = states.to(tl.float32)
        flipped = tl.trans(slope.to(states.dtype))
        total = tl.dot(flipped, states, total, input_precision="ieee")
    return total, summed


@triton.jit
def gradient_of_children(
    hidden, scores, positions, entries, lse, grad, groups, ends, tiles, weight_gradient,
    bias_gradient, touched, scale, n_groups, path, shared, depth, hidden_row, ROWS: tl.constexpr,
    MANY: tl.constexpr, CHILDREN: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of some children of a node, for some of their numbers: from all rows of its group.

    MANY rows at a time, of which the root has thousands; and what is left ROWS at a time, which is
    all there is of most groups.
    """
    tile = tl.program_id(0)
    group = tl.load(tiles + tile)
    if group >= n_groups:
        return
    start = _of_group(groups, 0, group, n_groups)
    size = _of_group(groups, 1, group, n_groups)
    first_row = _of_group(groups, 2, group, n_groups)
    width = _of_group(groups, 3, group, n_groups)
    line = _of_group(groups, 4, group, n_groups)
    scores += _scores_of(groups, ends, group, n_groups)
    across = (width + CHILDREN - 1) // CHILDREN
    number = tile - (tl.load(ends + 2 * n_groups + group) - across)
    first_child = (number * CHILDREN).to(tl.int32)
    child = tl.arange(0, CHILDREN)
    there = child < width - first_child
    step = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    inside = step < depth
    back = 1.0
    if SCALED:
        back = tl.load(scale)
    total = tl.zeros((CHILDREN, DEPTH), dtype=tl.float32)
    summed = tl.zeros((CHILDREN,), dtype=tl.float32)
    whole = size // MANY * MANY
    for first in range(0, whole, MANY):
        total, summed = _add_rows(
            total, summed, hidden, scores, positions, entries, lse, grad, first, size, start,
            line, width, child, first_child, there, step, inside, back, path, shared, hidden_row,
            MANY, TO_WEIGHT, TO_BIAS, WIDE,
        )  # fmt: skip
    for first in range(whole, size, ROWS):
        total, summed = _add_rows(
            total, summed, hidden, scores, positions, entries, lse, grad, first, size, start,
            line, width, child, first_child, there, step, inside, back, path, shared, hidden_row,
            ROWS, TO_WEIGHT, TO_BIAS, WIDE,
        )  # fmt: skip
    into = first_row + first_child
    if PACKED:
        into = tl.load(ends + 4 * n_groups + group) - width + first_child
    if TO_WEIGHT:
        tl.store(
            weight_gradient + into * depth + child[:, None] * depth + step[None, :],
            (total * back).to(weight_gradient.dtype.element_ty),
            mask=there[:, None] & inside[None, :],
        )
    if tl.program_id(1) == 0:
        if PACKED:
            tl.store(touched + into + child, first_row + first_child + child, mask=there)
        if TO_BIAS:
            tl.store(
                bias_gradient + into + child,
                (summed * back).to(bias_gradient.dtype.element_ty),
                mask=there,
            )
