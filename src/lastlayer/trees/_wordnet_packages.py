"""WordNet through the packages nltk and wn."""

from importlib import import_module
from typing import Any


class Nltk:
    """The WordNet corpus of nltk."""

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
        form = word.lower().replace(" ", "_")
        best: tuple[int, bool] = (-1, False)
        found = None
        for part in "nvar":
            # `morphy` itself stops at a word that is there, such as "saw".
            for lemma in dict.fromkeys([form, *self._corpus._morphy(form, part)]):
                for synset in self._corpus.synsets(lemma, part)[:1]:
                    names = [each for each in synset.lemmas() if each.name().lower() == lemma]
                    rank = sum(each.count() for each in names), lemma == form
                    if names and rank > best:
                        best, found = rank, synset
        return found

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
    """The lexicons that the package wn has installed."""

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
        form = word.lower().replace("_", " ")
        best: tuple[int, bool] = (-1, False)
        found = None
        for part in "nvasr":
            first: dict[str, Any] = {}
            for sense in self._net.senses(form, part):
                first.setdefault(sense.word().lemma().lower(), sense)
            for lemma, sense in first.items():
                rank = sum(int(each) for each in sense.counts()), lemma == form
                if rank > best:
                    best, found = rank, sense.synset()
        return found

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
