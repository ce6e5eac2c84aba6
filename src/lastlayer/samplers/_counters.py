"""Counters: where chance comes from. The same seed and step give the same draws everywhere."""

from typing import Any

import torch
from torch import Tensor

from lastlayer.kernels.rng import words

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
EXPECTED = "expected (seed, step) as two ints or an int64 tensor of shape (2,)"


def as_counter(
    counter: Any, generator: torch.Generator | None, device: torch.device, *, name: str = "counter"
) -> Tensor:
    """Seed and step as int64 ``(2,)`` on ``device``, made without waiting for it."""
    if counter is None:
        _check_generator(generator, device)
        return torch.randint(_LOWEST, _HIGHEST, (2,), generator=generator, device=device)
    if generator is not None:
        raise ValueError(f"{name}: expected either a counter or a generator, got both")
    if isinstance(counter, Tensor):
        if counter.dtype != torch.int64 or counter.shape != (2,):
            raise ValueError(
                f"{name}: {EXPECTED}, got {counter.dtype} of shape {tuple(counter.shape)}"
            )
        if counter.device != device:
            raise ValueError(
                f"{name}: expected the device of the sampler, {device}, got {counter.device}"
            )
        return counter
    if not isinstance(counter, (tuple, list)) or len(counter) != 2:
        raise TypeError(f"{name}: {EXPECTED}, got {counter!r}")
    for number in counter:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name}: {EXPECTED}, got {counter!r}")
        if not _LOWEST <= number <= _HIGHEST:
            raise ValueError(f"{name}: expected 64-bit integers, got {number}")
    return torch.tensor(counter, dtype=torch.int64).to(device, non_blocking=True)


def _check_generator(generator: Any, device: torch.device) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
    if generator.device.type != device.type:
        raise ValueError(
            f"generator: expected one on the device of the sampler, {device}, got one on "
            f"{generator.device}; torch.Generator({device.type!r}) makes one"
        )


def fork(counter: Tensor, number: int) -> Tensor:
    """Another counter, whose draws have nothing to do with those of ``counter``.

    Give each rank of a process group its own number and the ranks draw different classes; give
    them none and they draw the same. It serves as well for several sets of draws in one step.

    Args:
        counter: seed and step, int64 ``(2,)``.
        number: which one, from 0.

    Returns:
        Another seed, made from the seed and the number, and the same step; int64 ``(2,)``.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> counter = torch.tensor([7, 0])
        >>> sampler = samplers.Uniform(1000)
        >>> mine, other = (sampler.sample(4, counter=samplers.fork(counter, n)) for n in (0, 1))
        >>> bool((mine == other).all())
        False
    """
    _check_fork(counter, number)
    # Negative steps below all that a run reaches are kept for this.
    marked = torch.stack([counter[0], counter.new_full((), _LOWEST + number)])
    made = words("auto", marked, 1)[0]
    return torch.stack([made[0] << 32 | made[1], counter[1]])


def _check_fork(counter: Any, number: Any) -> None:
    if not isinstance(counter, Tensor):
        raise TypeError(
            f"counter: expected an int64 tensor of shape (2,), got {type(counter).__name__}"
        )
    as_counter(counter, None, counter.device)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"number: expected an int, got {type(number).__name__}")
    if not 0 <= number < 2**62:
        raise ValueError(f"number: expected 0 to {2**62 - 1}, got {number}")


def uniforms(counter: Tensor, n: int) -> Tensor:
    """``n`` numbers from 0 up to 1, multiples of 2^-53, in float64."""
    return fractions(words("auto", counter, n))


def fractions(pairs: Tensor) -> Tensor:
    """The same from pairs of words, ``(..., 2)``."""
    return ((pairs[..., 0] << 21) | (pairs[..., 1] >> 11)).double() * 2.0**-53
