"""The loss for sentence-transformers: with the library's own losses, and in training."""

import copy
import importlib.util
import string
import warnings

import pytest
import torch

from lastlayer.integrations.sentence_transformers import InfoNCELoss

installed = importlib.util.find_spec("sentence_transformers") is not None
needs_library = pytest.mark.skipif(
    not installed, reason="sentence-transformers is not installed: pip install lastlayer[st]"
)
TEXTS = ["a cat sat", "two dogs ran", "rain fell", "the sun set", "a red car", "an old house"]
POSITIVES = ["the cat", "dogs", "it rained", "sunset", "car", "house"]
NEGATIVES = ["fish", "birds", "snow", "moon", "bike", "barn"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small BERT with a vocabulary of letters, made from its configuration."""
    folder = tmp_path_factory.mktemp("bert")
    letters = [*string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer, models
        from transformers import BertConfig, BertModel, BertTokenizer

        config = BertConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        BertModel(config).save_pretrained(folder)
        BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
        transformer = models.Transformer(str(folder))
        pooling = models.Pooling(32, "mean")
        return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def features(model, *columns):
    prepare = getattr(model, "preprocess", None) or model.tokenize
    return [dict(prepare(list(column))) for column in columns]


@needs_library
def test_equals_the_ranking_loss_of_the_library(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it moves between versions
        from sentence_transformers.losses import MultipleNegativesRankingLoss

    pairs = features(model, TEXTS, POSITIVES)
    triplets = features(model, TEXTS, POSITIVES, NEGATIVES)
    both_ways = dict(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
    for columns in (pairs, triplets):
        for symmetric, options in ((False, {}), (True, both_ways)):
            ours = InfoNCELoss(model, 15.0, symmetric=symmetric)
            theirs = MultipleNegativesRankingLoss(model, 15.0, **options)
            torch.testing.assert_close(ours(columns, None), theirs(columns, None))


@needs_library
def test_trains_a_model_and_its_scale(model):
    model = copy.deepcopy(model)  # other tests have it untrained
    loss = InfoNCELoss(model, learn_scale=True, symmetric=True)
    scale = loss.info_nce.log_scale
    start = float(scale.detach())
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(features(model, TEXTS, POSITIVES), None)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert float(scale.detach()) != start


class Vectors(torch.nn.Module):
    """As a model: features are vectors."""

    def forward(self, column):
        return {"sentence_embedding": column["vectors"]}


def columns(*vectors):
    return [{"vectors": each} for each in vectors]


def test_labels_are_groups_where_they_are_asked_for():
    vectors = torch.eye(3).repeat(2, 1)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    plain = InfoNCELoss(Vectors(), 100.0)(columns(vectors, vectors), labels)
    torch.testing.assert_close(plain, torch.tensor(2.0).log())
    for same_group in ("positive", "ignore"):
        loss = InfoNCELoss(Vectors(), 100.0, group_by_label=True, same_group=same_group)
        torch.testing.assert_close(loss(columns(vectors, vectors), labels), torch.tensor(0.0))
    with pytest.raises(ValueError, match="labels: expected the group of each pair, got None"):
        loss(columns(vectors, vectors))


def test_errors_and_the_card():
    with pytest.raises(ValueError, match="scale: expected a finite number above 0, got 0"):
        InfoNCELoss(Vectors(), 0)
    with pytest.raises(ValueError, match=r"similarity: expected one of .* got 'euclid'"):
        InfoNCELoss(Vectors(), similarity="euclid")
    loss = InfoNCELoss(Vectors(), 1.0, similarity="dot", gather_across_devices=True)
    with pytest.raises(ValueError, match="a column of anchors and one of positives, got 1"):
        loss(columns(torch.eye(2)))
    query, key = torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.nn.functional.cross_entropy(query @ key.T, torch.arange(4))
    torch.testing.assert_close(loss(columns(query, key)), expected)
    card = loss.get_config_dict()
    again = InfoNCELoss(Vectors(), **card)
    assert again.get_config_dict() == card
    assert "@misc" in loss.citation
    assert loss.temperature == pytest.approx(1.0)
