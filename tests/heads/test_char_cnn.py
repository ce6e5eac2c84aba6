"""Class vectors from spellings."""

import copy
import json
import math
import pickle
from functools import partial

import pytest
import torch

from lastlayer import fused, optim
from lastlayer.heads import Head
from lastlayer.heads.char_cnn import CharCNNSoftmax
from lastlayer.testing import check_head

WORDS = [
    "cat", "cats", "catnip", "dog", "dogs", "the", "then", "there", "naïve", "über", "漢字", "🦓",
    "a", "ab", "abc", "zebra", "zebras",
]  # fmt: skip
FILTERS = ((1, 5), (2, 6), (3, 7))
LIKELIHOODS = {
    "plain": {},
    "in chunks": {"chunk_classes": 5, "correction": 3, "ignore_index": 4},
    "spelling alone": {"correction": 0, "bias": False, "highway_layers": 1, "max_length": 4},
}
# Where another n-gram becomes the largest, a finite difference jumps; and gradients of all classes
# that nearly cancel are mostly rounding in bfloat16. Such rules are held to fixed inputs.
SMOOTH_SEED = 1
KINKED = {"gradients": False, "log_prob_gradients": False, "autocast": False}


def make(words=WORDS, in_features=7, **options):
    return CharCNNSoftmax(in_features, words, **{"filters": FILTERS, **options})


@pytest.fixture
def head():
    return make(correction=3)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_it_keeps_the_contract_of_heads(name, seed):
    check_head(partial(make, **LIKELIHOODS[name]), draws=2000, compile=False, seed=seed, **KINKED)


def test_gradients_and_compiling():
    check_head(make, draws=500, seed=SMOOTH_SEED)
    check_head(
        partial(make, chunk_classes=5, highway_layers=1, label_smoothing=0.1),
        draws=500, loss_is_nll=False, seed=SMOOTH_SEED,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_on_a_gpu(name):
    check_head(partial(make, **LIKELIHOODS[name]), device="cuda", seed=SMOOTH_SEED)


def slow_vector(head, word):
    """The vector of a word without correction, by the definition: a loop over its windows."""
    cnn = head.cnn
    symbols = [256, *word.encode()[: head.max_length], 257]
    features = []
    for (width, _), layer in zip(head.filters, cnn.filters, strict=True):
        padded = symbols + [258] * (width - 1)
        windows = [padded[i : i + width] for i in range(len(symbols))]
        values = [layer(cnn.chars(torch.tensor(window)).flatten()) for window in windows]
        features.append(torch.stack(values).amax(0).relu())
    x = torch.cat(features)
    for highway in cnn.highway:
        changed, gate = highway.linear(x).chunk(2)
        x = gate.sigmoid() * changed.relu() + (1 - gate.sigmoid()) * x
    return cnn.project(x)


@pytest.mark.parametrize(("chunk", "layers"), [("auto", 2), (6, 0), (1, 3)])
def test_vectors_are_those_of_the_definition(chunk, layers):
    options = {"chunk_classes": chunk, "highway_layers": layers}
    head = make(correction=3, max_length=4, **options).double()
    expected = torch.stack([slow_vector(head, word) for word in WORDS])
    expected = expected + head.corrections @ head.correct.weight.t()
    torch.testing.assert_close(head.class_vectors(), expected)
    upstream = torch.randn_like(expected)
    made, by_definition = (
        torch.autograd.grad(vectors, head.cnn.parameters(), upstream)
        for vectors in (head.class_vectors(), expected)
    )
    for one, other in zip(made, by_definition, strict=True):
        torch.testing.assert_close(one, other)


def test_the_loss_is_the_cross_entropy_of_the_vectors(head):
    hidden, target = torch.randn(9, 7), torch.randint(len(WORDS), (9,))
    scores = hidden @ head.class_vectors().t() + head.bias
    expected = torch.nn.functional.cross_entropy(scores, target)
    torch.testing.assert_close(head(hidden, target), expected)


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.01), (torch.float16, 0.0025)])
def test_half_precision_sends_gradients_to_the_ngrams_of_float64(dtype, within):
    # With many words, some have several n-grams that give a filter nearly equal values.
    words = [f"{i * i + 7 * i:o}" for i in range(300)]
    options = {"filters": ((1, 16), (2, 16), (3, 32)), "highway_layers": 0}
    half, exact = (CharCNNSoftmax(16, words, dtype=each, **options)
                   for each in (dtype, torch.float64))  # fmt: skip
    exact.load_state_dict(half.state_dict())
    hidden, target = torch.randn(64, 16, dtype=dtype), torch.randint(len(words), (64,))
    half(hidden, target).backward()
    exact(hidden.double(), target).backward()
    for layer, same in zip([half.cnn.chars, *half.cnn.filters],
                           [exact.cnn.chars, *exact.cnn.filters], strict=True):  # fmt: skip
        error = (layer.weight.grad - same.weight.grad).norm() / same.weight.grad.norm()
        assert error < within


def test_words_that_begin_alike_differ():
    # Many filters: with a few the maxima over "zebra" and "zebras" may be the same.
    head = make(filters=((1, 20), (2, 30), (3, 40)), correction=0, bias=False)
    vectors = head.class_vectors()
    # By differences: a product of matrices would round small distances to 0.
    apart = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart + torch.eye(len(WORDS))
    assert apart.min() > 1e-4


def test_a_bag_of_letters_is_told_apart_by_its_correction_alone():
    words = ["abc", "cab"]
    vectors = make(words, filters=((1, 8),), correction=0).class_vectors()
    assert torch.equal(vectors[0], vectors[1])
    vectors = make(words, filters=((1, 8),), correction=2).class_vectors()
    assert not torch.equal(vectors[0], vectors[1])


def test_parameters_of_the_correction():
    def count(**options):
        return sum(each.numel() for each in make(**options).parameters())

    n = len(WORDS)
    assert count(correction=5) - count(correction=0) == n * 5 + 5 * 7
    assert count(bias=True) - count(bias=False) == n
    features = 5 + 6 + 7
    filters = sum(number * (16 * width + 1) for width, number in FILTERS)
    highway = 2 * (features * 2 * features + 2 * features)
    expected = 259 * 16 + filters + highway + features * 7
    assert count(correction=0, bias=False) == expected


def test_the_gradient_reaches_everything(head):
    hidden, target = torch.randn(20, 7, requires_grad=True), torch.randint(len(WORDS), (20,))
    head(hidden, target).backward()
    names = {name.split(".")[0] for name, _ in head.cnn.named_parameters()}
    assert names == {"chars", "filters", "highway", "project"}
    for name, parameter in [*head.named_parameters(), ("hidden", hidden)]:
        assert parameter.grad.abs().sum() > 0, name


def test_long_words_are_read_up_to_max_length():
    long = "x" * 40
    head = make([long + "a", long + "b", "x" * 5000], max_length=40, correction=0)
    vectors = head.class_vectors()
    # The rows of a product may be rounded differently.
    torch.testing.assert_close(vectors[1:], vectors[:1].expand(2, -1))
    vectors = make([long + "a", long + "b"], max_length=41, correction=0).class_vectors()
    assert not torch.allclose(vectors[0], vectors[1])


def test_a_character_may_be_cut_in_two():
    # The first byte of each of these is the same, the second is not.
    head = make(["é", "è"], max_length=1, filters=((1, 4),), correction=0)
    vectors = head.class_vectors()
    assert torch.equal(vectors[0], vectors[1])


def test_vectors_are_kept_while_nothing_is_recorded(head):
    head.eval()
    with torch.no_grad():
        first = head.class_vectors()
        assert head.class_vectors() is first
        assert not head.class_vectors().requires_grad
    assert head.class_vectors() is not first
    assert head.class_vectors().requires_grad
    assert "vectors" not in " ".join(head.state_dict())
    assert all(name in dict(head.named_parameters()) for name in head.state_dict())


def test_topk_in_chunks_makes_the_vectors_once(head, monkeypatch):
    calls = []
    make_vectors = head._made_vectors
    monkeypatch.setattr(head, "_made_vectors", lambda: calls.append(1) or make_vectors())
    head.chunk_rows = 2
    head.topk(torch.randn(11, 7), 3)
    head.sample(torch.randn(11, 7), 3)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("early", [False, True], ids=["after backward", "before backward"])
def test_a_fused_step_is_noticed_whatever_comes_between(head, mode, early):
    """It leaves no trace in the versions of the parameters."""
    hidden, target = torch.randn(4, 7), torch.arange(4)
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0, fused=True)
    getattr(head, mode)()
    for _ in range(2):
        loss = head(hidden, target)
        if early:
            before = head.topk(hidden, 3).values
        loss.backward()
        if not early:
            before = head.topk(hidden, 3).values
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            expected = torch.log_softmax(hidden @ head._made_vectors().t() + head.bias, -1)
        found = head.topk(hidden, 3).values
        torch.testing.assert_close(found, expected.topk(3).values)
        assert not torch.equal(found, before)


def test_nothing_is_compared_where_no_optimiser_can_have_written(head, monkeypatch):
    head.eval()
    with torch.no_grad():
        kept = head.class_vectors()
        monkeypatch.setattr(torch, "equal", None)
        assert head.class_vectors() is kept


def test_no_hook_is_installed_for_all_optimisers(head):
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


def _step(head):
    optimiser = torch.optim.SGD(head.parameters(), lr=1.0)
    head(torch.randn(4, 7), torch.arange(4)).backward()
    optimiser.step()


def _write_in_place(head):
    with torch.no_grad():
        head.cnn.chars.weight.mul_(2.0)


def _put_other_data(head):
    head.corrections.data = head.corrections.data + 1.0


def _put_another_parameter(head):
    head.cnn.project.weight = torch.nn.Parameter(torch.randn_like(head.cnn.project.weight))


def _write_unseen_and_switch(head):
    head.cnn.chars.weight.data.mul_(2.0)
    head.eval()


CHANGES = {
    "a step": _step,
    "written in place": _write_in_place,
    "other data": _put_other_data,
    "another parameter": _put_another_parameter,
    "load_state_dict": lambda head: head.load_state_dict(make(correction=3).state_dict()),
    "assigned state": lambda head: head.load_state_dict(
        make(correction=3).state_dict(), assign=True
    ),
    "another dtype": lambda head: head.double(),
    "more classes": lambda head: head.add_classes(["wolf"]),
    "switched": _write_unseen_and_switch,
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_stale_vector_is_ever_used(head, change):
    head.eval()
    with torch.no_grad():
        before = head.class_vectors()
    CHANGES[change](head)
    with torch.no_grad():
        after = head.class_vectors()
    assert after is not before
    assert after.shape != before.shape or not torch.equal(after, before)
    assert torch.equal(after, head._made_vectors())


def test_vectors_of_autocast_and_inference_are_kept_apart(head):
    head.eval().requires_grad_(False)
    hidden = torch.randn(3, 7, requires_grad=True)
    with torch.inference_mode():
        head.log_prob(hidden)
    head.log_prob(hidden).sum().backward()  # on a tensor of inference mode this would raise
    exact = head.class_vectors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = head.class_vectors()
    assert not torch.equal(exact, rounded.float())
    assert torch.equal(head.class_vectors(), exact)


def test_functional_call_does_not_see_kept_vectors(head):
    head.eval()
    hidden = torch.randn(3, 7)
    others = {name: each.detach() * 2.0 for name, each in head.named_parameters()}
    with torch.no_grad():
        own = head(hidden, torch.arange(3))
        swapped = torch.func.functional_call(head, others, (hidden, torch.arange(3)))
        assert not torch.equal(own, swapped)
        assert torch.equal(head(hidden, torch.arange(3)), own)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_copy_does_not_have_the_kept_vectors(head, copied):
    head.eval()
    with torch.no_grad():
        kept = head.class_vectors()
        other = copied(head)
        assert other._kept is None
        assert torch.equal(other.class_vectors(), kept)


@pytest.mark.parametrize("options", [{}, {"correction": 0, "bias": False}])
def test_added_classes_score_as_if_they_had_been_there(options):
    head, new = make(WORDS[:11], **options), WORDS[11:]
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    assert head.add_classes(new) == range(11, len(WORDS))
    assert head.n_classes == len(WORDS)
    assert head.spellings == tuple(WORDS)
    whole = make(WORDS, **options)
    keys = whole.load_state_dict(head.state_dict())
    assert not keys.missing_keys
    if head.corrections is not None:
        assert torch.equal(head.corrections[11:], torch.zeros(len(new), 16))
        torch.testing.assert_close(head.bias[11:], head.bias[:11].mean().expand(len(new)))
    hidden, target = torch.randn(5, 7), torch.arange(12, 17)
    torch.testing.assert_close(head.log_prob(hidden), whole.log_prob(hidden))
    torch.testing.assert_close(head(hidden, target), whole(hidden, target))
    assert head.topk(hidden, len(WORDS)).classes.max() == len(WORDS) - 1


def test_the_scores_of_other_classes_stay(head):
    hidden = torch.randn(5, 7)
    before = head.log_prob(hidden)
    head.add_classes(["wolf", "wolves"])
    after = head.log_prob(hidden)[:, : len(WORDS)]
    torch.testing.assert_close(after.log_softmax(-1), before)


def test_an_extended_head_is_saved_with_its_words(head, tmp_path):
    head.add_classes(["wolf", "狼"])
    head.save(tmp_path)
    arguments = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["arguments"]
    assert arguments["spellings"] == [*WORDS, "wolf", "狼"]
    loaded = Head.load(tmp_path)
    assert loaded.spellings == head.spellings
    assert loaded.config() == head.config()
    hidden = torch.randn(4, 7)
    assert torch.equal(loaded.log_prob(hidden), head.log_prob(hidden))


def test_from_meta(head):
    other = make(correction=3, device="meta").to_empty(device="cpu")
    other.reset_parameters()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.class_vectors(), head.class_vectors())


def test_what_it_says_does_not_have_all_the_words(head):
    shown = head.extra_repr()
    assert shown == f"in_features=7, n_classes={len(WORDS)}, correction=3, filters={FILTERS}"


def test_other_fused_losses_take_the_vectors(head):
    hidden, target = torch.randn(5, 7), torch.arange(5)
    fused.linear_entmax_loss(hidden, head.class_vectors(), target, head.bias).backward()
    assert head.cnn.chars.weight.grad.abs().sum() > 0


STEMS = ["read", "walk", "talk", "play", "cook", "paint", "help", "jump"]
ENDINGS = ["s", "ed", "ing", "er", "able", "less"]


def test_it_learns_and_knows_words_it_never_saw():
    """The hidden state says which stem and which ending comes."""
    pairs = [(i, j) for i in range(len(STEMS)) for j in range(len(ENDINGS))]
    states = torch.zeros(len(pairs), len(STEMS) + len(ENDINGS))
    for row, (i, j) in enumerate(pairs):
        states[row, i] = states[row, len(STEMS) + j] = 2.0
    words = [STEMS[i] + ENDINGS[j] for i, j in pairs]
    unseen = torch.arange(len(pairs)) % 11 == 3
    known = [word for word, new in zip(words, unseen.tolist(), strict=True) if not new]
    head = CharCNNSoftmax(14, known, filters=((1, 8), (2, 16), (3, 32)), highway_layers=1)
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(200):
        target = torch.randint(len(known), (32,))
        hidden = states[~unseen][target]
        loss = head(hidden + 0.3 * torch.randn_like(hidden), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    unigram_entropy = math.log(len(known))
    assert loss < 0.2 * unigram_entropy
    new = head.add_classes([word for word in words if word not in known])
    head.eval()
    ranks = head.topk(states[unseen], head.n_classes).classes == torch.tensor(new).unsqueeze(-1)
    assert ranks.int().argmax(-1).max() < 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"words": []}, ValueError, "spellings: expected at least one class, got an empty list"),
        ({"words": "cat"}, TypeError, "spellings: expected a list of strings, got str"),
        ({"words": 7}, TypeError, "spellings: expected a list of strings, got int"),
        ({"words": ["a", 5]}, TypeError, "spellings: expected strings, got int 5 at position 1"),
        ({"words": ["a", ""]}, ValueError, "spellings: .*, got '' at position 1"),
        ({"words": ["a", "b", "a"]}, ValueError, "got 'a' at position 0 and at position 2"),
        ({"words": ["a", "\ud800"]}, ValueError, r"UTF-8 can encode, got '\\ud800' at position 1"),
        ({"filters": ((2, 4), (9, 4)), "max_length": 8}, ValueError,
         "filters: expected widths up to max_length=8, got 9 at position 1"),
        ({"filters": ()}, ValueError, "filters: expected at least one pair"),
        ({"filters": 3}, TypeError, "filters: expected pairs"),
        ({"filters": (3, 4)}, TypeError, "filters: expected pairs .*, got 3 at position 0"),
        ({"filters": ((3, 0),)}, ValueError, "filters: number at position 0: .* got 0"),
        ({"filters": ((1.5, 2),)}, TypeError, "filters: width at position 0: .* got float"),
        ({"correction": -1}, ValueError, "correction: expected at least 0.*, got -1"),
        ({"correction": 2.0}, TypeError, "correction: expected an int.*, got float"),
        ({"correction": True}, TypeError, "correction: expected an int.*, got bool"),
        ({"highway_layers": -1}, ValueError, "highway_layers: expected at least 0.*, got -1"),
        ({"char_features": 0}, ValueError, "char_features: expected at least 1, got 0"),
        ({"max_length": 0}, ValueError, "max_length: expected at least 1, got 0"),
        ({"chunk_classes": 0}, ValueError, "chunk_classes: expected at least 1, got 0"),
        ({"chunk_classes": "low"}, ValueError, "chunk_classes: expected an int or 'auto'"),
        ({"label_smoothing": 2}, ValueError, "label_smoothing: expected .* from 0 to 1, got 2"),
    ],
)  # fmt: skip
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "spellings: expected at least one class"),
        (["wolf", "dog"], "got 'dog' as class 3 already and at position 1"),
        (["wolf", "wolf"], "got 'wolf' at position 0 and at position 1"),
    ],
)
def test_bad_words_change_nothing(head, words, message):
    before = head.state_dict()
    with pytest.raises(ValueError, match=message):
        head.add_classes(words)
    assert head.spellings == tuple(WORDS)
    assert head.corrections.shape == before["corrections"].shape


def test_float64_stays_float64_under_autocast():
    head = CharCNNSoftmax(8, ["one", "two", "three"], filters=[(2, 4)], dtype=torch.float64)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    expected = head.log_prob(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head.log_prob(hidden), expected)


def spelled(**options):
    return CharCNNSoftmax(
        8, ["play", "plays", "walk", "walks"], filters=((1, 4),), correction=3, **options
    )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_kept_vectors_are_made_again_after_a_step_of_a_fused_optimiser(kind):
    head = spelled()
    optimizer = kind(head.parameters(), lr=0.1, fused=True)
    head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
    with torch.no_grad():
        before = head.class_vectors().clone()
        optimizer.step()
        assert not torch.equal(head.class_vectors(), before)
        torch.testing.assert_close(head.class_vectors(), head._made_vectors())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.RowAdagrad(p, lr=0.1),
        lambda p: optim.RowAdam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ],
)
def test_an_older_optimiser_does_not_know_the_parameters_of_added_classes(make):
    """Its state has too few rows for them; a new one steps them."""
    head = spelled()

    def steps(optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
            optimizer.step()

    old = make(head.parameters())
    steps(old)
    head.add_classes(["new"])
    before = {name: each.detach().clone() for name, each in head.named_parameters()}
    steps(old)
    changed = {
        name for name, each in head.named_parameters() if not torch.equal(each, before[name])
    }
    assert not changed & {"bias", "corrections"}
    assert "cnn.project.weight" in changed
    steps(make(head.parameters()))
    assert not torch.equal(head.bias, before["bias"])
    assert not torch.equal(head.corrections, before["corrections"])


def test_classes_added_in_inference_mode_can_be_trained():
    head = spelled()
    with torch.inference_mode():
        head.add_classes(["new"])
    head(torch.randn(5, 8), torch.tensor([0, 1, 2, 4, 4])).backward()
    assert head.corrections.grad.shape == (5, 3)


def test_biases_start_at_the_frequencies(head):
    counts = torch.arange(len(WORDS))
    head.init_bias_from_counts(counts)
    expected = counts.double().clamp(min=0.5)
    expected = (expected / expected.sum()).log().float()
    torch.testing.assert_close(head.log_prob(torch.zeros(7)), expected)
    with pytest.raises(ValueError, match=r"init_bias_from_counts: .* make it with bias=True"):
        make(bias=False).init_bias_from_counts(counts)
    with pytest.raises(ValueError, match="counts: expected shape"):
        head.init_bias_from_counts([1, 2])


def test_its_configuration_makes_the_same_head(head):
    other = CharCNNSoftmax(**head.config())
    other.load_state_dict(head.state_dict())
    hidden = torch.randn(3, 7)
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))
    assert repr(other) == repr(head)
