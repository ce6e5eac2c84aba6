"""A mode that counts what lastlayer sends between processes."""

from collections import Counter
from typing import Self

from lastlayer._processes import LISTENERS


class CountedCommunication:
    """A context that counts the calls between processes and the bytes that this process receives.

    It counts what lastlayer's own functions and heads call, of all groups and threads, forward and
    backward; not what DDP, FSDP2 or a DTensor do. Bytes are those of a ring: an all-gather of b
    bytes over P processes receives b · (P - 1), an all-reduce 2 · b · (P - 1) / P, a reduce-scatter
    of b bytes b · (P - 1) / P, and an all-to-all what the other processes send.

    :func:`lastlayer.parallel.communication` says the same in advance.

    Attributes:
        calls: how many there were by name: "all_gather", "all_reduce", "reduce_scatter",
            "all_to_all".
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
        """All calls."""
        return self.calls.total()

    @property
    def nbytes(self) -> int:
        """All bytes that this process received."""
        return round(self.received.total())

    def __repr__(self) -> str:
        parts = [f"{n} {name} ({self.received[name]:,.0f} B)" for name, n in self.calls.items()]
        return f"{type(self).__name__}({', '.join(parts) or 'nothing'})"
