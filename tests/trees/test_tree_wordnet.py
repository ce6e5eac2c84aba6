"""Trees from WordNet, on a dictionary of a few words."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tiny_wordnet
from random_trees import left_to_right

from lastlayer import trees


@pytest.fixture
def folder(tmp_path):
    return tiny_wordnet.write(tmp_path / "dict")


@pytest.fixture(autouse=True)
def _no_wordnet_of_the_machine(monkeypatch):
    monkeypatch.delenv("WNSEARCHDIR", raising=False)
    monkeypatch.delenv("WNHOME", raising=False)
    monkeypatch.setattr("lastlayer.trees._wordnet_readers._USUAL", ())


def above(tree, word):
    """The names of the inner nodes on the way to a word."""
    path = tree.labels.index(word)
    part = slice(tree.path_start[path], tree.path_start[path + 1])
    return [tree.node_labels[v] for v in tree.path_node[part]]


def test_words_are_below_their_hypernyms(folder):
    words = ["poodle", "dog", "cat", "oak", "rose bush", "plant"]
    tree = trees.wordnet(words, path=folder, binary=False)
    assert tree.labels == tuple(words)
    assert above(tree, "poodle") == ["", "entity", "animal", "dog"]
    assert above(tree, "dog") == ["", "entity", "animal", "dog"]
    assert above(tree, "cat") == ["", "entity", "animal"]
    assert above(tree, "plant") == above(tree, "oak") == ["", "entity", "plant"]
    assert above(tree, "rose bush") == [""]


def test_words_of_one_sense_and_names(folder):
    words = ["beast", "animal", "Domestic Dog", "dog", "Rex"]
    tree = trees.wordnet(words, path=folder, binary=False)
    assert above(tree, "Domestic Dog") == above(tree, "dog") == above(tree, "Rex")
    assert above(tree, "beast") == ["animal"]


def test_the_most_frequent_sense_is_taken(folder):
    words = ["run", "rose", "saw", "geese", "dogs", "move", "cat", "oak"]
    tree = trees.wordnet(words, path=folder, binary=False)
    # The verb before the noun, the base form before the flower.
    assert above(tree, "run")[1:] == above(tree, "rose")[1:] == ["verb", "move"]
    assert above(tree, "saw")[1:] == ["verb"]
    assert above(tree, "geese")[1:] == above(tree, "dogs")[1:] == ["entity", "animal"]
    (folder / "cntlist.rev").unlink()
    tree = trees.wordnet(words, path=folder, binary=False)
    # Where nothing is known, the noun before the verb, and the word as it is before a base form.
    assert above(tree, "run")[1:] == ["entity"]
    assert above(tree, "rose")[1:] == ["entity", "plant"]


def test_verbs_without_hypernyms_are_put_together_by_file(folder):
    tree = trees.wordnet(["see", "run", "rise", "dog"], path=folder, binary=False)
    assert above(tree, "see") == ["", "verb"]
    assert above(tree, "run") == ["", "verb", "move"]


def test_adjectives_are_below_the_one_they_cluster_around(folder):
    tree = trees.wordnet(["happy", "glad", "sad", "quickly"], path=folder, binary=False)
    assert above(tree, "glad") == above(tree, "happy") == ["", "adj.all", "happy"]
    assert above(tree, "sad") == ["", "adj.all"]
    assert above(tree, "quickly") == [""]


def test_a_cycle_of_hypernyms_is_cut(folder):
    tree = trees.wordnet(["hold", "keep", "see"], path=folder, binary=False)
    assert above(tree, "hold") == ["verb", "keep"]
    assert above(tree, "keep") == ["verb", "keep"]


def test_words_that_wordnet_lacks_have_a_part_of_their_own(folder):
    words = ["cat", "the", "dog", "of", "<unk>", "2024"]
    tree = trees.wordnet(words, path=folder)
    lacking = "(not in WordNet)"
    assert tree.is_binary
    assert all(lacking in above(tree, word) for word in ("the", "of", "<unk>", "2024"))
    assert all(lacking not in above(tree, word) for word in ("cat", "dog"))
    counted = trees.wordnet(words, [1, 90, 1, 40, 5, 1], path=folder, binary=False)
    assert counted.is_binary
    assert [counted.depth(word) for word in ("the", "of", "<unk>", "2024")] == [2, 3, 4, 4]
    zeros = trees.wordnet(words, [1, 0, 0, 0, 0, 0], path=folder)
    assert {zeros.depth(word) for word in ("the", "of", "<unk>", "2024")} == {3}
    alone = trees.wordnet(["the"], path=folder)
    assert alone.n_inner == 0
    assert trees.wordnet(["the", "of"], path=folder).node_labels == (lacking,)
    assert trees.wordnet(["the", "cat", "dog"], path=folder, binary=False).depth("the") == 1


def test_wide_nodes_are_made_binary_by_counts(folder):
    words = ["animal", "cat", "goose", "poodle", "oak"]
    wide = trees.wordnet(words, path=folder, binary=False)
    assert wide.max_arity == 4
    tree = trees.wordnet(words, [1, 1, 50, 9, 5], path=folder)
    assert tree.is_binary
    assert sorted(left_to_right(tree)) == list(range(5))
    # Huffman's below "animal", which is all that it is below.
    assert [tree.depth(word) for word in words] == [4, 4, 2, 3, 1]
    assert above(tree, "cat") == ["entity", "animal", "", ""]


def test_wide_nodes_are_made_binary_by_vectors(folder):
    words = ["cat", "goose", "poodle", "dog", "oak", "animal", "beast"]
    vectors = np.array([[0.0], [9.0], [0.1], [0.3], [5.0], [9.1], [8.9]])
    tree = trees.wordnet(words, path=folder, vectors=vectors, seed=3)
    assert tree.is_binary
    # Below "animal": the cat and dogs on the one side, the rest on the other.
    side = {word: tree.code(word)[1] for word in words if word != "oak"}
    assert side["cat"] == side["dog"] == side["poodle"]
    assert side["goose"] == side["animal"] == side["beast"] != side["cat"]
    assert "dog" in above(tree, "poodle")


def test_where_the_files_are_looked_for(folder, monkeypatch):
    words = ["cat", "dog", "oak"]
    tree = trees.wordnet(words, path=str(folder))
    monkeypatch.setenv("WNHOME", str(folder.parent))
    assert trees.wordnet(words) == tree
    monkeypatch.setenv("WNSEARCHDIR", str(folder / "no"))
    with pytest.raises(FileNotFoundError, match=r"WNSEARCHDIR: expected .* no index\.noun"):
        trees.wordnet(words)
    monkeypatch.delenv("WNHOME")
    monkeypatch.delenv("WNSEARCHDIR")
    monkeypatch.setattr("lastlayer.trees._wordnet_readers._USUAL", (folder / "no", folder))
    assert trees.wordnet(words) == tree


def test_without_any_wordnet_the_ways_out_are_named(monkeypatch):
    module = sys.modules["lastlayer.trees.wordnet"]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="wordnet-base, or give path="):
        trees.wordnet(["cat"])
    for reader in ("nltk", "wn"):
        monkeypatch.setitem(sys.modules, reader, None)
        with pytest.raises(ImportError, match=f"reader: '{reader}' needs .*pip install {reader}"):
            trees.wordnet(["cat"], reader=reader)


def test_an_index_of_another_wordnet(folder):
    text = (folder / "index.noun").read_text().replace("cat n 1 1 @ 1 0 0", "cat n 1 1 @ 1 0 9")
    (folder / "index.noun").write_text(text)
    with pytest.raises(ValueError, match=r"path: expected a synset at byte 9.* of data\.noun"):
        trees.wordnet(["cat"], path=folder)


class Colours:
    """A reader of ones own."""

    def sense(self, word):
        return word if word in ("navy", "teal", "rust", "coral") else None

    def above(self, synset):
        return {"navy": "blue", "teal": "blue", "rust": "red", "coral": "red"}.get(synset)

    def name(self, synset):
        return synset

    def area(self, synset):
        return "colour"


def test_a_reader_of_ones_own():
    tree = trees.wordnet(["navy", "teal", "rust", "coral"], reader=Colours())
    assert tree.node_labels == ("colour", "blue", "red")
    assert [tree.code(word) for word in tree.labels] == [[0, 0], [0, 1], [1, 0], [1, 1]]


class NltkSynset:
    """What is used of nltk's synsets, over the tiny dictionary."""

    def __init__(self, row):
        self.part, self.key, self.kind, self.number, self.words, self.up = row

    def pos(self):
        return self.kind

    def lemma_names(self):
        return self.words.split()

    def lemmas(self):
        times = tiny_wordnet.FREQUENCIES
        code = {"noun": 1, "verb": 2, "adj": 3, "adv": 4}[self.part]
        return [
            SimpleNamespace(name=lambda w=w: w, count=lambda w=w: times.get(f"{w}%{code}", 0))
            for w in self.words.split()
        ]

    def _related(self, *symbols):
        *symbol, target = (self.up or "none").split()
        found = (symbol or ["@"])[0] in symbols and self.up
        return [each for each in NLTK if each.key == target] if found else []

    def hypernyms(self):
        return self._related("@")

    def instance_hypernyms(self):
        return self._related("@i")

    def similar_tos(self):
        return self._related("&")

    def lexname(self):
        names = {0: "adj.all", 2: "adv.all", 38: "verb.motion", 39: "verb.perception"}
        return names.get(self.number, f"{self.part}.other")


NLTK = [NltkSynset(row) for row in tiny_wordnet.SYNSETS]


def nltk_synsets(lemma, part):
    parts = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
    return [s for s in NLTK if s.part == parts[part] and lemma in s.words.lower().split()]


def test_nltk_gives_the_same_tree(folder, monkeypatch):
    def bases(form, part):
        found = [form, *{"dogs": ["dog"], "saw": ["see"], "rose": ["rise"]}.get(form, [])]
        return [each for each in found if nltk_synsets(each, part)]

    corpus = SimpleNamespace(ensure_loaded=lambda: None, _morphy=bases, synsets=nltk_synsets)
    package, module = ModuleType("nltk"), ModuleType("nltk.corpus")
    module.wordnet = corpus
    monkeypatch.setitem(sys.modules, "nltk", package)
    monkeypatch.setitem(sys.modules, "nltk.corpus", module)
    words = ["cat", "dogs", "poodle", "Rex", "run", "saw", "rose", "oak", "happy", "sad", "zzz"]
    assert trees.wordnet(words, reader="nltk") == trees.wordnet(words, path=folder)

    def missing():
        raise LookupError

    corpus.ensure_loaded = missing
    with pytest.raises(FileNotFoundError, match=r"nltk\.downloader wordnet"):
        trees.wordnet(words, reader="nltk")


class WnSynset:
    """What is used of the synsets of wn."""

    def __init__(self, row):
        self.key, self.pos, self.words, self.up = row[1], row[2], row[4], row[5]

    def hypernyms(self):
        return [] if not self.up or "&" in self.up else [WN[self.up.split()[-1]]]

    def get_related(self, relation):
        assert relation == "similar"
        return [WN[self.up.split()[-1]]] if "&" in (self.up or "") else []

    def lemmas(self):
        return self.words.split()

    def lexfile(self):
        return None


WN = {row[1]: WnSynset(row) for row in tiny_wordnet.SYNSETS}


def test_wn_gives_the_same_structure(folder, monkeypatch):
    def senses(form, part):
        forms = [form, *{"rose": ["rise"]}.get(form, [])]
        return [
            SimpleNamespace(
                synset=lambda s=s: s,
                counts=lambda s=s: [9] if s.pos == "v" else [],
                word=lambda each=each: SimpleNamespace(lemma=lambda: each),
            )
            for each in forms
            for s in WN.values()
            if s.pos == part and each.replace(" ", "_") in s.words.lower().split()
        ]

    installed = ["tiny"]
    module, morphy = ModuleType("wn"), ModuleType("wn.morphy")
    module.lexicons = lambda: installed
    module.Wordnet = lambda lemmatizer: SimpleNamespace(senses=senses)
    morphy.morphy = None
    monkeypatch.setitem(sys.modules, "wn", module)
    monkeypatch.setitem(sys.modules, "wn.morphy", morphy)
    words = ["cat", "Domestic_dog", "poodle", "oak", "run", "rose", "happy", "sad", "zzz"]
    tree = trees.wordnet(words, reader="wn", binary=False)
    files = trees.wordnet(words, path=folder, binary=False)
    assert [tree.code(word) for word in words] == [files.code(word) for word in words]
    installed.clear()
    with pytest.raises(FileNotFoundError, match="wn download oewn"):
        trees.wordnet(words, reader="wn")
