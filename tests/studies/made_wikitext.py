"""A small text in the files of WikiText-2, for the studies that read it."""

import gzip
import random
from pathlib import Path


def write(folder: Path, tokens: int = 12_000, words: int = 600) -> Path:
    """Words of letters alone, Zipf's frequencies, and each often followed by the same one."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = sorted({"".join(rng.choices(letters, k=rng.randint(4, 8))) for _ in range(words)})
    weights = [1 / (10 + i) for i in range(len(known))]
    after = dict(zip(known, rng.choices(known, weights, k=len(known)), strict=True))
    (folder / "wikitext2").mkdir(parents=True)
    for part, share in (("train", 1), ("valid", 4), ("test", 4)):
        text = rng.choices(known, weights, k=tokens // share)
        for i in range(1, len(text)):
            if rng.random() < 0.5:
                text[i] = after[text[i - 1]]
        lines = "\n".join(" ".join(text[i : i + 20]) for i in range(0, len(text), 20))
        (folder / "wikitext2" / f"{part}.txt.gz").write_bytes(gzip.compress(lines.encode()))
    return folder
