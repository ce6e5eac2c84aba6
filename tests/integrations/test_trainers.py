"""Every registered head in Lightning and in Accelerate, against a plain loop; and resuming."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lastlayer.heads import ClassData, registered

lightning = pytest.importorskip("lightning")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

D, V, STEPS = 12, 40, 4
LM = [name for name, (_, recipe) in registered().items() if recipe.task == "lm"]


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def batches():
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(8 * STEPS, D, generator=generator)
    target = torch.randint(V, (8 * STEPS,), generator=generator)
    return DataLoader(TensorDataset(features, target), batch_size=8)


def made(name):
    data = ClassData(D, np.arange(V, 0, -1), [f"word{i}" for i in range(V)])
    cls, recipe = registered()[name]
    torch.manual_seed(0)
    backbone = nn.Linear(D, D)
    return backbone, recipe.build(cls, data, {})


def optimizer_of(modules):
    # SGD takes dense and row-sparse gradients alike.
    return torch.optim.SGD(modules.parameters(), lr=0.1)


class Lit(lightning.LightningModule):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def training_step(self, batch, _):
        return self.head(self.backbone(batch[0]), batch[1])

    def configure_optimizers(self):
        return optimizer_of(self)


def lightning_trainer(**options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(accelerator="cpu", **quiet, **options)


def by_lightning(backbone, head):
    lightning_trainer(max_epochs=1, enable_checkpointing=False).fit(Lit(backbone, head), batches())


def by_accelerate(backbone, head):
    model = nn.ModuleDict({"backbone": backbone, "head": head})
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), batches())
    train(model, optimizer, loader, accelerator.backward)


def train(model, optimizer, loader, backward):
    for features, target in loader:
        backward(model["head"](model["backbone"](features), target))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", LM)
@pytest.mark.parametrize("trainer", [by_lightning, by_accelerate])
def test_a_trainer_makes_the_steps_of_a_plain_loop(trainer, name):
    plain = nn.ModuleDict(dict(zip(("backbone", "head"), made(name), strict=True)))
    start = {key: each.clone() for key, each in plain.state_dict().items()}
    train(plain, optimizer_of(plain), batches(), torch.Tensor.backward)
    backbone, head = made(name)
    trainer(backbone, head)
    wanted, got = plain["head"].state_dict(), head.state_dict()
    assert wanted.keys() == got.keys()
    for key, each in wanted.items():
        assert torch.equal(each, got[key]), key
    moved = [
        key
        for key, _ in plain.named_parameters()
        if not torch.equal(start[key], plain.state_dict()[key])
    ]
    assert any(key.startswith("head") for key in moved)


@pytest.mark.parametrize("name", ["sampled", "nce", "adaptive", "hierarchical"])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    whole = Lit(*made(name))
    lightning_trainer(max_epochs=2, enable_checkpointing=False).fit(whole, batches())
    first = lightning_trainer(max_epochs=1, default_root_dir=tmp_path)
    first.fit(Lit(*made(name)), batches())
    first.save_checkpoint(tmp_path / "last.ckpt")
    other = Lit(*made(name))
    with torch.no_grad():
        for each in other.parameters():
            each.fill_(0.5)
    lightning_trainer(max_epochs=2, enable_checkpointing=False).fit(
        other, batches(), ckpt_path=tmp_path / "last.ckpt", weights_only=False
    )
    for key, each in whole.state_dict().items():
        assert torch.equal(each, other.state_dict()[key]), key
