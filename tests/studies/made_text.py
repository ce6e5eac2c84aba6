"""Texts by a grammar that a small model can learn, for the studies that predict words."""

import gzip
import random


def sentences(n, words, seed):
    """Lines of words, each of which likes some followers; frequent ones come first."""
    rng = random.Random(seed)
    lines, word = [], 0
    for _ in range(n):
        line = []
        for _ in range(rng.randint(4, 12)):
            liked = (7 * word + 3) % words
            word = liked if rng.random() < 0.4 else int(words * rng.random() ** 3)
            line.append(f"w{word}")
        lines.append(" ".join(line))
    return lines


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def write_wikitext(folder, words):
    for seed, (part, n) in enumerate({"train": 900, "valid": 150, "test": 150}.items()):
        write(folder / "wikitext2" / f"{part}.txt.gz", sentences(n, words, seed))
