"""Argument checks. Each error names the argument, what was expected and what was given.

All packages follow the same rules: an integer is anything that ``operator.index`` accepts, numpy
integers included but not bools; a real number is any ``numbers.Real`` except bools; class ids may
have any integer dtype.
"""

import math
import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import (
    accumulation_dtype,
    as_numpy,
    autocast_dtype,
    is_exporting,
    values_are_checked,
)

REDUCTIONS = ("mean", "sum", "none")
# The dtypes of the kernels. float8 is a floating dtype too, but torch has few operations for it.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBER_OR_TENSOR = "a number or a floating tensor"
_INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8,
)  # fmt: skip


def check_int(
    name: str, value: Any, *, least: int | None = 1, most: int | None = None, note: str = ""
) -> int:
    """``value`` as an int from ``least`` to ``most``.

    In the error ``note`` explains ``most``, or ``least`` if there is no ``most``.
    """
    if isinstance(value, (bool, np.bool_, Tensor)):
        got = "Tensor" if isinstance(value, Tensor) else "bool"
        raise TypeError(f"{name}: expected an int, got {got}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if least is not None and number < least:
        reason = f"; {note}" if note and most is None else ""
        raise ValueError(f"{name}: expected at least {least}, got {number}{reason}")
    if most is not None and number > most:
        raise ValueError(f"{name}: expected at most {most}{note and ', '}{note}, got {number}")
    return number


def check_real(
    name: str,
    value: Any,
    expected: str = "a finite number",
    fits: Callable[[float], bool] | None = None,
    kind: str = "a number",
) -> float:
    """``value`` as a float that satisfies ``fits``, or is finite; ``kind`` is the expected type."""
    # Floats first: isinstance with Real is slow.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name}: expected {kind}, got {type(value).__name__}")
    number = float(value)
    if not (math.isfinite(number) if fits is None else fits(number)):
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return number


def check_positive(name: str, value: Any, kind: str = "a number") -> float:
    """``value`` as a finite float above 0."""
    if type(value) is float and 0.0 < value < math.inf:
        return value
    return check_real(name, value, "a finite number above 0", lambda x: 0.0 < x < math.inf, kind)


def check_not_negative(name: str, value: Any) -> float:
    """``value`` as a finite float of at least 0."""
    if type(value) is float and 0.0 <= value < math.inf:
        return value
    return check_real(name, value, "a finite number of at least 0", lambda x: 0.0 <= x < math.inf)


def check_share(name: str, value: Any) -> float:
    """``value`` as a float from 0 to 1."""
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    return check_real(name, value, "a number from 0 to 1", lambda x: 0.0 <= x <= 1.0)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Checks that ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {tuple(choices)}, got {value!r}")


def check_reduction(reduction: Any) -> None:
    """Checks that ``reduction`` is one of :data:`REDUCTIONS`."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        check_choice("reduction", reduction, REDUCTIONS)


def check_ignore_index(ignore_index: Any) -> int | None:
    """``ignore_index`` as an int or None."""
    if ignore_index is None or type(ignore_index) is int:
        return ignore_index
    try:
        return check_int("ignore_index", ignore_index, least=None)
    except TypeError:
        raise TypeError(
            "ignore_index: expected an int, or None to ignore no target, got "
            f"{type(ignore_index).__name__}"
        ) from None


def check_seed(seed: Any) -> int:
    """``seed`` as a 64-bit int."""
    number = check_int("seed", seed, least=None)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"seed: expected a 64-bit integer, got {number}")
    return number


def check_chunk(chunk: Any, name: str = "chunk_rows") -> int | str:
    """``chunk`` as an int of at least 1, or "auto" or "low"."""
    if isinstance(chunk, str) and chunk in ("auto", "low"):
        return chunk
    try:
        return check_int(name, chunk)
    except TypeError:
        raise TypeError(
            f"{name}: expected an int, 'auto' or 'low', got {type(chunk).__name__} {chunk!r}"
        ) from None


def check_tensor(name: str, value: Any) -> None:
    """Checks that ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def check_floating(name: str, value: Any, expected: str) -> None:
    """Checks that ``value`` is a tensor of a floating dtype; ``expected`` is for the error."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected {expected}, got {got}")


def check_scores(scores: Any, *, name: str = "scores", at_least_1d: bool = True) -> None:
    """Checks that ``scores`` is a tensor of one of :data:`DTYPES`, with at least one dimension."""
    if not isinstance(scores, Tensor):
        check_tensor(name, scores)
    if scores.dtype not in DTYPES:
        if not scores.is_floating_point():
            expected = "a floating dtype"
        else:
            expected = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
        raise TypeError(
            f"{name}: expected {expected}, got {scores.dtype}; convert with {name}.float()"
        )
    if at_least_1d and scores.dim() == 0:
        raise ValueError(f"{name}: expected at least one dimension, got a 0-dimensional tensor")


def check_device(name: str, tensor: Tensor, like: Tensor, of: str = "hidden") -> None:
    """Checks that ``tensor`` is on the device of ``like``, the argument called ``of``."""
    if tensor.device != like.device:
        raise ValueError(
            f"{name}: expected the device of {of}, {like.device}, got {tensor.device}; move one of "
            "them with .to(device)"
        )


def check_dtype(name: str, tensor: Tensor, like: Tensor, of: str = "hidden") -> None:
    """Checks that ``tensor`` has the dtype of ``like``, unless autocast converts both."""
    if tensor.dtype != like.dtype and autocast_dtype(like) is None:
        raise TypeError(
            f"{name}: expected the dtype of {of}, {like.dtype}, got {tensor.dtype}; convert one of "
            "them, or use torch.autocast"
        )


def check_dim(dim: Any, scores: Tensor) -> int:
    """``dim`` as a non-negative int."""
    number, rank = check_int("dim", dim, least=None), scores.dim()
    if not -rank <= number < rank:
        raise ValueError(
            f"dim: expected {-rank} to {rank - 1} for scores of shape {tuple(scores.shape)}, "
            f"got {number}"
        )
    return number % rank


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether ``shape`` broadcasts to the shape ``to``."""
    if len(shape) > len(to):
        return False
    # Without all() of a generator and zip of unequal lengths, which torch 2.8 cannot compile.
    for size, wanted in zip(shape, to[len(to) - len(shape) :], strict=True):
        if size not in (1, wanted):
            return False
    return True


def check_mask(mask: Any, scores: Tensor) -> None:
    """Checks that ``mask`` is a bool tensor that broadcasts to the shape of the scores."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a bool tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask: expected dtype torch.bool with True for allowed, got {mask.dtype}; "
            "convert with mask.bool()"
        )
    if not broadcasts(mask.shape, scores.shape):
        raise ValueError(
            f"mask: expected a shape that broadcasts to that of scores {tuple(scores.shape)}, "
            f"got {tuple(mask.shape)}"
        )


def check_k(k: Any) -> int:
    """``k`` as an int of at least 1."""
    return check_int("k", k, note="a k of n or more is the full softmax")


def check_alpha(alpha: Any) -> None:
    """Checks that ``alpha`` is a number or a floating tensor, of at least 1."""
    expected, kind = "at least 1 (1 is softmax, 1.5 and 2 are sparse)", NUMBER_OR_TENSOR
    if not isinstance(alpha, Tensor):
        check_real("alpha", alpha, expected, lambda x: 1.0 <= x < math.inf, kind)
        return
    if not alpha.is_floating_point():
        raise TypeError(f"alpha: expected {kind}, got a tensor of {alpha.dtype}")
    if values_are_checked(alpha) and alpha.numel():
        lowest, highest = (each.item() for each in alpha.detach().aminmax())
        if not 1.0 <= lowest <= highest < math.inf:
            wrong = highest if lowest >= 1.0 else lowest
            raise ValueError(
                f"alpha: expected {expected}, got {wrong} among its values; "
                "Entmax(learn_alpha=True) learns an alpha that stays above 1"
            )


def check_alpha_number(alpha: Any) -> float:
    """``alpha`` as a float of at least 1, for functions that cannot learn it."""
    if isinstance(alpha, Tensor):
        raise TypeError(
            "alpha: expected a number, got a torch.Tensor; a learned alpha works with "
            "lastlayer.entmax_loss on scores"
        )
    check_alpha(alpha)
    return float(alpha)


def check_alpha_shape(alpha: Tensor, scores: Tensor, dim: int) -> None:
    """Checks that ``alpha`` broadcasts to the scores with size 1 at ``dim``: one alpha per row."""
    rows = list(scores.shape)
    rows[dim] = 1
    if not broadcasts(alpha.shape, rows):
        raise ValueError(
            f"alpha: expected a shape that broadcasts to {tuple(rows)}, one alpha per row of "
            f"scores {tuple(scores.shape)} along dim {dim}, got {tuple(alpha.shape)}"
        )


def check_class_weight(
    class_weight: Any, n_classes: int, like: Tensor | None = None, of: str = "hidden"
) -> None:
    """Checks for one floating weight per class, on the device of ``like``, without a gradient."""
    check_floating("class_weight", class_weight, "a floating tensor with one weight per class")
    if class_weight.shape != (n_classes,):
        raise ValueError(
            f"class_weight: expected shape ({n_classes},), one weight per class, got "
            f"{tuple(class_weight.shape)}"
        )
    if like is None:
        return
    check_device("class_weight", class_weight, like, of)
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "class_weight: expected requires_grad=False, since its gradient is not computed, got "
            "True; pass class_weight.detach()"
        )


def check_ids(
    name: str,
    ids: Any,
    shape: Sequence[int] | None,
    n_classes: int,
    ignore_index: int | None = None,
    *,
    like: Tensor | None = None,
    of: str = "hidden",
) -> Tensor:
    """Class ids as int64, with dtype, shape, device and, where possible, values checked.

    Always use the returned tensor: in compiled code on a CPU it carries a check of the values that
    runs with that code. Kernels trust their ids, and a wrong one would be an access out of bounds.

    Ids may have any integer dtype. ``shape`` None allows any shape. ``ignore_index`` is allowed as
    a value. ``like`` is the argument, called ``of``, whose device is expected.
    """
    return _checked_ids(name, ids, shape, n_classes, ignore_index, like, of)[0]


def check_target_ids(
    target: Any, like: Tensor, n_classes: int, ignore_index: int | None, of: str = "hidden"
) -> tuple[Tensor, int | None]:
    """:func:`check_ids` for one target per row of ``like``; also returns the ignored id.

    This is None if the values were checked and no target is ignored, to save another check.
    """
    ids, known = _checked_ids("target", target, like.shape[:-1], n_classes, ignore_index, like, of)
    if known and ignore_index is not None and not 0 <= ignore_index < n_classes:
        ignore_index = None
    return ids, ignore_index


def _checked_ids(
    name: str,
    ids: Any,
    shape: Sequence[int] | None,
    n_classes: int,
    ignore_index: int | None,
    like: Tensor | None,
    of: str,
) -> tuple[Tensor, bool]:
    """The ids as int64, and whether all of them are known to be classes, none ignored."""
    if not isinstance(ids, Tensor):
        check_tensor(name, ids)
    if ids.dtype not in _INTEGERS:
        advice = "" if ids.is_floating_point() else f"; convert with {name}.long()"
        if ids.is_floating_point() and ids.dim() and ids.shape[-1] == n_classes:
            advice = "; for distributions use a loss on scores, such as lastlayer.entmax_loss"
        raise TypeError(f"{name}: expected integer class ids, got {ids.dtype}{advice}")
    if shape is not None and ids.shape != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, one class id per row of {of}, got "
            f"{tuple(ids.shape)}"
        )
    if like is not None and ids.device != like.device:
        check_device(name, ids, like, of)
    given: Tensor = ids if ids.dtype == torch.int64 else ids.long()
    if torch.compiler.is_compiling() and not is_exporting():
        if given.device.type == "cpu":
            given = torch.ops.lastlayer.checked_ids(given, name, n_classes, ignore_index)
        return given, False
    if not values_are_checked(given):
        return given, False
    return given, check_id_values(name, given, n_classes, ignore_index)


def check_id_values(name: str, ids: Tensor, n_classes: int, ignore_index: int | None) -> bool:
    """Checks for ids from 0 to ``n_classes`` - 1 or ``ignore_index``; whether none is ignored.

    Waits for the device.
    """
    if not ids.numel():
        return True
    # A numpy reduction takes a fifth of the time of torch's. As uint64, negative ids are large.
    values = as_numpy(ids) if ids.is_cpu else as_numpy(ids.cpu())
    if np.maximum.reduce(values.view(np.uint64), axis=None) < n_classes:
        return True
    wrong = (values < 0) | (values >= n_classes)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        first = tuple(int(i[0]) for i in wrong.nonzero())
        allowed = "" if ignore_index is None else f", or ignore_index={ignore_index}"
        raise ValueError(
            f"{name}: expected class ids from 0 to {n_classes - 1}{allowed}, got "
            f"{values[first]} at position {first}"
        )
    return False


_library = torch.library.Library("lastlayer", "FRAGMENT")
_library.define("checked_ids(Tensor ids, str name, int n_classes, int? ignore_index) -> Tensor")


def _checked_when_run(ids: Tensor, name: str, n_classes: int, ignore_index: int | None) -> Tensor:
    check_id_values(name, ids, n_classes, ignore_index)
    # A registered operation may not return its input.
    return ids.clone()


_library.impl("checked_ids", _checked_when_run, "CompositeExplicitAutograd")
torch.library.register_fake(
    "lastlayer::checked_ids", lambda ids, *_: torch.empty_like(ids), lib=_library
)


def check_target(
    target: Any, scores: Tensor, ignore_index: int | None
) -> tuple[Tensor, bool, int | None]:
    """Class ids as int64, or distributions; whether they are class ids; the ignored id, if any."""
    if not isinstance(target, Tensor):
        check_tensor("target", target)
    if target.is_floating_point():
        _check_distributions(target, scores)
        return target, False, None
    ids, ignored = check_target_ids(target, scores, scores.shape[-1], ignore_index, "scores")
    return ids, True, ignored


def _check_distributions(target: Tensor, scores: Tensor) -> None:
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected distributions of the shape of scores {tuple(scores.shape)}, "
            f"got {tuple(target.shape)}; class ids must have an integer dtype"
        )
    if not values_are_checked(target) or target.numel() == 0:
        return
    lowest = target.min().item()
    if not lowest >= 0.0:
        raise ValueError(f"target: expected distributions with no negative entry, got {lowest}")
    totals = target.sum(-1, dtype=accumulation_dtype(target.dtype))
    # The tolerance allows for distributions that were normalised in half precision.
    tolerance = 1e-4 if target.dtype in (torch.float32, torch.float64) else 2e-2
    furthest = totals.flatten()[(totals - 1.0).abs().argmax()].item()
    if not abs(furthest - 1.0) <= tolerance:
        raise ValueError(
            f"target: expected distributions that sum to 1 within {tolerance}, got a sum of "
            f"{furthest:.6g}; divide by target.sum(-1, keepdim=True)"
        )


def check_linear(hidden: Any, weight: Any, bias: Any, *, empty: bool = False) -> None:
    """Checks that hidden, weight and bias fit together; ``empty`` allows a weight of no rows."""
    check_scores(hidden, name="hidden")
    check_scores(weight, name="weight")
    if weight.dim() != 2:
        raise ValueError(
            "weight: expected shape (n_classes, in_features), one row per class, as in nn.Linear, "
            f"got {tuple(weight.shape)}"
        )
    n_classes, width = weight.shape
    if n_classes == 0 and not empty:
        raise ValueError(f"weight: expected at least one class, got shape {tuple(weight.shape)}")
    if hidden.shape[-1] != width:
        raise ValueError(
            f"hidden: expected shape (*batch, {width}) for weight of shape "
            f"{tuple(weight.shape)}, got {tuple(hidden.shape)}"
        )
    _check_like(hidden, "weight", weight)
    if bias is None:
        return
    check_scores(bias, name="bias")
    if bias.shape != (n_classes,):
        raise ValueError(
            f"bias: expected shape ({n_classes},), one number per class, got {tuple(bias.shape)}"
        )
    _check_like(hidden, "bias", bias)


def _check_like(hidden: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.device != hidden.device:
        check_device(name, tensor, hidden)
    if tensor.dtype != hidden.dtype:
        check_dtype(name, tensor, hidden)


def check_generator(generator: Any, device: torch.device, of: str = "hidden") -> None:
    """Checks for None or a generator on ``device``, that of the argument called ``of``."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
    if generator.device.type != device.type:
        raise ValueError(
            f"generator: expected one on the device of {of}, {device}, got one on "
            f"{generator.device}; create it with torch.Generator({device.type!r})"
        )


def as_array(name: str, values: Any, expected: str, kinds: str = "iufb") -> NDArray[Any]:
    """An array from a sequence, an array or a tensor; ``kinds`` are the allowed numpy kinds."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        values = as_numpy(values.double() if values.is_floating_point() else values)
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise TypeError(f"{name}: expected {expected}, got {type(values).__name__}")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise TypeError(f"{name}: expected {expected}, got values that are not: {error}") from None
    if array.dtype.kind not in kinds and array.size:
        raise TypeError(f"{name}: expected {expected}, got {_first_not_real(values, array)}")
    return array


def _first_not_real(values: Any, array: NDArray[Any]) -> str:
    """Describes the first value that is not a number, for an error message."""
    if array.ndim == 0:
        return type(values).__name__
    if array.ndim == 1 and isinstance(values, (list, tuple)):
        for place, each in enumerate(values):
            if not isinstance(each, (Real, np.bool_, Tensor)):
                return f"{each!r} at position {place}"
    return f"an array of {array.dtype}"


def as_counts(
    counts: Any,
    n_classes: int | None = None,
    *,
    kinds: str = "iufb",
    alike: str = "pass ones if all classes are equally likely",
) -> NDArray[np.float64]:
    """One count per class: finite, not negative, not all zero; ``alike`` is the remedy."""
    name, expected = "counts", "one number per class"
    array = as_array(name, counts, expected, kinds)
    if array.ndim != 1 or (n_classes is not None and len(array) != n_classes):
        shape = "(n_classes,)" if n_classes is None else f"({n_classes},)"
        raise ValueError(f"{name}: expected shape {shape}, {expected}, got {array.shape}")
    if not len(array):
        raise ValueError(f"{name}: expected {expected} and at least one class, got none")
    result: NDArray[np.float64] = array.astype(np.float64)
    wrong = ~((result >= 0) & np.isfinite(result))
    if wrong.any():
        c = int(wrong.argmax())
        raise ValueError(
            f"{name}: expected finite numbers of at least 0, got {result[c]:g} for class {c}"
        )
    if not result.any():
        raise ValueError(f"{name}: expected at least one above 0, got {len(result)} zeros; {alike}")
    with np.errstate(over="ignore"):
        total = float(result.sum())
    if not math.isfinite(total):
        raise ValueError(f"{name}: expected a finite sum, got {total}; divide by the largest")
    return result


def as_integers(name: str, values: Any, expected: str) -> NDArray[np.int64]:
    """An int64 array from a list of integers."""
    array = as_array(name, values, expected)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected {expected}, one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: expected {expected}, got an array of {array.dtype}")
    return array.astype(np.int64)


def as_permutation(name: str, values: Any, n: int) -> NDArray[np.int64]:
    """A permutation of the ``n`` class ids, as an int64 array."""
    classes = as_integers(name, values, f"all class ids from 0 to {n - 1}")
    if len(classes) != n:
        raise ValueError(f"{name}: expected all {n} classes, got {len(classes)}")
    wrong = (classes < 0) | (classes >= n)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"{name}: expected class ids from 0 to {n - 1}, got {classes[place]} at position "
            f"{place}"
        )
    times = np.bincount(classes, minlength=n)
    if (times > 1).any():
        c = int((times > 1).argmax())
        first, second = np.flatnonzero(classes == c)[:2]
        raise ValueError(
            f"{name}: expected each class once, got class {c} at positions {first} and {second}"
        )
    return classes


def as_pairs(name: str, values: Any, of: tuple[str, str]) -> tuple[tuple[int, int], ...]:
    """At least one pair of integers above 0; ``of`` has the names of the two."""
    expected = f"({', '.join(of)})"
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}: expected pairs {expected}, got {type(values).__name__}")
    pairs = []
    for i, pair in enumerate(values):
        if isinstance(pair, str) or not hasattr(pair, "__len__") or len(pair) != 2:
            raise TypeError(f"{name}: expected pairs {expected}, got {pair!r} at position {i}")
        first, second = map(check_int, (f"{name}: {each} at position {i}" for each in of), pair)
        pairs.append((first, second))
    if not pairs:
        raise ValueError(f"{name}: expected at least one pair {expected}, got none")
    return tuple(pairs)
