"""RNG counters: equal seeds and steps give equal draws on every device and in every run."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_generator, check_int
from lastlayer.kernels import rng

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_EXPECTED = "rng_counter: expected (seed, step) as two ints or an int64 tensor of shape (2,)"


def as_rng_counter(
    rng_counter: Any, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Seed and step as int64 ``(2,)`` on ``device``, without a host sync."""
    if rng_counter is None:
        check_generator(generator, device, "the sampler")
        return torch.randint(_LOWEST, _HIGHEST, (2,), generator=generator, device=device)
    if generator is not None:
        raise ValueError("rng_counter: expected either a counter or a generator, got both")
    if isinstance(rng_counter, Tensor):
        if rng_counter.dtype != torch.int64 or rng_counter.shape != (2,):
            got = f"{rng_counter.dtype} of shape {tuple(rng_counter.shape)}"
            raise ValueError(f"{_EXPECTED}, got {got}")
        if rng_counter.device != device:
            raise ValueError(
                f"rng_counter: expected the device of the sampler, {device}, got "
                f"{rng_counter.device}; move one of them with .to(device)"
            )
        return rng_counter
    if not isinstance(rng_counter, (tuple, list)) or len(rng_counter) != 2:
        raise TypeError(f"{_EXPECTED}, got {rng_counter!r}")
    for number in rng_counter:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{_EXPECTED}, got {rng_counter!r}")
        if not _LOWEST <= number <= _HIGHEST:
            raise ValueError(f"rng_counter: expected 64-bit integers, got {number}")
    return torch.tensor(rng_counter, dtype=torch.int64).to(device, non_blocking=True)


def fork(rng_counter: Tensor, number: int) -> Tensor:
    """A new counter, whose draws are independent of the draws of ``rng_counter``.

    With the rank as number, each rank of a process group draws different classes; with the same
    counter all ranks draw the same ones. It also gives several sets of draws in one step.

    Args:
        rng_counter: seed and step, int64 ``(2,)``.
        number: index of the new counter, from 0.

    Returns:
        A new seed, computed from the seed and the number, and the same step; int64 ``(2,)``.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> counter = torch.tensor([7, 0])
        >>> sampler = samplers.Uniform(1000)
        >>> mine, other = (sampler.sample(4, rng_counter=samplers.fork(counter, n)) for n in (0, 1))
        >>> bool((mine == other).all())
        False
    """
    if not isinstance(rng_counter, Tensor):
        raise TypeError(
            f"rng_counter: expected an int64 tensor of shape (2,), got {type(rng_counter).__name__}"
        )
    as_rng_counter(rng_counter, None, rng_counter.device)
    number = check_int("number", number, least=0, most=2**62 - 1)
    return rng.fork(rng_counter, number)


def fractions(pairs: Tensor) -> Tensor:
    """Uniform float64 numbers in [0, 1), multiples of 2^-53, from pairs of words ``(..., 2)``."""
    return ((pairs[..., 0] << 21) | (pairs[..., 1] >> 11)).double() * 2.0**-53
