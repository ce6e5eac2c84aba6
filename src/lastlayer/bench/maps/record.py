"""One measurement of a map."""

from dataclasses import dataclass

from lastlayer.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class MapRecord(Record):
    """One measurement of a map.

    Attributes:
        scale: scores are drawn as scale · N(0, 1).
        bytes: the fewest bytes the work must read and write.
        tb_per_s: these over the median time.
        copy_tb_per_s: bytes that a copy of a large buffer reads and writes in a second.
        ratio_to_softmax: time over torch.softmax's time in the same case.
        error: see :class:`lastlayer.bench.maps.verify.MapVerdict`.
    """

    scale: float | None
    bytes: int
    tb_per_s: float | None
    copy_tb_per_s: float
    fraction_of_copy: float | None
    ratio_to_softmax: float | None
    error: float | None
    row_sum_error: float | None

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        return f"{self.size} {self.dtype} scale {self.scale:g} {self.direction}"
