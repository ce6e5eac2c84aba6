"""Readers of WordNet: its dictionary files, and the packages nltk and wn."""

import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

# Equally frequent senses are preferred in this order.
_PARTS = ("noun", "verb", "adj", "adv")
_USUAL = (Path("/usr/share/wordnet"), Path("/usr/local/WordNet-3.0/dict"))
# WordNet's rules for base forms: endings and their replacements.
_ENDINGS = {
    "noun": (
        ("s", ""), ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"),
        ("men", "man"), ("ies", "y"),
    ),
    "verb": (
        ("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"),
        ("ing", ""),
    ),
    "adj": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adv": (),
}  # fmt: skip
# Types of synsets in the keys of cntlist.rev; 5 is a satellite adjective.
_PART_OF_KIND = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
# Lexicographer files of synsets without hypernyms; nouns are missing, since they have one root.
_AREAS = {
    0: "adj.all", 1: "adj.pert", 2: "adv.all", 29: "verb.body", 30: "verb.change",
    31: "verb.cognition", 32: "verb.communication", 33: "verb.competition", 34: "verb.consumption",
    35: "verb.contact", 36: "verb.creation", 37: "verb.emotion", 38: "verb.motion",
    39: "verb.perception", 40: "verb.possession", 41: "verb.social", 42: "verb.stative",
    43: "verb.weather", 44: "adj.ppl",
}  # fmt: skip
# Part of speech, and offset in its file.
Synset = tuple[str, int]
# (frequency of the sense, whether it belongs to the unchanged word), and the sense.
_Ranked = tuple[tuple[int, bool], Any]


def _most_frequent(senses: Iterable[_Ranked]) -> Any:
    """The sense with the highest rank, the first of equal ones; None if there are no senses."""
    return max(senses, key=lambda each: each[0], default=(None, None))[1]


class DictionaryFiles:
    """Reads senses and hypernyms from WordNet's files, ``index.noun``, ``data.noun`` and so on."""

    def __init__(self, folder: Path) -> None:
        self._first: dict[str, dict[str, int]] = {}
        self._data: dict[str, bytes] = {}
        self._irregular: dict[str, dict[str, list[str]]] = {}
        for part in _PARTS:
            self._first[part] = dict(_first_senses(folder / f"index.{part}"))
            self._data[part] = (folder / f"data.{part}").read_bytes()
            self._irregular[part] = _irregular_forms(folder / f"{part}.exc")
        self._frequency = _frequencies(folder / "cntlist.rev")

    def sense(self, word: str) -> Synset | None:
        """The most frequent sense of a word or of a base form of it."""
        found: Synset | None = _most_frequent(self._senses(word.lower().replace(" ", "_")))
        return found

    def _senses(self, form: str) -> Iterator[_Ranked]:
        for part in _PARTS:
            for lemma in (form, *self._base_forms(form, part)):
                if lemma in self._first[part]:
                    rank = self._frequency.get((lemma, part), 0), lemma == form
                    yield rank, (part, self._first[part][lemma])

    def _base_forms(self, form: str, part: str) -> Iterator[str]:
        yield from self._irregular[part].get(form, ())
        if part == "noun" and (form.endswith("ss") or len(form) <= 2):
            return
        for ending, instead in _ENDINGS[part]:
            if form.endswith(ending) and len(form) > len(ending):
                yield form.removesuffix(ending) + instead

    def above(self, synset: Synset) -> Synset | None:
        """The first hypernym; of a clustering adjective the one that it clusters around."""
        fields = self._fields(synset)
        n_words = int(fields[3], 16)
        n_pointers = int(fields[4 + 2 * n_words])
        similar = fields[2] == "s"
        for place in range(5 + 2 * n_words, 5 + 2 * n_words + 4 * n_pointers, 4):
            symbol, offset, kind = fields[place : place + 3]
            if symbol in ("@", "@i") or (similar and symbol == "&"):
                return {"n": "noun", "v": "verb", "r": "adv"}.get(kind, "adj"), int(offset)
        return None

    def name(self, synset: Synset) -> str:
        """Its first word."""
        return self._fields(synset)[4].split("(")[0].replace("_", " ")

    def area(self, synset: Synset) -> str:
        """Its lexicographer file, such as "verb.motion"; "noun" for all nouns."""
        return _AREAS.get(int(self._fields(synset)[1]), synset[0])

    def _fields(self, synset: Synset) -> list[str]:
        part, offset = synset
        data = self._data[part]
        line = data[offset : data.find(b"\n", offset)].split(b" | ")[0]
        fields = line.decode("utf-8").split()
        if not fields or fields[0] != f"{offset:08d}":
            raise ValueError(
                f"path: expected a synset at byte {offset} of data.{part}, got {line[:20]!r}; the "
                "index and data files are of different versions of WordNet"
            )
        return fields


def find_files(path: str | Path | None) -> Path | None:
    """The folder with the dictionary: ``path``, else from the environment, else a usual one."""
    if path is not None:
        return _checked(Path(path), "path")
    if os.environ.get("WNSEARCHDIR"):
        return _checked(Path(os.environ["WNSEARCHDIR"]), "WNSEARCHDIR")
    if os.environ.get("WNHOME"):
        return _checked(Path(os.environ["WNHOME"]) / "dict", "WNHOME")
    return next((folder for folder in _USUAL if not _absent(folder)), None)


def _absent(folder: Path) -> list[str]:
    names = [f"{kind}.{part}" for part in _PARTS for kind in ("index", "data")]
    return [name for name in names if not (folder / name).is_file()]


def _checked(folder: Path, name: str) -> Path:
    absent = _absent(folder)
    if absent:
        raise FileNotFoundError(
            f"{name}: expected a folder with WordNet's dictionary files, got {folder}, which has "
            f"no {absent[0]}"
        )
    return folder


def _lines(path: Path) -> Iterator[list[str]]:
    """The fields of each line, without the licence at the top, which is indented."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.startswith(" "):
                yield line.split()


def _first_senses(path: Path) -> Iterator[tuple[str, int]]:
    for fields in _lines(path):
        yield fields[0], int(fields[6 + int(fields[3])])


def _irregular_forms(path: Path) -> dict[str, list[str]]:
    return {form: base for form, *base in _lines(path)} if path.is_file() else {}


def _frequencies(path: Path) -> dict[tuple[str, str], int]:
    """Frequency of the first sense of each word in tagged text; empty without such a file."""
    if not path.is_file():
        return {}
    found: dict[tuple[str, str], int] = {}
    for key, number, times in _lines(path):
        lemma, _, rest = key.partition("%")
        if number == "1":
            place = lemma, _PART_OF_KIND[rest[0]]
            found[place] = max(found.get(place, 0), int(times))
    return found


class Nltk:
    """Reads the WordNet corpus of nltk."""

    def __init__(self) -> None:
        try:
            wordnet = import_module("nltk.corpus").wordnet
        except ImportError as error:
            raise ImportError("reader: 'nltk' needs the package: pip install nltk") from error
        try:
            wordnet.ensure_loaded()
        except LookupError as error:
            raise FileNotFoundError(
                "reader: 'nltk' needs its corpus: python -m nltk.downloader wordnet"
            ) from error
        self._corpus = wordnet

    def sense(self, word: str) -> Any:
        """The most frequent sense of a word, or of a base form of it by nltk's morphy."""
        return _most_frequent(self._senses(word.lower().replace(" ", "_")))

    def _senses(self, form: str) -> Iterator[_Ranked]:
        for part in "nvar":
            # The public `morphy` stops at a word that exists, such as "saw".
            for lemma in dict.fromkeys([form, *self._corpus._morphy(form, part)]):
                for synset in self._corpus.synsets(lemma, part)[:1]:
                    names = [each for each in synset.lemmas() if each.name().lower() == lemma]
                    if names:
                        yield (sum(each.count() for each in names), lemma == form), synset

    def above(self, synset: Any) -> Any:
        """The first hypernym; of a clustering adjective the one that it clusters around."""
        found = synset.hypernyms() + synset.instance_hypernyms()
        if synset.pos() == "s":
            found = found + synset.similar_tos()
        return found[0] if found else None

    def name(self, synset: Any) -> str:
        """Its first word."""
        return str(synset.lemma_names()[0]).replace("_", " ")

    def area(self, synset: Any) -> str:
        """Its lexicographer file."""
        return str(synset.lexname())


class Wn:
    """Reads the lexicons that are installed for the package wn."""

    def __init__(self) -> None:
        try:
            wn, morphy = import_module("wn"), import_module("wn.morphy").morphy
        except ImportError as error:
            raise ImportError("reader: 'wn' needs the package: pip install wn") from error
        if not wn.lexicons():
            raise FileNotFoundError("reader: 'wn' needs a lexicon: python -m wn download oewn")
        self._net = wn.Wordnet(lemmatizer=morphy)

    def sense(self, word: str) -> Any:
        """The most frequent sense of a word, or of a base form of it by wn's morphy."""
        return _most_frequent(self._senses(word.lower().replace("_", " ")))

    def _senses(self, form: str) -> Iterator[_Ranked]:
        for part in "nvasr":
            first: dict[str, Any] = {}
            for sense in self._net.senses(form, part):
                first.setdefault(sense.word().lemma().lower(), sense)
            for lemma, sense in first.items():
                rank = sum(int(each) for each in sense.counts()), lemma == form
                yield rank, sense.synset()

    def above(self, synset: Any) -> Any:
        """The first hypernym; of a clustering adjective the one that it clusters around."""
        found = synset.hypernyms()
        if synset.pos == "s":
            found = found + synset.get_related("similar")
        return found[0] if found else None

    def name(self, synset: Any) -> str:
        """Its first word."""
        return str(synset.lemmas()[0])

    def area(self, synset: Any) -> str:
        """Its lexicographer file, or its part of speech."""
        return str(synset.lexfile() or synset.pos)
