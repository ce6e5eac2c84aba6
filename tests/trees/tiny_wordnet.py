"""A dictionary of a few words in WordNet's file format."""

# part, name, kind, file number, words, above
SYNSETS = (
    ("noun", "entity", "n", 3, "entity", None),
    ("noun", "animal", "n", 5, "animal beast", "entity"),
    ("noun", "canine", "n", 5, "canine", "animal"),
    ("noun", "dog", "n", 5, "dog domestic_dog", "canine"),
    ("noun", "poodle", "n", 5, "poodle", "dog"),
    ("noun", "cat", "n", 5, "cat", "animal"),
    ("noun", "goose", "n", 5, "goose", "animal"),
    ("noun", "plant", "n", 20, "plant", "entity"),
    ("noun", "oak", "n", 20, "oak", "plant"),
    ("noun", "rose.flower", "n", 20, "rose", "plant"),
    ("noun", "run.score", "n", 4, "run", "entity"),
    ("noun", "Rex", "n", 5, "Rex", "@i dog"),
    ("verb", "move", "v", 38, "move", None),
    ("verb", "run", "v", 38, "run", "move"),
    ("verb", "rise", "v", 38, "rise", "move"),
    ("verb", "see", "v", 39, "see", None),
    ("verb", "hold", "v", 41, "hold", "keep"),
    ("verb", "keep", "v", 41, "keep", "hold"),
    ("adj", "happy", "a", 0, "happy", None),
    ("adj", "glad", "s", 0, "glad(p)", "& happy"),
    ("adj", "sad", "a", 0, "sad", None),
    ("adv", "quickly", "r", 2, "quickly", None),
)
FREQUENCIES = {"run%1": 5, "run%2": 106, "rose%1": 3, "rise%2": 60, "see%2": 600}
IRREGULAR = {"verb": "saw see\nrose rise\nran run\n", "noun": "geese goose\n"}
LICENCE = "  1 This is a dictionary for tests.  \n"


def write(folder):
    """Write index, data, exception and frequency files."""
    folder.mkdir(parents=True, exist_ok=True)
    kind_of = {name: kind for _, name, kind, *_ in SYNSETS}
    place = {}
    # Numbers of eight digits: lines are as long before places are known as after.
    for _ in range(2):
        data = dict.fromkeys(("noun", "verb", "adj", "adv"), LICENCE)
        for part, name, kind, number, words, above in SYNSETS:
            pointers = "000"
            if above is not None:
                *symbol, target = above.split()
                at = place.get(target, 0)
                side = f"~ {0:08d} n 0000"
                pointers = f"002 {side} {(symbol or ['@'])[0]} {at:08d} {kind_of[target][0]} 0000"
                pointers = pointers.replace(" s 0000", " a 0000")
            names = " ".join(f"{word} 0" for word in words.split())
            count = len(words.split())
            place[name] = len(data[part].encode())
            frames = " 01 + 02 00" if kind == "v" else ""
            data[part] += (
                f"{place[name]:08d} {number:02d} {kind} {count:02x} {names} {pointers}{frames} "
                f"| what is meant | here  \n"
            )
    for part, text in data.items():
        (folder / f"data.{part}").write_text(text)
        lines = [
            f"{word.lower().split('(')[0]} {kind.replace('s', 'a')} 1 1 @ 1 0 {place[name]:08d}  "
            for its_part, name, kind, _, words, _ in SYNSETS
            for word in words.split()
            if its_part == part
        ]
        (folder / f"index.{part}").write_text(LICENCE + "\n".join(sorted(lines)) + "\n")
        if part in IRREGULAR:
            (folder / f"{part}.exc").write_text(IRREGULAR[part])
    keys = [f"{key}:00:00:: 1 {times}\n" for key, times in FREQUENCIES.items()]
    keys.append("run%2:38:01:: 2 999\n")
    (folder / "cntlist.rev").write_text("".join(keys))
    return folder
