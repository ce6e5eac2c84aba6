"""Texts that a small model can learn, for the studies that predict words."""

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


def write_spelled_wikitext(folder, tokens=12_000, words=600):
    """Words of letters alone, Zipf's frequencies, and each often followed by the same one."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = sorted({"".join(rng.choices(letters, k=rng.randint(4, 8))) for _ in range(words)})
    weights = [1 / (10 + i) for i in range(len(known))]
    after = dict(zip(known, rng.choices(known, weights, k=len(known)), strict=True))
    for part, share in (("train", 1), ("valid", 4), ("test", 4)):
        text = rng.choices(known, weights, k=tokens // share)
        for i in range(1, len(text)):
            if rng.random() < 0.5:
                text[i] = after[text[i - 1]]
        lines = [" ".join(text[i : i + 20]) for i in range(0, len(text), 20)]
        write(folder / "wikitext2" / f"{part}.txt.gz", lines)
    return folder
