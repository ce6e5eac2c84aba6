"""Loops over trees, compiled by Numba and cached on disk.

They are loops because a tree may be as deep as it has classes. This module is imported inside
functions, so that ``import lastlayer.trees`` does not load Numba.

``start`` and ``child`` list the children of inner nodes: the children of node v are
``child[start[v]:start[v + 1]]``, an inner node if not negative, else ``~class``. Ids and positions
are int32 or int64, offsets int64, masses float64, vectors float32.
"""

import heapq
import math

import numpy as np
from numba import njit

# Iterations of the power method; maximum iterations of 2-means and EM together.
_POWER, _PASSES = 3, 12
# 2-means and EM have converged if less than this share of the weight changes sides.
_SETTLED = 1e-3
# Differences below this share of the mean square are rounding errors.
_NOTHING = 1e-12
# Lower bound of the variance, relative to the mean square: with 0, responsibilities are 0 or 1.
_LEAST_VARIANCE = 1e-9
_FAST = {"reassoc", "contract", "nsz", "arcp"}


@njit(nogil=True, cache=True)
def breadth_first(start, child, root):
    """The tree below ``root``, numbered level by level; nodes with a single child are contracted.

    Returns the new ``start`` and ``child``, the old number of each inner node, and the number of
    nodes visited, including contracted ones and leaves.
    """
    met = 1
    while root >= 0 and start[root + 1] - start[root] == 1:
        root = child[start[root]]
        met += 1
    n_old = len(start) - 1
    origin = np.empty(max(n_old, 1), np.int64)
    new_start = np.zeros(n_old + 1, np.int64)
    new_child = np.empty(len(child), np.int64)
    n = 0
    if root >= 0:
        origin[0] = root
        n = 1
    filled = 0
    v = 0
    while v < n:
        old = origin[v]
        for edge in range(start[old], start[old + 1]):
            below = child[edge]
            met += 1
            while below >= 0 and start[below + 1] - start[below] == 1:
                below = child[start[below]]
                met += 1
            if below >= 0:
                origin[n] = below
                below = n
                n += 1
            new_child[filled] = below
            filled += 1
        v += 1
        new_start[v] = filled
    return new_start[: n + 1], new_child[:filled], origin[:n], met


@njit(nogil=True, cache=True)
def add_up(parent, values):
    """Add to every node the values below it, in place."""
    for v in range(len(parent) - 1, 0, -1):
        values[parent[v]] += values[v]


@njit(nogil=True, cache=True)
def add_down(parent, values):
    """Add to every node the values of its ancestors, in place."""
    for v in range(1, len(parent)):
        values[v] += values[parent[v]]


@njit(nogil=True, cache=True)
def fill_paths(leaf_edge, owner, start, parent, position, path_start, path_node, path_position):
    """Write the nodes and positions of each path, starting from the leaf."""
    for path in range(len(leaf_edge)):
        node = owner[leaf_edge[path]]
        taken = np.int32(leaf_edge[path] - start[node])
        for place in range(path_start[path + 1] - 1, path_start[path] - 1, -1):
            path_node[place] = node
            path_position[place] = taken
            taken = position[node]
            node = parent[node]


@njit(nogil=True, cache=True)
def cost_of_several_paths(class_start, path_start, path_node, node_cost):
    """For each class the total cost of the nodes on its paths, each node counted once."""
    n_classes = len(class_start) - 1
    seen_by = np.full(len(node_cost), -1, np.int64)
    cost = np.zeros(n_classes, np.int64)
    for c in range(n_classes):
        for place in range(path_start[class_start[c]], path_start[class_start[c + 1]]):
            node = path_node[place]
            if seen_by[node] != c:
                seen_by[node] = c
                cost[c] += node_cost[node]
    return cost


@njit(nogil=True, cache=True)
def nodes_to_merge(start, child, rank, arity):
    """Whether each node is merged into an ancestor; those with the lowest rank are merged first."""
    n = len(start) - 1
    merged = np.zeros(n, np.int32)
    for node in range(n):
        # Parents have lower numbers, so it is known by now whether this node remains.
        if merged[node]:
            continue
        wide = start[node + 1] - start[node]
        waiting = [(0.0, 0)]
        waiting.pop()
        for edge in range(start[node], start[node + 1]):
            if child[edge] >= 0:
                heapq.heappush(waiting, (rank[child[edge]], int(child[edge])))
        while len(waiting) > 0:
            best = heapq.heappop(waiting)[1]
            more = start[best + 1] - start[best] - 1
            if wide + more > arity:
                continue
            wide += more
            merged[best] = 1
            for edge in range(start[best], start[best + 1]):
                if child[edge] >= 0:
                    heapq.heappush(waiting, (rank[child[edge]], int(child[edge])))
    return merged


@njit(nogil=True, cache=True)
def merged_children(start, child, merged):
    """The children of the remaining nodes, from left to right; merged nodes have none."""
    n = len(start) - 1
    new_start = np.zeros(n + 1, np.int64)
    new_child = np.empty(len(child), np.int64)
    filled = 0
    stack = np.empty(len(child) + 1, np.int64)
    for node in range(n):
        if not merged[node]:
            top = 0
            for edge in range(start[node + 1] - 1, start[node] - 1, -1):
                stack[top] = child[edge]
                top += 1
            while top > 0:
                top -= 1
                below = stack[top]
                if below >= 0 and merged[below]:
                    for edge in range(start[below + 1] - 1, start[below] - 1, -1):
                        stack[top] = child[edge]
                        top += 1
                else:
                    new_child[filled] = below
                    filled += 1
        new_start[node + 1] = filled
    return new_start, new_child[:filled]


@njit(nogil=True, cache=True)
def huffman_merge(weights, arity):
    """Huffman's tree of ascending weights, with two queues: leaves, and inner nodes as created.

    Returns ``start`` and ``child`` with the root last. A leaf is ``~index`` into ``weights``; the
    heaviest child of a node is first.
    """
    n = len(weights)
    n_inner = (n - 2) // (arity - 1) + 1 if n > 1 else 0
    start = np.zeros(n_inner + 1, np.int64)
    child = np.empty(max(0, n + n_inner - 1), np.int64)
    mass = np.empty(n_inner)
    # The first merge may have fewer children, so that all other nodes have ``arity``.
    size = 2 + (n - 2) % (arity - 1)
    leaf = 0
    oldest = 0
    for node in range(n_inner):
        total = 0.0
        end = start[node] + size
        for place in range(end - 1, start[node] - 1, -1):
            if leaf < n and (oldest >= node or weights[leaf] <= mass[oldest]):
                total += weights[leaf]
                child[place] = ~leaf
                leaf += 1
            else:
                total += mass[oldest]
                child[place] = oldest
                oldest += 1
        mass[node] = total
        start[node + 1] = end
        size = arity
    return start, child


@njit(nogil=True, cache=True)
def huffman_of_groups(mass, group_start):
    """Huffman's binary tree of each group: the children of all nodes, and the roots."""
    n_groups = len(group_start) - 1
    child = np.empty(2 * (len(mass) - n_groups), np.int64)
    roots = np.empty(n_groups, np.int64)
    base = 0
    for group in range(n_groups):
        first, end = group_start[group], group_start[group + 1]
        order = np.argsort(mass[first:end], kind="mergesort")
        _, merged = huffman_merge(mass[first:end][order], 2)
        for place in range(len(merged)):
            node = merged[place]
            child[2 * base + place] = node + base if node >= 0 else ~(first + order[~node])
        base += end - first - 1
        roots[group] = base - 1
    return child, roots


@njit(nogil=True, cache=True)
def _group_cost(share, first, end):
    """Expected vectors per row for a group: 1, plus its size times its total probability."""
    if end - first == 1:
        return 1.0
    return 1.0 + (share[end] - share[first]) * (end - first)


@njit(nogil=True, cache=True)
def best_groups(share):
    """The cuts of least total cost, from left to right; ``share`` has cumulative probabilities.

    The best first class of a group moves right with the end of the group, since adding a class
    costs more in a larger group. So each first class is best for one range of ends, and these
    ranges are kept in a queue.
    """
    n = len(share) - 1
    best = np.zeros(n + 1)
    came_from = np.zeros(n + 1, np.int64)
    first = np.zeros(n + 1, np.int64)
    since = np.ones(n + 1, np.int64)
    head = 0
    tail = 1
    for end in range(1, n + 1):
        while head + 1 < tail and since[head + 1] <= end:
            head += 1
        came_from[end] = first[head]
        best[end] = best[first[head]] + _group_cost(share, first[head], end)
        if end == n:
            break
        while since[tail - 1] > end:
            rival = best[first[tail - 1]] + _group_cost(share, first[tail - 1], since[tail - 1])
            if best[end] + _group_cost(share, end, since[tail - 1]) > rival:
                break
            tail -= 1
        last = first[tail - 1]
        low, high = max(end, since[tail - 1]), n + 1
        while high - low > 1:
            middle = (low + high) // 2
            rival = best[last] + _group_cost(share, last, middle)
            if best[end] + _group_cost(share, end, middle) <= rival:
                high = middle
            else:
                low = middle
        if high <= n:
            first[tail] = end
            since[tail] = high
            tail += 1
    ends = np.empty(n + 1, np.int64)
    place = n
    end = n
    while end > 0:
        ends[place] = end
        end = came_from[end]
        place -= 1
    ends[place] = 0
    return ends[place:]


# Two clusters in each of many groups. A group is centred first. Let w be the weight of each vector
# x, r its responsibility, W₀ and W₁ the total weights of the two clusters, and S = Σ w r x. Since
# the weighted sum of the group is zero, the means are −S / W₀ and S / W₁, so the single vector S
# determines both. Half the difference of the squared distances of x to the two means is
#
#     s = x·S (1/W₀ + 1/W₁) − |S|² (1/W₁² − 1/W₀²) / 2.
#
# The common variance σ² is Σ w |x|² − |S|² (1/W₀ + 1/W₁), divided by the total weight and the
# number of dimensions; the log-odds of the second cluster are s / σ² + log W₁ / W₀. So one step of
# 2-means or EM is a single pass over the group.


@njit(nogil=True, cache=True, fastmath=_FAST)
def _dot(x, direction):
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * direction[i]
    return total


@njit(nogil=True, cache=True, fastmath=_FAST)
def _add_scaled(total, factor, x):
    for i in range(len(x)):
        total[i] += factor * x[i]


@njit(nogil=True, cache=True)
def centre(x, weight):
    """Subtract the mean in place; returns the weighted sum of squares after and before."""
    mean = np.zeros(x.shape[1])
    total = 0.0
    before = 0.0
    for row in range(len(x)):
        _add_scaled(mean, weight[row], x[row])
        before += weight[row] * _dot(x[row], x[row])
        total += weight[row]
    middle = (mean / total).astype(np.float32)
    after = 0.0
    for row in range(len(x)):
        for i in range(x.shape[1]):
            x[row, i] -= middle[i]
        after += weight[row] * _dot(x[row], x[row])
    return after, before


@njit(nogil=True, cache=True)
def _main_direction(x, weight, seed):
    """Approximate direction of the largest variance, by the power method from random signs."""
    direction = np.empty(x.shape[1], np.float32)
    bits = np.uint64(seed)
    for i in range(len(direction)):
        # Steps of splitmix64.
        bits += np.uint64(0x9E3779B97F4A7C15)
        mixed = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        direction[i] = np.float32(1.0) if (mixed >> np.uint64(63)) else np.float32(-1.0)
    for _ in range(_POWER):
        total = np.zeros(x.shape[1])
        for row in range(len(x)):
            _add_scaled(total, weight[row] * _dot(x[row], direction), x[row])
        largest = np.abs(total).max()
        if largest == 0.0:
            break
        direction = (total / largest).astype(np.float32)
    return direction


@njit(nogil=True, cache=True, error_model="numpy")
def log_odds(x, weight, squares, seed, odds):
    """Write the log-odds of the second cluster to ``odds``; False if there are no two clusters."""
    n, d = x.shape
    every = weight.sum()
    direction = _main_direction(x, weight, seed)
    # Log-odds are scale · x·direction − offset; until 2-means has converged only the sign is used.
    scale, offset, soft = 1.0, 0.0, False
    share = np.full(n, -1.0)
    for _ in range(_PASSES):
        total = np.zeros(d)
        second = 0.0
        moved = 0.0
        for row in range(n):
            odds[row] = scale * _dot(x[row], direction) - offset
            if soft:
                responsible = 1.0 / (1.0 + math.exp(-odds[row]))
            else:
                responsible = 1.0 if odds[row] > 0.0 else 0.0
            moved += weight[row] * abs(responsible - share[row])
            share[row] = responsible
            if responsible > 0.0:
                _add_scaled(total, weight[row] * responsible, x[row])
                second += weight[row] * responsible
        first = every - second
        largest = np.abs(total).max()
        if not (first > _NOTHING * every and second > _NOTHING * every and largest > 0.0):
            return False
        if moved <= _SETTLED * every:
            if soft:
                break
            soft = True
        length = (total * total).sum()
        between = 1.0 / first + 1.0 / second
        variance = max(squares - length * between, _LEAST_VARIANCE * squares) / (d * every)
        direction = (total / largest).astype(np.float32)
        scale = between * largest / variance
        offset = 0.5 * length * (1.0 / second**2 - 1.0 / first**2) / variance
        if soft:
            offset -= math.log(second / first)
    return True


@njit(nogil=True, cache=True)
def _cut_in_half(weight):
    """The cut with the most similar weights on both sides; of equal ones the most central."""
    n = len(weight)
    half = 0.5 * weight.sum()
    best, cut, so_far = np.inf, 1, 0.0
    for place in range(1, n):
        so_far += weight[place - 1]
        apart = abs(so_far - half)
        nearer = abs(2 * place - n) < abs(2 * cut - n) or (n % 2 == 1 and 2 * place == n + 1)
        if apart < best or (apart == best and nearer):
            best, cut = apart, place
    return cut


@njit(nogil=True, cache=True)
def split_groups(
    start, stop, x, weight, group_start, seed, by_odds, levels_left, unsure, order, odds, cuts
):
    """Sort the rows of each group by their log-odds, and cut each group in two.

    Processes the groups whose first row is from ``start`` to ``stop``; groups differ in size, so
    work is divided among threads by rows. The vectors ``x`` are centred in place. The cut is where
    log-odds change sign if ``by_odds``, else in half; also in half if a side could need more than
    ``levels_left`` levels. Rows with log-odds closer to 0 than ``unsure`` are on both sides.
    Outputs: ``order``, the sorted rows; ``odds``, their log-odds; ``cuts`` ``(groups, 3)``: start
    of the second side, cut, and end of the first side.
    """
    group = np.searchsorted(group_start, start)
    while group < len(group_start) - 1 and group_start[group] < stop:
        first, end = group_start[group], group_start[group + 1]
        n = end - first
        weights = weight[first:end].copy()
        if weights.sum() == 0.0:
            weights[:] = 1.0
        order[first:end] = np.arange(first, end)
        odds[first:end] = 0.0
        apart = False
        if n > 2:
            rows = x[first:end]
            after, before = centre(rows, weights)
            if after > _NOTHING * before:
                apart = log_odds(rows, weights, after, seed + group, odds[first:end])
        if apart:
            ranks = np.argsort(odds[first:end], kind="mergesort")
            order[first:end] += ranks - np.arange(n)
            odds[first:end] = odds[first:end][ranks]
            weights = weights[ranks]
        cut = _cut_in_half(weights)
        low = high = cut
        deep = n > 2 and (n - 2) >> min(levels_left, 62) > 0
        if deep:
            low = cut = high = (n + 1) // 2
        elif by_odds and apart:
            place = np.searchsorted(odds[first:end], 0.0, side="right")
            if 0 < place < n:
                cut = place
                low = max(1, np.searchsorted(odds[first:end], -unsure, side="right"))
                high = min(n - 1, np.searchsorted(odds[first:end], unsure, side="left"))
                low, high = min(low, cut), max(high, cut)
        cuts[group, 0] = first + low
        cuts[group, 1] = first + cut
        cuts[group, 2] = first + high
        group += 1
