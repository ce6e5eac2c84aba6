"""Compiles Triton kernels for an H100 or H200, on a machine that has no GPU; prints each."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lastlayer.kernels import _triton
from lastlayer.kernels.attention import triton as attention
from lastlayer.kernels.context_lists import triton as context_lists
from lastlayer.kernels.entmax import triton as entmax
from lastlayer.kernels.entmax_rows import triton as entmax_rows
from lastlayer.kernels.info_nce import triton as info_nce
from lastlayer.kernels.label_loss import triton as label_loss
from lastlayer.kernels.linear_softmax import triton as linear_softmax
from lastlayer.kernels.node_groups import triton as node_groups
from lastlayer.kernels.prediction import triton as prediction
from lastlayer.kernels.products import triton as products
from lastlayer.kernels.rng import triton as rng
from lastlayer.kernels.sampled_rows import triton as sampled_rows
from lastlayer.kernels.score_loss import triton as score_loss
from lastlayer.kernels.search import triton as search
from lastlayer.kernels.softmax_rows import triton as softmax_rows
from lastlayer.kernels.span_sums import triton as span_sums
from lastlayer.kernels.topk_softmax import triton as topk_softmax
from lastlayer.kernels.touched_rows import triton as touched_rows
from lastlayer.kernels.tree_path import triton as tree_path
from lastlayer.kernels.zlpr import triton as zlpr

TENSORS = {"indices": "*i64", "size": "*i64", "peaks": "*fp32", "chosen": "*i32"}
TENSORS |= {
    "alphas": "*fp32",
    "by_alpha": "*fp32",
    "sums": "*fp32",
    "excess": "fp32",
    "log_n": "fp32",
}
TENSORS |= dict.fromkeys(("target_scores", "row_scale", "class_weight", "loss", "values"), "*fp32")
TENSORS |= dict.fromkeys(("classes", "target", "entries"), "*i64")
TENSORS |= {"log_k": "fp32", "alpha": "fp32", "factor": "*fp32"}
TENSORS |= dict.fromkeys(("losses", "weights", "stats", "by_alpha"), "*fp32")
OF_SCORES = ("bias", "scores", "rows", "out", "zeros", "probs", "grad", "gradient")

BLOCKS = dict(BLOCKS=128, WIDTH=64, GROUP=16)
WITH_LOSS = dict(LOSS=True, SCALED=True)
ONE_ROW, MANY_ROWS = dict(ROWS=1, WIDTH=1024), dict(ROWS=64, WIDTH=16)
CASES = [
    (_triton._find_peaks, "*bf16", dict(BLOCKS=32, WIDTH=64, ZEROS=True, BIASED=False)),
    *[
        (
            entmax._forward_in_registers,
            dtype,
            dict(**tile, KIND=kind, PER_ROW=kind == 0, COMPACT=c, SHRINK=1.0),
        )
        for dtype, tile, kind, c in (
            ("*fp32", MANY_ROWS, 1, False),
            ("*bf16", ONE_ROW, 2, True),
            ("*fp16", ONE_ROW, 0, False),
        )
    ],
    *[
        (
            entmax._forward_of_chosen,
            dtype,
            dict(**BLOCKS, KIND=kind, PER_ROW=kind == 0, COMPACT=c, IN_ONE=one, SHRINK=0.9),
        )
        for dtype, kind, c, one in (
            ("*fp32", 1, False, True),
            ("*bf16", 2, True, False),
            ("*fp32", 0, False, False),
        )
    ],
    *[
        (
            entmax_rows._list_rows,
            "*fp32",
            dict(**tile, KIND=kind, ENTROPY=entropy, GRADIENT=True, WEIGHTED=True),
        )
        for tile, kind, entropy in ((ONE_ROW, 0, 3), (MANY_ROWS, 2, 2), (MANY_ROWS, 0, 0))
    ],
    *[
        (entmax._backward_in_registers, "*bf16", dict(**tile, KIND=k, PER_ROW=not k, LEARNED=not k))
        for tile, k in ((ONE_ROW, 2), (ONE_ROW, 0), (MANY_ROWS, 0))
    ],
    (entmax._backward_sums, "*fp32", dict(BLOCKS=32, WIDTH=64, KIND=1)),
    *[
        (entmax._backward_of_chosen, "*fp32", dict(**BLOCKS, KIND=k, PER_ROW=not k, LEARNED=not k))
        for k in (0, 1)
    ],
    (
        topk_softmax._forward_in_registers,
        "*bf16",
        dict(WIDTH=1024, SHIFT=16, BIASED=False, LOSS=True, SCALED=True, LOGS=False),
    ),
    (
        topk_softmax._forward_of_chosen,
        "*fp32",
        dict(**BLOCKS, IN_ONE=False, SHIFT=0, BIASED=False, LOSS=True, SCALED=False, LOGS=False),
    ),
    (
        topk_softmax._forward_in_registers,
        "*fp32",
        dict(WIDTH=16384, SHIFT=0, BIASED=True, LOSS=False, SCALED=False, LOGS=True),
    ),
    (
        topk_softmax._forward_of_chosen,
        "*fp32",
        dict(**BLOCKS, IN_ONE=False, SHIFT=0, BIASED=True, LOSS=False, SCALED=False, LOGS=True),
    ),
    *[
        (
            score_loss._forward,
            dtype,
            dict(
                **BLOCKS,
                BLOCK=1024,
                KIND=kind,
                ENTROPY=kind or 4,
                DENSE=dense,
                LABELS=dense,
                IN_ONE=dense,
                WEIGHTED=not dense,
                IGNORES=not dense,
                MEAN=dense,
            ),
        )
        for dtype, kind, dense in (("*bf16", 1, False), ("*fp32", 2, True), ("*fp32", 0, False))
    ],
    *[
        (
            score_loss._backward,
            "*bf16",
            dict(**BLOCKS, BLOCK=1024, KIND=kind, DENSE=dense, PER_ROW=dense, LEARNED=kind == 0),
        )
        for kind, dense in ((1, False), (2, True), (0, True), (0, False))
    ],
]


LONGS = ("target", "classes", "order", "starts", "argmax", "rank")
FLOATS = ("target_scores", "row_scale", "class_weight", "weight_sum", "loss", "lse", "entropy")
LONGS += ("path_start", "runs", "touched", "opened")
INTS = ("path_edge", "rank", "keys", "level_start")
INTS += ("child", "ids")
FLOATS += (
    "losses",
    "factors",
    "exact",
    "row_weight",
    "more",
    "slopes",
    "gradient",
    "pieces",
    "share",
    "numbers",
)
FLOATS += (
    "first",
    "second",
    "third",
    "log2_lse",
    "push",
    "pull",
    "size",
    "mean",
    "bias_gradient",
    "true",
    "factor",
)
NUMBERS = ("scale", "keep", "smoothing", "z_loss", "softcap", "inverse_temperature", "alpha")
HALVES = (
    "hidden",
    "states",
    "scaled",
    "weight",
    "bias",
    "weight_gradient",
    "scores",
    "probs",
    "values",
    "out",
)
FUSED_TYPES = (
    dict.fromkeys(LONGS, "*i64")
    | dict.fromkeys(FLOATS, "*fp32")
    | dict.fromkeys(NUMBERS, "fp32")
    | dict.fromkeys(HALVES, "*bf16")
    | dict.fromkeys(INTS, "*i32")
)
ALL = dict.fromkeys(("GRADIENT", "WEIGHTED", "SMOOTH", "CAPPED", "STATISTICS", "GIVEN"), True)
TILE = dict(EVEN=False, BIASED=True, CAPPED=True)
TO_BOTH = dict(TO_NODES=True, TO_HIDDEN=True)
SEARCH = dict(WIDTH=16, GROUP=16, BEAM_DEPTH=256, DEPTH=256)
RUNS = dict(WIDTH=512, PLACED=True, TO_WEIGHT=True, TO_BIAS=True)
FUSED_CASES = [
    (softmax_rows._softmax_row, dict(BLOCK=4096, **ALL)),
    *[
        (
            softmax_rows._reduced_row,
            dict(
                BLOCK=4096,
                DEPTH=1024,
                MEAN=full,
                GRADIENT=full,
                MASKED=full,
                BIASED=full,
                ROUNDED=full,
                SMOOTH=full,
                CAPPED=full,
                **({} if full else dict(bias=None, ignored=None)),
            ),
        )
        for full in (False, True)
    ],
    (softmax_rows._gradient, dict(WIDTH=4096, CAPPED=True)),
    (entmax_rows._entmax_row, dict(BLOCK=4096, GRADIENT=True, KIND=0)),
    (entmax_rows._flat_row, dict(BLOCK=4096, GRADIENT=True, KIND=2)),
    (products._class_scores, dict(GROUP=4, DEPTH=1024, BIASED=True)),
    (products._gather_classes, dict(GROUP=16, WIDTH=512)),
    (products._gather_rows, dict(GROUP=16, WIDTH=512)),
    (products._scale, dict(BLOCK=4096)),
    (
        linear_softmax._mix_of_rows,
        dict(ROWS=64, CLASSES=64, DEPTH=64, MEAN=True, **TILE),
    ),
    (
        linear_softmax._gradient_of_classes,
        dict(ROWS=64, CLASSES=64, DEPTH=64, BIAS_GRADIENT=True, ADD=True, SIZED=True, **TILE),
    ),
    (
        linear_softmax._finish_row,
        dict(PARTS=16, DEPTH=64, WEIGHTED=True, MORE=True, SCALED=True, MEAN=True, CAPPED=True),
    ),
    (tree_path._sort_keys, dict(IGNORES=True, ROWS=1024)),
    (tree_path._place_rows, dict(IGNORES=True, ROWS=32, OTHERS=256)),
    (
        tree_path._losses_of_rows,
        dict(NODES=8, WIDTH=512, IGNORES=True, BIASED=True, ORDERED=True, **TO_BOTH),
    ),
    (tree_path._compare_paths, dict(IGNORES=True, ROWS=32, LEVELS=32, **RUNS)),
    (tree_path._sum_tiles, dict(TILE=64, LEVELS=4, GROUP=4, TO_HIDDEN=True, **RUNS)),
    (tree_path._sum_pieces, dict(TILE=64, GROUP=16, **RUNS)),
    (search._search, dict(NODES=512, LEAVES=512, BIASED=True, **SEARCH)),
]


INTEGERS = dict.fromkeys(("counter", "order", "ids", "table", "weight"), "*i64")
DRAWN_TYPES = INTEGERS | {"log_prob": "*fp32", "target": "*i64", "made": "*i64"}
DRAWN_CASES = [
    (rng._words, dict(BLOCKS=128)),
    (rng._integers, dict(BLOCKS=128)),
    (rng._ranks, dict(BLOCKS=128, OCTAVES=19.93, ORDERED=True)),
    (rng._draw, dict(BITS=20, PAIRS=64)),
    (rng._complement, dict(BITS=63, BLOCK=128)),
]

LIST_LONGS = ("context", "counter", "mixture", "table", "unigram", "keys", "end", "mass", "keys_2")
LIST_LONGS += ("end_2", "mass_2", "ids", "used", "place")
LIST_TYPES = (
    dict.fromkeys(LIST_LONGS, "*i64")
    | dict.fromkeys(("log_prob", "log_q", "scores", "ess", "sums"), "*fp32")
    | dict.fromkeys(("made", "values", "matters", "slopes"), "*fp64")
    | dict.fromkeys(("classes", "classes_2", "found"), "*i32")
    | dict.fromkeys(("hidden", "weight", "bias"), "*bf16")
    | dict.fromkeys(("enough", "rate", "rate_rest"), "fp32")
)
LISTED = dict(ORDER=3, BITS=15, SEARCH=9)
NEAR = dict(NEAR=128, OTHERS=64)
LIST_CASES = [
    (context_lists._draw, dict(DRAWS=64, **LISTED)),
    (context_lists._log_prob, dict(DRAWS=64, **LISTED)),
    (context_lists._until, dict(DRAWS=64, DEPTH=128, BIASED=True, **LISTED)),
    (context_lists._weigh, dict(**LISTED, **NEAR)),
    (context_lists._place, dict(K=1, ORDER=3, FIRST=True, OTHERS=1024)),
    (context_lists._place, dict(K=0, ORDER=2, FIRST=False, OTHERS=1024)),
    (context_lists._merge, NEAR),
    (context_lists._move_mixture, dict(ORDER=2, BLOCK=256)),
]

NAMES = ("lr", "kept", "eps", "beta1", "beta2", "new1", "new2", "log1", "log2")
UPDATE_TYPES = (
    dict.fromkeys(NAMES, "fp32")
    | dict.fromkeys(("weight", "gradient"), "*bf16")
    | dict.fromkeys(("total", "first", "second"), "*fp32")
    | {"ids": "*i64", "step": "*i64", "row_step": "*i32"}
)
UPDATE_CASES = [
    (touched_rows._adagrad, dict(WIDTH=512)),
    (touched_rows._adam, dict(WIDTH=512, DECAYS=True)),
    (touched_rows._adam, dict(WIDTH=512, DECAYS=False)),
]

SAMPLED = dict(HITS=True, AVERAGE=True, SHIFTED=True, EXACT=True, GRADIENT=True)
SUMMED = dict(COLUMNS=True, ADDS=True)
NO_ENDING = dict(numbers=None, push=None, ONE=False, WITH_TARGET=False, PUSH=False, MEAN=False)
ONE = dict(offset=None, shift=None, exact=None, row_scale=None, ONE=True, PUSH=True)
ONE |= dict(MEAN=True, WITH_TARGET=True)
OF_ROWS = ("offset", "shift", "exact", "row_scale", "first", "second", "columns", "numbers")
OF_ROWS += ("push", "scores")
SAMPLED_TYPES = (
    dict.fromkeys(OF_ROWS, "*fp32")
    | {"gradient": "*bf16"}
    | {"ids": "*i32", "target": "*i64", "factor": "fp32"}
)
SAMPLED_CASES = [
    (
        sampled_rows._rows,
        dict(BLOCK=8192, KEPT=True, LOGISTIC=False, HEAD=False, **NO_ENDING, **SUMMED, **SAMPLED),
    ),
    (
        sampled_rows._rows,
        dict(BLOCK=4096, KEPT=False, LOGISTIC=True, HEAD=True, **NO_ENDING, **SUMMED, **SAMPLED),
    ),
    *[
        (
            sampled_rows._rows,
            dict(
                BLOCK=8192, KEPT=True, LOGISTIC=logistic, HEAD=False, columns=None, **ONE, **SUMMED,
                **SAMPLED,
            ),
        )
        for logistic in (False, True)
    ],
    (sampled_rows._long_rows, dict(BLOCK=4096, LOGISTIC=False, **NO_ENDING, **SAMPLED)),
    (sampled_rows._long_rows, dict(BLOCK=4096, LOGISTIC=True, **ONE, **SAMPLED)),
]  # fmt: skip
START_TYPES = (
    dict.fromkeys(("row_shift", "of_targets", "shift", "upstream", "scratch"), "*fp32")
    | dict.fromkeys(("hidden", "weight", "bias", "clean", "vectors"), "*bf16")
    | dict.fromkeys(("target", "first", "second", "third", "counter"), "*i64")
    | dict.fromkeys(("less", "factor"), "fp32")
    | {"entries": "*i32", "numbers": "*fp32", "loss": "*fp32", "of_hidden": "*fp32"}
)
START = dict(CORRECTS=True, MEAN=True, WIDTH=512)
DRAWN = dict(of_targets=None, shift=None, upstream=None, row_shift=None, **START)
START_CASES = [
    (sampled_rows._start, dict(KIND=0, NUMBER=0.0, TARGETS=0, third=None, **START)),
    (sampled_rows._start, dict(KIND=1, NUMBER=9.2, TARGETS=2, second=None, third=None, **DRAWN)),
    (sampled_rows._start, dict(KIND=2, NUMBER=19.93, TARGETS=1, second=None, third=None, **DRAWN)),
    (sampled_rows._start, dict(KIND=2, NUMBER=19.93, TARGETS=2, **DRAWN)),
    (sampled_rows._start, dict(KIND=3, NUMBER=20, TARGETS=1, **DRAWN)),
    (sampled_rows._start, dict(KIND=3, NUMBER=20, TARGETS=2, **DRAWN)),
    (sampled_rows._total, dict(BLOCK=4096, COLUMNS=128, PARTS=32, WIDTH=512, COUNTS=True)),
]
TOUCHED_TYPES = (
    dict.fromkeys(("columns", "numbers", "factor", "weight", "bias", "partial"), "*fp32")
    | dict.fromkeys(("order", "starts", "known"), "*i64")
    | {"hidden": "*bf16", "keys": "*i32"}
)
TO_CLASSES = dict(WIDTH=256, WEIGHT=True, BIAS=True)
TOUCHED_CASES = [
    (touched_rows._segments, dict(BLOCK=16, GROUP=2, SCATTERED=False, **TO_CLASSES)),
    (
        touched_rows._runs_that_were_cut,
        dict(BLOCK=16, SEARCH=15, PARTS=8, SCATTERED=True, **TO_CLASSES),
    ),
]

SLAB_TYPES = {"scores": "*bf16", "smoothing": "fp32"} | dict.fromkeys(
    ("above", "below", "scale", "losses"), "*fp32"
)
SLAB_CASES = [
    (zlpr._slab_sums, dict(BLOCK=2048, NEGATED=True)),
    (zlpr._slab_gradient, dict(BLOCK=2048, NEGATED=True)),
]


_GROUP_LONGS = ("entries", "groups", "ends", "amounts", "row_start", "path_start", "child_start")
_GROUP_FLOATS = ("scores", "lse", "grad", "parts", "scale", "log_prob", "losses", "values", "best")
_GROUP_INTS = ("tiles", "positions", "group_of", "node", "position", "path_edge", "edge_node")
GROUP_TYPES = (
    dict.fromkeys(("hidden", "weight", "bias", "weight_gradient", "bias_gradient"), "*bf16")
    | dict.fromkeys((*_GROUP_LONGS, "target", "touched", "ids", "found"), "*i64")
    | dict.fromkeys((*_GROUP_FLOATS, "peaks", "levels"), "*fp32")
    | dict.fromkeys((*_GROUP_INTS, "by_node", "fresh", "group", "start"), "*i32")
)
TILES = dict(ROWS=16, CHILDREN=64, WIDE=False)
TO_CHILDREN = dict(MANY=32, DEPTH=256, PACKED=True, TO_WEIGHT=True, TO_BIAS=True)
GROUP_CASES = [
    (node_groups._entries_of_targets, dict(IGNORES=True, ROWS=32, LEVELS=8)),
    (node_groups._losses_of_targets, dict(IGNORES=True, ROWS=64, LEVELS=8)),
    (node_groups._mark_first, dict(BLOCK=256)),
    (node_groups._start_groups, dict(BLOCK=256)),
    (node_groups._measure_groups, dict(ROWS=16, CHILDREN=64, BLOCK=256)),
    (node_groups._list_tiles, dict(SEARCH=15, BLOCK=256)),
    (node_groups._scores_of_tiles, dict(DEPTH=128, BIASED=True, **TILES)),
    (node_groups._log_probs_of_entries, dict(BLOCK=1024)),
    (node_groups._gradient_of_rows, dict(DEPTH=256, **TILES)),
    (node_groups._gradient_of_children, dict(SCALED=True, **TO_CHILDREN, **TILES)),
    (search._peaks_and_levels, dict(ROWS=64, CLASSES=128, DEPTH=64, WIDE=False)),
    (search._largest, dict(WIDTH=8192, COLUMNS=False)),
    (search._largest, dict(WIDTH=1024, COLUMNS=True)),
]


LEAF_TYPES = (
    dict.fromkeys(("hidden", "weight", "bias"), "*bf16")
    | dict.fromkeys(("scores", "lse", "reached", "made"), "*fp32")
    | dict.fromkeys(("row_start", "child_start", "path_start", "classes"), "*i64")
    | dict.fromkeys(("nodes", "edge_node", "edge_row", "path_edge"), "*i32")
    | {"child": "*i32", "level_start": "*i32", "uniform": "*fp64"}
)
OF_TWO, OF_MANY = dict(CHILDREN=1, DEPTH=512), dict(CHILDREN=8, DEPTH=512)
LEAF_CASES = [
    (node_groups._normalise_nodes, dict(NODES=8, WIDTH=256, BIASED=True)),
    (node_groups._reach_edges, dict(ROWS=4, BLOCK=512, WIDE=True, BIASED=True)),
    (node_groups._reach_edges, dict(ROWS=4, BLOCK=512, WIDE=False, BIASED=True)),
    (search._draw_leaves, dict(BLOCK=256, BIASED=True, **OF_MANY)),
    (search._draw_leaves, dict(BLOCK=2, BIASED=True, **OF_TWO)),
    (search._follow_paths, dict(BIASED=True, **OF_MANY)),
    (search._follow_paths, dict(BIASED=True, **OF_TWO)),
]


NCE_FLOATS = ("scale", "row_parts", "column_parts", "row_lse", "row_push", "row_pull", "along")
NCE_FLOATS += ("column_lse", "column_push", "column_pull", "row_positive", "column_positive")
NCE_TYPES = (
    dict.fromkeys((*NCE_FLOATS, "gradient", "factor"), "*fp32")
    | dict.fromkeys(("scores", "out"), "*fp16")
    | {"query_groups": "*i32", "key_groups": "*i32", "rows": "*bf16"}
)
NCE_TILE = dict(ROWS=64, WIDTH=128, COLUMNS=True, BOUNDED=True)
NCE_CASES = [
    (info_nce._statistics, dict(SHARE=2048, GROUPS=0, **NCE_TILE)),
    (info_nce._statistics, dict(SHARE=2048, GROUPS=2, **NCE_TILE)),
    (info_nce._fold, dict(BLOCK=128, GROUPED=True)),
    (info_nce._weights, dict(PULLED=True, GROUPS=2, **NCE_TILE)),
    (info_nce._unit_row, dict(WIDTH=1024, NORMALIZE=True)),
    (info_nce._row_gradient, dict(WIDTH=1024, NORMALIZE=True)),
]

SPAN_FLOATS = ("vectors", "other_vectors", "bias", "other_bias", "found", "grad", "parts")
SPAN_TYPES = dict.fromkeys((*SPAN_FLOATS, "of_vectors", "of_bias"), "*fp32") | {
    "mask": "*u8",
    "target": "*i64",
    "since": "*i32",
}
SPAN_TILE = dict(SIDE=64, DEPTH=64, EVEN=True, SHARED=True, BIASED=True, MASKED=True)
SPAN_CASES = [
    (span_sums._walk, dict(LISTED=True, ENDS=False, GRADIENT=False, **SPAN_TILE)),
    (span_sums._walk, dict(LISTED=True, ENDS=True, GRADIENT=True, **SPAN_TILE)),
]

PREDICTED_TYPES = (
    dict.fromkeys(("scores", "peaks", "levels", "total", "values", "offset"), "*fp32")
    | dict.fromkeys(("uniform", "rest"), "*fp64")
    | dict.fromkeys(("softcap", "inverse_temperature"), "fp32")
    | {"bias": "*bf16", "chosen": "*i32", "found": "*i32", "classes": "*i64"}
)
PREDICTED = dict(BIASED=True, CAPPED=True)
NORMALISED = dict(NORMALISED=True, **PREDICTED)
PREDICTED_CASES = [
    (prediction._read_blocks, dict(BLOCKS=32, WIDTH=64, PEAKS=True, LEVELS=True, **PREDICTED)),
    (prediction._choose_blocks, dict(WIDTH=8192, PEAKS=True, LEVELS=True)),
    (
        prediction._best_of_blocks,
        dict(BLOCKS=128, WIDTH=64, BEST=128, COMPACT=False, WHOLE=False, **NORMALISED),
    ),
    (
        prediction._best_of_blocks,
        dict(BLOCKS=1, WIDTH=1024, BEST=16, COMPACT=False, WHOLE=True, **NORMALISED),
    ),
    (prediction._draw_blocks, dict(WIDTH=8192, DRAWS=16)),
    (prediction._draw_in_block, dict(WIDTH=128, COMPACT=True, **PREDICTED)),
    (prediction._log_softmax_row, dict(WIDTH=4096, MOVED=True, **PREDICTED)),
    (prediction._log_sigmoid_tile, dict(WIDTH=4096, **PREDICTED)),
]


FACTOR_TYPES = dict.fromkeys(("row_weight", "weights", "factors"), "*fp32")
FACTOR_TYPES |= dict.fromkeys(("target", "clean"), "*i64")
FACTOR_TYPES |= dict.fromkeys(("hidden", "states"), "*bf16")
FACTOR_CASES = [
    (products._row_factors, dict(BLOCK=4096, COPIED=2048, WEIGHTED=weighted, MEAN=weighted))
    for weighted in (False, True)
]
MEAN_TYPES = dict.fromkeys(("losses", "loss", "share"), "*fp32") | {"weights": "*u8"}
MEAN_CASES = [(_triton._mean, dict(BLOCK=4096, WEIGHTED=weighted)) for weighted in (False, True)]
SORT_TYPES = {"ids": "*i32", "ordered": "*i32", "order": "*i64"}
SORT_CASES = [(_triton._count_before, dict(ROWS=32, OTHERS=256, LARGEST=2**31 - 1))]


LABEL_NUMBERS = ("gamma_negative", "gamma_positive", "margin", "smoothing")
LABEL_TYPES = (
    dict.fromkeys(("sums", "losses", "stats", "grad", "values", "pieces", "row_scale"), "*fp32")
    | dict.fromkeys(("labels", "mask", "seen", "counts"), "*u8")
    | dict.fromkeys(LABEL_NUMBERS, "fp32")
    | {"scores": "*bf16", "out": "*bf16", "classes": "*i64", "starts": "*i64", "bits": "*i32"}
)
LABEL_TILE = dict(ROWS=2, BLOCK=1024, MASKED=True)
WHOLE_POWERS = dict(PLAIN=False, NEGATIVE=4, POSITIVE=1, MARGIN=True, KIND=4, NARROW=True)
PLAIN_LOSS = dict(PLAIN=True, NEGATIVE=0, POSITIVE=0, MARGIN=False, KIND=0, NARROW=True)
POWERS = dict(PLAIN=False, NEGATIVE=-1, POSITIVE=-1, MARGIN=True, KIND=1, NARROW=False)
LABEL_CASES = [
    (label_loss._sum_rows, dict(FOCUS=True, GRADIENT=False) | LABEL_TILE | PLAIN_LOSS),
    (label_loss._sum_rows, dict(FOCUS=True, GRADIENT=True) | LABEL_TILE | WHOLE_POWERS),
    (label_loss._sum_rows, dict(FOCUS=True, GRADIENT=False) | LABEL_TILE | POWERS),
    (label_loss._merge_parts, dict(PARTS=16, MASKED=True)),
    (label_loss._fill_gradient, dict(FOCUS=True) | LABEL_TILE | PLAIN_LOSS),
    (label_loss._fill_gradient, dict(FOCUS=True) | LABEL_TILE | WHOLE_POWERS),
    (label_loss._fill_gradient, dict(FOCUS=True) | LABEL_TILE | POWERS),
    (zlpr._set_bits, dict(PADDED=False, WIDTH=256, LIST=64)),
    (zlpr._sum_rows, LABEL_TILE | dict(KIND=0, WHOLE=True, LIST=64)),
    (zlpr._fill_gradient, LABEL_TILE | dict(KIND=0, LIST=64)),
]

ATTENTION_TYPES = (
    dict.fromkeys(("query", "key", "value", "grad", "of_key", "of_value", "out", "mixed"), "*bf16")
    | dict.fromkeys(("alphas", "numbers", "mean"), "*fp32")
    | {"mask": "*u8", "blocks": "*u8", "lists": "*i16", "seed": "*i64"}
    | dict.fromkeys(("first", "stop", "place"), "*i32")
    | dict.fromkeys(("scale", "excess", "dropout", "near"), "fp32")
)
ATTENTION_TILE = dict(ROWS=64, COLUMNS=64, DEPTH=64, WIDE=64, EVEN=True)
PLAIN = dict.fromkeys(("alphas", "mask", "seed", "first", "stop", "place"))
ATTENTION_CASES = [
    (attention._solve, ATTENTION_TILE | PLAIN | dict(MASK=0, KIND=2)),
    (attention._solve, ATTENTION_TILE | dict(MASK=1, KIND=0)),
    (attention._attend, ATTENTION_TILE | PLAIN | dict(MASK=0, KIND=2, KEEPS=True)),
    (attention._attend, ATTENTION_TILE | dict(MASK=1, KIND=0, KEEPS=True)),
    (attention._query_gradient, ATTENTION_TILE | PLAIN | dict(MASK=0, KIND=1, TO_ALPHA=False)),
    (attention._query_gradient, ATTENTION_TILE | dict(MASK=1, KIND=0, TO_ALPHA=True)),
    (attention._key_gradient, ATTENTION_TILE | PLAIN | dict(MASK=0, KIND=2)),
    (attention._key_gradient, ATTENTION_TILE | dict(MASK=1, KIND=0)),
]


def compile_case(kernel, types, constants, **options) -> None:
    types = types | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options=dict(num_warps=4, **options))
    print(kernel.__name__, len(compiled.asm["cubin"]) > 0)  # noqa: T201


def main(step: int) -> None:
    cases = [
        (kernel, TENSORS | dict.fromkeys(OF_SCORES, dtype), constants, False)
        for kernel, dtype, constants in CASES
    ]
    for types, some in (
        (FUSED_TYPES, FUSED_CASES),
        (UPDATE_TYPES, UPDATE_CASES),
        (SAMPLED_TYPES, SAMPLED_CASES),
        (START_TYPES, START_CASES),
        (TOUCHED_TYPES, TOUCHED_CASES),
        (SLAB_TYPES, SLAB_CASES),
        (NCE_TYPES, NCE_CASES),
        (SPAN_TYPES, SPAN_CASES),
        (FACTOR_TYPES, FACTOR_CASES),
        (MEAN_TYPES, MEAN_CASES),
        (SORT_TYPES, SORT_CASES),
        (LABEL_TYPES, LABEL_CASES),
        (GROUP_TYPES, GROUP_CASES),
        (LEAF_TYPES, LEAF_CASES),
        (DRAWN_TYPES, DRAWN_CASES),
        (LIST_TYPES, LIST_CASES),
        (PREDICTED_TYPES, PREDICTED_CASES),
        (ATTENTION_TYPES, ATTENTION_CASES),
    ):
        cases += [(kernel, types, constants, True) for kernel, constants in some]
    for kernel, types, constants, fused in cases[::step]:
        compile_case(kernel, types, constants, enable_fp_fusion=fused)


if __name__ == "__main__":
    main(int(sys.argv[1]))
