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
        """The most frequent sense of a word, or of its base form by nltk's morphy."""
        best, found = -1, None
        for part in "nvar":
            lemma = self._corpus.morphy(word.lower().replace(" ", "_"), part)
            senses = self._corpus.synsets(lemma, part) if lemma else []
            for synset in senses[:1]:
                names = [each for each in synset.lemmas() if each.name().lower() == lemma]
                times = sum(each.count() for each in names)
                if times > best:
                    best, found = times, synset
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
        """The most frequent sense of a word, or of its base form by wn's morphy."""
        best, found = -1, None
        for part in "nvasr":
            for sense in self._net.senses(word, part)[:1]:
                times = sum(sense.counts())
                if times > best:
                    best, found = times, sense.synset()
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
