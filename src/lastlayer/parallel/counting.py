"""A context that counts what lastlayer sends between processes."""

from collections import Counter
from typing import Self

from lastlayer._processes import LISTENERS


class CountedCommunication:
    """A context that counts collective calls and the bytes that this process receives.

    It counts the calls of lastlayer's functions and heads, in all groups and threads, forward and
    backward; not those of DDP, FSDP2 or DTensor. Bytes are those of ring algorithms: an all-gather
    of b bytes over P processes receives b · (P - 1), an all-reduce 2 · b · (P - 1) / P, a
    reduce-scatter of b bytes b · (P - 1) / P, and an all-to-all what the other processes send.

    :func:`lastlayer.parallel.communication` computes the same figures in advance.

    Attributes:
        calls: number of calls by name: "all_gather", "all_reduce", "reduce_scatter", "all_to_all".
        received: bytes by the same names.

    Example:
        >>> from lastlayer import parallel
        >>> with parallel.CountedCommunication() as counted:
        ...     pass  # loss = head(hidden, target)
        >>> counted.rounds, counted.nbytes
        (0, 0)
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def __enter__(self) -> Self:
        LISTENERS.append(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        LISTENERS.remove(self._hear)

    def _hear(self, call: str, received: float) -> None:
        self.calls[call] += 1
        self.received[call] += received  # type: ignore[assignment]

    @property
    def rounds(self) -> int:
        """Number of calls of all kinds."""
        return self.calls.total()

    @property
    def nbytes(self) -> int:
        """Bytes that this process received in all calls."""
        return round(self.received.total())

    def __repr__(self) -> str:
        parts = [f"{n} {name} ({self.received[name]:,.0f} B)" for name, n in self.calls.items()]
        return f"{type(self).__name__}({', '.join(parts) or 'nothing'})"
