"""Text as ids, in three parts."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.vocabulary import Vocabulary

PARTS = ("train", "valid", "test")
Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TextData:
    """Text to learn a language model from.

    Attributes:
        name: what a table calls it.
        vocabulary: all tokens; the classes of a head.
        train: int32 ids in their order, one dimension; a memory map where they are many.
        valid: what settings are chosen on.
        test: what is reported.
        description: where it comes from and how it was read, for JSON.
        task: always ``"lm"``.
    """

    name: str
    vocabulary: Vocabulary
    train: Ids
    valid: Ids
    test: Ids
    description: dict[str, Any]
    task: Literal["lm"] = "lm"

    @property
    def n_classes(self) -> int:
        """How many tokens the vocabulary has."""
        return len(self.vocabulary)

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each class stands in the training part."""
        return self.vocabulary.counts

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same tokens in the same parts, and otherwise another one."""
        digest = hashlib.blake2b(digest_size=16)
        for token in self.vocabulary.tokens:
            digest.update(token.encode("utf-8", "surrogatepass") + b"\0")
        for part in PARTS:
            ids: Ids = getattr(self, part)
            digest.update(len(ids).to_bytes(8, "little"))
            for first in range(0, len(ids), 2**22):
                digest.update(np.ascontiguousarray(ids[first : first + 2**22], "<i4").tobytes())
        return digest.hexdigest()
