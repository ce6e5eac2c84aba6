"""What torch and other libraries do to modules: heads are whole afterwards, or say what is not."""

import copy

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from lastlayer import _torch, heads, samplers
from tests.heads.every_head import (
    EVERY_HEAD,
    LABELS,
    N_CLASSES,
    OWN_DRAWS,
    SPARSE,
    WIDTH,
    batch,
    make,
)


@pytest.fixture
def poisoned(monkeypatch):
    """Has to_empty leave numbers that would be far out of every table."""
    full_like = torch.full_like

    def filled(tensor, **given):
        return full_like(tensor, torch.nan if tensor.is_floating_point() else 2**30, **given)

    monkeypatch.setattr(torch, "empty_like", filled)


def on_meta(name: str, how: str):
    if how == "argument":
        return make(name, device="meta")
    with torch.device("meta"):
        return make(name)


def predictions(head, name: str):
    """The loss of a step, its gradients, and the best classes."""
    hidden, target = batch(name, 5)
    hidden.requires_grad_()
    loss = head(hidden, target)
    gradients = torch.autograd.grad(loss, [hidden, *head.parameters()], allow_unused=True)
    return [loss, *gradients, *head.topk(hidden, 3), head.log_prob(hidden)]


@pytest.mark.thin(3)
@pytest.mark.parametrize("how", ["argument", "context"])
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_made_on_meta_and_loaded(name, how, poisoned):
    head = make(name)
    state = copy.deepcopy(head.state_dict())
    expected = predictions(head, name)
    for assign in (False, True):
        other = on_meta(name, how)
        if not assign:
            other.to_empty(device="cpu")
        other.load_state_dict(copy.deepcopy(state), assign=assign)
        torch.testing.assert_close(predictions(other, name), expected)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_made_on_meta_and_reset(name, poisoned):
    head = on_meta(name, "context").to_empty(device="cpu")
    head.reset_parameters()
    assert predictions(head, name)[0].isfinite()


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_emptied_memory_is_never_an_index(name, poisoned):
    """Parameters are nonsense; tables are as they were."""
    head, hidden = make(name), batch(name, 5)[0]
    best = head.topk(hidden, 3)
    state = copy.deepcopy(dict(head.named_parameters()))
    head.to_empty(device="cpu")
    assert all(each.isnan().all() for each in head.parameters())
    head.load_state_dict(state, strict=False)
    torch.testing.assert_close(head.topk(hidden, 3), best)


def test_a_state_that_only_a_state_can_give():
    with torch.device("meta"):
        weight = torch.ones(N_CLASSES)
        head = heads.FullSoftmax(WIDTH, N_CLASSES, class_weight=weight)
    head.to_empty(device="cpu").reset_parameters()
    with pytest.raises(RuntimeError, match=r"class_weight: expected the values .* load_state_dict"):
        head(torch.randn(2, WIDTH), torch.tensor([1, 2]))


class Offset(heads.Head):
    """A head of one's own whose classes are shifted by a table."""

    def __init__(self, in_features: int, n_classes: int, saved: bool = True) -> None:
        super().__init__(in_features, n_classes)
        self.saved = saved
        self.weight = torch.nn.Parameter(torch.randn(n_classes, in_features))
        if not saved:
            self.register_buffer("shift", torch.arange(n_classes).roll(1), persistent=False)

    def _make_tables(self, device: torch.device) -> None:
        if self.saved:
            self.shift = torch.arange(self.n_classes, device=device).roll(1)

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        self._check_hidden(hidden)
        made = (hidden @ self.weight.t()).log_softmax(-1).index_select(-1, self.shift)
        return made if classes is None else made.gather(-1, classes.unsqueeze(-1)).squeeze(-1)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return -self.log_prob(hidden, target).mean()


def test_a_head_of_ones_own(poisoned):
    head, hidden = Offset(WIDTH, N_CLASSES), torch.randn(3, WIDTH)
    with torch.device("meta"):
        other = Offset(WIDTH, N_CLASSES)
    other.to_empty(device="cpu").load_state_dict(head.state_dict())
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))
    with torch.device("meta"):
        wrong = Offset(WIDTH, N_CLASSES, saved=False)
    wrong.to_empty(device="cpu").load_state_dict(head.state_dict())
    with pytest.raises(RuntimeError, match=r"shift: expected .* created in _make_tables"):
        wrong.log_prob(hidden)
    # As a loader of another library would give it memory.
    wrong.shift = torch.full((N_CLASSES,), 2**30)
    with pytest.raises(RuntimeError, match="shift: expected the values of a buffer of Offset"):
        wrong.log_prob(hidden)


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.Unigram([5, 3, 1]),
        samplers.LogUniform(3, order=[2, 0, 1]),
        samplers.AdaptiveNGram([5, 3, 1], contexts=4, width=2),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_sampler_whose_tables_are_lost(sampler, poisoned):
    given = {"context": torch.tensor([[1], [2]])} if sampler.needs_context else {}
    expected = sampler.sample(20, rng_counter=(1, 0), **given)
    state = copy.deepcopy(sampler.state_dict())
    lost = copy.deepcopy(sampler).to_empty(device="cpu")
    assert torch.equal(lost.sample(20, rng_counter=(1, 0), **given), expected)
    lost = copy.deepcopy(sampler).to("meta").to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="expected the values of a buffer"):
        lost.sample(20, rng_counter=(1, 0), **given)
    lost.load_state_dict(state)
    assert torch.equal(lost.sample(20, rng_counter=(1, 0), **given), expected)


def test_loaded_tables_are_checked():
    head = make("sampled")
    state = copy.deepcopy(head.state_dict())
    state["sampler.table"] += 2**40
    with pytest.raises(ValueError, match="weight: expected 23 integers above 0 that sum to"):
        head.load_state_dict(state)
    lists = samplers.AdaptiveNGram([5, 3, 1], contexts=4, width=2)
    lists.lists[0].classes[0, 0] = 3
    with pytest.raises(ValueError, match="classes: expected class ids from 0 to 2 in lists"):
        lists.sample(4, context=torch.tensor([[1]]))


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_storages_stay_resizable(name):
    """FSDP2 frees parameters by resizing their storage, which ``Tensor.numpy()`` forbids."""
    head, (hidden, target) = make(name), batch(name, 5)
    hidden.requires_grad_()
    head(hidden, target).backward()
    head.topk(hidden, 3)
    head.log_prob(hidden)
    if name not in LABELS:
        head.sample(hidden)
    for each in (hidden, *head.parameters()):
        assert each.untyped_storage().resizable()


@pytest.mark.parametrize("has_dlpack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bool])
def test_an_array_shares_the_memory_of_a_tensor(monkeypatch, dtype, has_dlpack):
    """Older torch or NumPy lacks the exchange by DLPack."""
    monkeypatch.setattr(_torch, "_HAS_DLPACK", has_dlpack and _torch._HAS_DLPACK)
    tensor = torch.randint(2, (3, 4)).to(dtype).t()[1:]
    array = _torch.as_numpy(tensor)
    assert array.tolist() == tensor.tolist()
    array[0, 0] = not array[0, 0]
    assert array.tolist() == tensor.tolist()
    assert tensor.untyped_storage().resizable()
    assert _torch.as_numpy(tensor[:, :0]).shape == (3, 0)
    assert _torch.as_numpy(tensor[0, 0]).shape == ()


def test_a_module_of_another_library_that_is_loaded_tensor_by_tensor(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "lastlayer_test"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.tree, self.sampled = make("huffman"), make("tail")
            self.post_init()

    model = Model(Config())
    hidden, target = batch("huffman", 4)
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, dtype=torch.float64).train()
    for name in ("tree", "sampled"):
        one, other = getattr(model, name), getattr(loaded, name)
        torch.testing.assert_close(other(hidden, target), one(hidden, target))
        torch.testing.assert_close(other.topk(hidden, 3), one.topk(hidden, 3))


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_empty_weights_are_trained_once_loaded(name):
    accelerate = pytest.importorskip("accelerate")
    head, given = make(name), batch(name, 4)
    state = copy.deepcopy(head.state_dict())
    contexts = {
        "parameters": accelerate.init_empty_weights(include_buffers=False),
        "parameters and buffers": accelerate.init_empty_weights(include_buffers=True),
        "all": torch.device("meta"),
    }
    trained(head, given)
    for what, context in contexts.items():
        with context:
            other = make(name)
        other.load_state_dict(copy.deepcopy(state), assign=True)
        trained(other, given)
        for key, value in head.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], value, msg=f"{key}, empty {what}")


def trained(head, given) -> None:
    """Two steps: the second has other draws, and the state of the optimiser."""
    optimiser = torch.optim.AdamW(head.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        head(*given).backward()
        optimiser.step()


def of_parameters(head, given):
    """The loss as a function of the parameters, for torch.func."""
    return lambda parameters, *rows: functional_call(head, parameters, rows or given)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_a_gradient_by_torch_func(name):
    one, other, given = make(name), make(name), batch(name, 5)
    for _ in range(2):  # the second time with other draws
        found = torch.func.grad(of_parameters(one, given))(dict(one.named_parameters()))
        other.zero_grad()
        other(*given).backward()
        for key, each in other.named_parameters():
            torch.testing.assert_close(found[key], each.grad)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [n for n in EVERY_HEAD if n not in ("two_level", *OWN_DRAWS)])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_single_rows_by_vmap(name):
    one, other, (hidden, target) = make(name), make(name), batch(name, 5)
    parameters = {key: each.detach() for key, each in one.named_parameters()}

    def loss_of_a_row(parameters, row, of_row):
        return functional_call(one, parameters, (row[None], of_row[None]))

    rows = torch.func.vmap(torch.func.grad(loss_of_a_row), (None, 0, 0))
    found = rows(parameters, hidden, target)
    other(hidden, target).backward()
    for key, each in other.named_parameters():
        torch.testing.assert_close(found[key].mean(0), each.grad)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [n for n in EVERY_HEAD if n != "adaptive_importance"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_heads_at_once_by_vmap(name):
    one, given = make(name), batch(name, 5)
    several = {
        key: torch.stack([each.detach(), 2 * each.detach()]) for key, each in one.named_parameters()
    }
    found = torch.func.vmap(of_parameters(make(name), given))(several)
    for i in range(2):
        expected = of_parameters(make(name), given)({key: each[i] for key, each in several.items()})
        torch.testing.assert_close(found[i], expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own code
def test_transforms_that_are_not_there_say_so():
    head, given = make("full"), batch("full", 5)
    loss, parameters = of_parameters(head, given), dict(head.named_parameters())
    twice = torch.func.grad(lambda p: torch.func.grad(loss)(p)["weight"].square().sum())
    with pytest.raises(RuntimeError, match="expected one derivative"):
        twice(parameters)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda hidden: head(hidden, given[1]), given[:1], given[:1])


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_a_fused_optimiser_and_a_scaler(name):
    one, other, given = make(name), make(name), batch(name, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fused = torch.optim.AdamW(one.parameters(), fused=True)
    scaler.scale(one(*given)).backward()
    scaler.step(fused)
    other(*given).backward()
    torch.optim.AdamW(other.parameters(), foreach=False).step()
    for name_of, each in one.named_parameters():
        torch.testing.assert_close(each, other.get_parameter(name_of))


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", SPARSE)
def test_row_sparse_gradients_are_scaled_and_clipped_where_torch_can(name):
    head, plain, given = make(name, sparse=True), make(name), batch(name, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimiser = torch.optim.SGD(head.parameters(), lr=0.1)
    scaler.scale(head(*given)).backward()
    scaler.unscale_(optimiser)
    plain(*given).backward()
    for name_of, each in head.named_parameters():
        expected = plain.get_parameter(name_of).grad
        torch.testing.assert_close(each.grad.to_dense(), expected)
    if torch.__version__ < (2, 15):
        with pytest.raises(NotImplementedError, match="Sparse"):
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1e-3)
        return
    norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 1e-3)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    for name_of, each in head.named_parameters():
        torch.testing.assert_close(each.grad.to_dense(), plain.get_parameter(name_of).grad)


def test_rows_are_reduced_only_between_processes():
    head = make("huffman", sparse=True)
    with pytest.raises(RuntimeError, match="prepare_ddp: expected a process group"):
        heads.prepare_ddp(head)
    assert heads.prepare_ddp(make("adaptive")) == ["order", "places", "cutoffs"]
