"""ClassParallel in training code: ``use_process.py PROCESSES FOLDER CHECK...``."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lastlayer
from lastlayer import fused, heads, parallel, samplers, testing, trees
from tests.processes import main

WIDTH, N_CLASSES, ROWS = 8, 53, 12


def flat_mesh(processes: int):
    return init_device_mesh("cpu", (processes,), mesh_dim_names=("classes",))


def batch(seed: int = 0, n: int = ROWS):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, WIDTH, generator=generator)
    return hidden, torch.randint(N_CLASSES, (n,), generator=generator)


def part_of(values, rank: int, processes: int):
    return values[rank::processes]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def build(rank: int, processes: int, folder: Path) -> None:
    """What is built does not depend on the number of processes; the test compares the files."""
    mesh = flat_mesh(processes)
    counts = torch.arange(N_CLASSES, 0, -1)
    given = {
        "full": (heads.FullSoftmax, WIDTH, N_CLASSES),
        "sampled": (heads.SampledSoftmax, WIDTH, N_CLASSES, samplers.Unigram(counts), 16),
        "noise": (heads.NoiseContrastive, WIDTH, N_CLASSES, samplers.Unigram(counts), 16),
        "tree": (heads.HierarchicalSoftmax, WIDTH, trees.huffman(counts)),
        "spelled": (heads.CharCNNSoftmax, WIDTH, [f"w{i}" for i in range(N_CLASSES)]),
        "bands": (heads.DifferentiatedSoftmax, WIDTH, [(13, 5), (40, 3)]),
    }
    for name, args in given.items():
        module = parallel.ClassParallel.build(*args, mesh=mesh, seed=5)
        module.save(folder / str(processes) / name)
        hidden, target = batch()
        mine = part_of(hidden, rank, processes), part_of(target, rank, processes)
        assert bool(torch.isfinite(module(*mine)))
        if name == "sampled":
            assert module.head.seed == 5
        if name == "spelled":
            # With the distribution of a plain head.
            bound = (module.head.correction * WIDTH) ** -0.5
            assert 0.8 * bound < float(module.head.correct.weight.detach().abs().max()) <= bound
    module = parallel.ClassParallel.build(
        heads.AdaptiveSoftmax, WIDTH, cutoffs=[7, 20], n_classes=N_CLASSES, mesh=mesh
    )
    module.save(folder / str(processes) / "adaptive")


def curve(rank: int, processes: int, folder: Path) -> None:
    """A body in DDP and a spread head follow the same curve on any number of processes."""
    torch.manual_seed(0)
    mesh = flat_mesh(processes)
    body = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    losses = {}
    for kind in ("full", "sampled"):
        sampler = samplers.LogUniform(N_CLASSES)
        args = (heads.FullSoftmax, WIDTH, N_CLASSES)
        if kind == "sampled":
            args = (heads.SampledSoftmax, WIDTH, N_CLASSES, sampler, 8)
        head = parallel.ClassParallel.build(
            *args, mesh=mesh, hidden_grad_scale=processes, even_rows=processes != 3
        )
        optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.05)
        for step in range(12):
            hidden, target = batch(step % 2)
            loss = head(body(part_of(hidden, rank, processes)), part_of(target, rank, processes))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            losses.setdefault(kind, []).append(loss.item())
    if rank == 0:
        torch.save(losses, folder / f"curve of {processes}")


def shards(rank: int, processes: int, folder: Path) -> None:
    """Checkpoints of shards, with the optimiser's, go on with another number of processes."""
    # Other tables where they are loaded: those of the checkpoint count.
    counts = torch.arange(1, N_CLASSES + 1) if processes == 4 else torch.ones(N_CLASSES)
    sampler = samplers.Unigram(counts)
    _shards_of(rank, processes, folder / "full", heads.FullSoftmax)
    _shards_of(rank, processes, folder / "sampled", heads.SampledSoftmax, sampler, 16)


def _shards_of(rank, processes, folder, kind, *args):
    mesh = flat_mesh(processes)

    def made():
        head = parallel.ClassParallel.build(kind, WIDTH, N_CLASSES, *args, mesh=mesh, seed=1)
        return head, torch.optim.Adam(head.parameters(), lr=0.1)

    def steps(head, optimizer, first, last):
        for step in range(first, last):
            hidden, target = batch(step)
            optimizer.zero_grad()
            head(part_of(hidden, rank, processes), part_of(target, rank, processes)).backward()
            optimizer.step()

    head, optimizer = made()
    saved, whole = folder / "saved shards", folder / "whole"
    if processes == 4:
        steps(head, optimizer, 0, 3)
        state = {
            "head": get_model_state_dict(head),
            "optimizer": get_optimizer_state_dict(head, optimizer),
        }
        checkpoint.save(state, checkpoint_id=saved)
        steps(head, optimizer, 3, 6)
        head.save(whole)
        return
    # State of the optimiser has to be there before it is loaded.
    steps(head, optimizer, 9, 10)
    state = {
        "head": get_model_state_dict(head),
        "optimizer": get_optimizer_state_dict(head, optimizer),
    }
    checkpoint.load(state, checkpoint_id=saved)
    set_model_state_dict(head, state["head"])
    set_optimizer_state_dict(head, optimizer, state["optimizer"])
    steps(head, optimizer, 3, 6)
    expected = parallel.ClassParallel.load(whole, mesh)
    for name, value in expected.head.state_dict().items():
        found = head.head.state_dict()[name]
        if hasattr(value, "full_tensor"):
            found, value = found.full_tensor(), value.full_tensor()  # noqa: PLW2901
        torch.testing.assert_close(found, value)


def plane(rank: int, processes: int, folder: Path) -> None:
    """Data × classes: FSDP2 over data, classes over the other dimension."""
    mesh = init_device_mesh("cpu", (2, processes // 2), mesh_dim_names=("data", "classes"))
    torch.manual_seed(0)
    alone = heads.FullSoftmax(WIDTH, N_CLASSES)
    head = parallel.ClassParallel(copy.deepcopy(alone), mesh["classes"])
    fully_shard(head, mesh=mesh["data"])
    for step in range(2):
        hidden, target = batch(step, 8)
        for each in (alone, head):
            each.zero_grad()
        # Each group of processes along the classes has half of the batch; FSDP2 averages.
        row = mesh.get_local_rank("data")
        mine = slice(row * 4 + mesh.get_local_rank("classes") * 2, None)
        some = slice(mine.start, mine.start + 2)
        (alone(hidden[:4], target[:4]) + alone(hidden[4:], target[4:])).div(2).backward()
        head(hidden[some], target[some]).backward()
        for name, parameter in alone.named_parameters():
            found = head.get_parameter(f"head.{name}").grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad)
    assert head.topk(hidden[some], 3).classes.shape == (2, 3)
    # Every group along the classes saves the same head.
    head.save(folder / "plane")
    dist.barrier()
    saved, whole = heads.Head.load(folder / "plane"), head.gather()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), parameter)
        if mesh.get_local_rank("classes") == 0:
            torch.testing.assert_close(whole.get_parameter(name), parameter)
    with pytest.raises(ValueError, match="call it before fully_shard"):
        head.init_bias_from_counts(range(1, N_CLASSES + 1))
    model = torch.nn.Sequential(parallel.ClassParallel(copy.deepcopy(alone), mesh["classes"]))
    fully_shard(model, mesh=mesh["data"])
    with pytest.raises(ValueError, match="fully_shard has sharded together with a larger module"):
        model[0].save(folder / "larger")


def training(rank: int, processes: int, folder: Path) -> None:
    """Gradient accumulation, autocast, checkpointing, compiling, and plans of torch."""
    del folder
    mesh = flat_mesh(processes)
    torch.manual_seed(0)
    alone = heads.FullSoftmax(WIDTH, N_CLASSES)
    hidden, target = batch()
    mine = slice(rank * (ROWS // processes), (rank + 1) * (ROWS // processes))
    expected = torch.autograd.grad(alone(hidden, target), alone.parameters())

    def same(module, tolerance=1e-5):
        for gradient, parameter in zip(expected, module.head.parameters(), strict=True):
            found = parameter.grad.full_tensor()
            torch.testing.assert_close(found, gradient, rtol=tolerance, atol=tolerance)

    # Parts of a batch add up to it.
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, rows="shared")
    for some in (slice(0, 5), slice(5, ROWS)):
        share = (some.stop - some.start) / ROWS
        (module(hidden[some], target[some]) * share).backward()
    same(module)
    # A loss scale, and its inverse.
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh)
    (module(hidden[mine], target[mine]) * 1024.0).backward()
    for parameter in module.head.parameters():
        parameter.grad.div_(1024.0)
    same(module)
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, even_rows=True)
    own = hidden[mine].clone().requires_grad_()
    loss = torch.utils.checkpoint.checkpoint(module, own, target[mine], use_reentrant=False)
    loss.backward()
    same(module)
    with torch.autocast("cpu", torch.bfloat16):
        module = parallel.ClassParallel(copy.deepcopy(alone), mesh, rows="shared")
        module(hidden, target).backward()
    same(module, 2e-2)
    _clipping(rank, processes, mesh)
    # A loss of inf is one, where the row is and elsewhere.
    sampled = heads.SampledSoftmax(WIDTH, N_CLASSES, samplers.Uniform(N_CLASSES), 4)
    with torch.no_grad():
        sampled.bias[target[0]] = -torch.inf
    assert parallel.ClassParallel(sampled, mesh)(hidden[mine], target[mine]) == torch.inf
    # Labels whose probabilities are rounded to 1 are ordered by their scores.
    labels = heads.MultiLabel(WIDTH, N_CLASSES)
    found = parallel.ClassParallel(copy.deepcopy(labels), mesh).topk(1000.0 * hidden[mine], 20)
    assert torch.equal(found.classes, labels.topk(1000.0 * hidden[mine], 20).classes)
    # The head of a model, by a plan.
    model = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(4, WIDTH), "lm_head": copy.deepcopy(alone)}
    )
    held = model["lm_head"]
    parallelize_module(model, mesh, {"lm_head": parallel.ClassParallelStyle()})
    assert held is model["lm_head"]
    assert isinstance(held, parallel.ClassParallel)
    held(hidden, target).backward()
    same(held)
    assert f"classes here: {len(held.classes)}" in repr(held)
    # Compiled, in the form that takes tensors.
    weight = held.head.weight.detach().requires_grad_()

    def step(hidden, weight):
        return fused.linear_cross_entropy(hidden, weight, target)

    # The compiler itself looks at gradients of tensors that are no leaves.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(step, backend="aot_eager")
        torch.testing.assert_close(compiled(hidden, weight), step(hidden, weight))
        held.zero_grad()
        torch.compile(held, backend="aot_eager")(hidden, target).backward()
    same(held)


class Model(torch.nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, hidden, target):
        return self.head(self.body(hidden), target)


def _clipping(rank: int, processes: int, mesh) -> None:
    """Inside DDP, gradients of a body, of replicated and of sharded parameters have one norm."""
    hidden, target = batch(n=4 * processes)
    mine = slice(4 * rank, 4 * rank + 4)
    alone = heads.AdaptiveSoftmax(WIDTH, cutoffs=[9], n_classes=N_CLASSES)
    body = torch.nn.Linear(WIDTH, WIDTH)
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, hidden_grad_scale=processes)
    model = Model(copy.deepcopy(body), module)
    # DDP leaves out what is sharded.
    assert {"head.head.head_weight", "head.head.tails.0"} <= {*heads.prepare_ddp(model)}
    spread = DistributedDataParallel(model)
    for norm_type in (2.0, torch.inf):
        for each in (alone, body, spread):
            each.zero_grad()
        alone(body(hidden), target).backward()
        spread(hidden[mine], target[mine]).backward()
        expected = torch.nn.utils.clip_grad_norm_(
            [*alone.parameters(), *body.parameters()], 0.01, norm_type
        )
        found = parallel.clip_grad_norm_(spread.parameters(), 0.01, norm_type)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.body.weight.grad, body.weight.grad)
        for name, parameter in alone.named_parameters():
            found = full(module.head.get_parameter(name).grad)
            torch.testing.assert_close(found, parameter.grad)
    # As on a GPU by default, all parameters of a group are updated in one call.
    for some in ([*alone.parameters(), *body.parameters()], spread.parameters()):
        torch.optim.Adam(parallel.parameter_groups(some), foreach=True).step()
    torch.testing.assert_close(model.body.weight, body.weight)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(full(module.head.get_parameter(name)), parameter)


def unlike(rank: int, processes: int, folder: Path) -> None:
    """Hidden states that need a gradient in the first process alone, and lists of other lengths."""
    del folder, processes
    mesh = flat_mesh(3)
    hidden, target = batch(n=7)
    mine = (slice(0, 4), slice(4, 7), slice(7, 7))[rank]
    counts = torch.arange(N_CLASSES, 0, -1)
    made = (
        lambda **g: heads.FullSoftmax(WIDTH, N_CLASSES, **g),
        lambda **g: heads.AdaptiveSoftmax(WIDTH, cutoffs=[9], n_classes=N_CLASSES, **g),
        lambda **g: heads.HierarchicalSoftmax(WIDTH, trees.huffman(counts), **g),
        lambda **g: heads.NoiseContrastive(WIDTH, N_CLASSES, samplers.Unigram(counts), 4, **g),
    )
    for make in made:
        for frozen in (False, True):
            torch.manual_seed(0)
            alone = make(reduction="sum").requires_grad_(not frozen)
            module = parallel.ClassParallel(copy.deepcopy(alone), mesh, assignment="contiguous")
            every = hidden.clone().requires_grad_()
            loss = alone(every, target)
            loss.backward()
            own = hidden[mine].clone().requires_grad_(rank == 0)
            found = module(own, target[mine])
            found.backward()
            torch.testing.assert_close(found.detach(), loss.detach())
            if rank == 0:
                torch.testing.assert_close(own.grad, every.grad[mine])
            else:
                assert own.grad is None
            for name, parameter in alone.named_parameters():
                if not frozen:
                    grad = module.get_parameter(f"head.{name}").grad
                    torch.testing.assert_close(full(grad), parameter.grad)
    torch.manual_seed(0)
    alone = heads.FullSoftmax(WIDTH, N_CLASSES)
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, assignment="contiguous")
    every, own = hidden.clone().requires_grad_(), hidden[mine].clone().requires_grad_(rank == 0)
    alone.log_prob(every, target).sum().backward()
    module.log_prob(own, target[mine]).sum().backward()
    if rank == 0:
        torch.testing.assert_close(own.grad, every.grad[mine])
    # As many rows in each process, and lists that are not as long.
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, even_rows=True)
    some = torch.randint(N_CLASSES, (3, 2, 4), generator=torch.Generator().manual_seed(1))
    chosen = some[rank, :, : rank + 1]
    found = module.log_prob(hidden[2 * rank : 2 * rank + 2], chosen)
    torch.testing.assert_close(found, alone.log_prob(hidden[2 * rank : 2 * rank + 2], chosen))
    labels = heads.MultiLabel(WIDTH, N_CLASSES, reduction="sum")
    module = parallel.ClassParallel(copy.deepcopy(labels), mesh, even_rows=True)
    lists = [some[each, :, : each + 1] for each in range(3)]
    expected = sum(labels(hidden[2 * i : 2 * i + 2], each) for i, each in enumerate(lists))
    found = module(hidden[2 * rank : 2 * rank + 2], lists[rank])
    torch.testing.assert_close(found, expected)


def wrong(rank: int, processes: int, folder: Path) -> None:
    """What does not fit is an error in every process, and none waits for another."""
    mesh = flat_mesh(processes)
    head = heads.FullSoftmax(WIDTH, N_CLASSES)
    hidden, target = batch()

    def refused(error, *words):
        return pytest.raises(error, match=".*".join(map(re.escape, words)))

    module = parallel.ClassParallel(copy.deepcopy(head), mesh)
    # One process alone has a target that is out of range.
    ids = target.clone()
    ids[0] = N_CLASSES if rank == 1 else 0
    words = ("target: expected", str(N_CLASSES)) if rank == 1 else ("got others in rank 1",)
    with refused((ValueError, RuntimeError), *words):
        module(hidden, ids)
    with refused((ValueError, RuntimeError), "classes: expected" if rank == 1 else "rank 1"):
        module.log_prob(hidden, ids)
    with refused((ValueError, RuntimeError), "k: expected" if rank == 1 else "rank 1"):
        module.topk(hidden, 0 if rank == 1 else 2)
    # All of them can go on.
    assert bool(torch.isfinite(module(hidden, target)))
    with refused(ValueError, "hidden: expected shape"):
        module(hidden[:, :3], target)
    with refused(TypeError, "offsets: expected None", "FullSoftmax"):
        module(hidden, target, torch.arange(ROWS + 1))
    labels = parallel.ClassParallel(heads.MultiLabel(WIDTH, N_CLASSES), mesh)
    ends = torch.arange(ROWS + 1 + (rank == 1))
    with refused((ValueError, RuntimeError), "offsets: expected" if rank == 1 else "rank 1"):
        labels(hidden, target, ends)
    with refused(TypeError, "mesh: expected a DeviceMesh"):
        parallel.ClassParallel(head, None)
    with refused(TypeError, "head: expected a lastlayer head", "from_linear"):
        parallel.ClassParallel(torch.nn.Linear(2, 3), mesh)
    with refused(TypeError, "head: expected a plain head"):
        parallel.ClassParallel(module, mesh)
    with refused(ValueError, "rows: expected"):
        parallel.ClassParallel(head, mesh, rows="mine")
    with refused(ValueError, "assignment: expected", "'spread'"):
        parallel.ClassParallel(
            heads.AdaptiveSoftmax(8, cutoffs=[3], n_classes=9), mesh, assignment="spread"
        )
    empty = samplers.Unigram(range(1, N_CLASSES + 1)).to("meta")
    with refused(ValueError, "sampler: expected tables with values", "ClassParallel.load"):
        parallel.ClassParallel.build(heads.SampledSoftmax, 8, N_CLASSES, empty, mesh=mesh)
    sampler = samplers.Uniform(N_CLASSES)
    with refused(ValueError, "head: expected sparse=False"):
        parallel.ClassParallel(heads.SampledSoftmax(8, N_CLASSES, sampler, sparse=True), mesh)
    with refused(ValueError, "head: expected per_rank=False"):
        parallel.ClassParallel(heads.SampledSoftmax(8, N_CLASSES, sampler, per_rank=True), mesh)
    plane = init_device_mesh("cpu", (1, processes), mesh_dim_names=("data", "classes"))
    with refused(ValueError, "mesh: expected one dimension", "classes"):
        parallel.ClassParallel(head, plane)
    with refused(TypeError, "head: expected a head with one vector per class", "GlobalPointer"):
        parallel.ClassParallel(_pointer(), mesh)
    with refused(ValueError, "weight_grad: expected None"):
        weight = module.head.weight
        fused.linear_cross_entropy(hidden, weight, target, weight_grad=torch.zeros(3, WIDTH))
    for placement in (Replicate(), Shard(1)):
        weight = distribute_tensor(torch.randn(N_CLASSES, WIDTH), mesh, [placement])
        with refused(ValueError, "weight: expected a DTensor with its rows", "full_tensor"):
            fused.linear_cross_entropy(hidden, weight, target)
    with refused(TypeError, "process_group: expected a torch.distributed.ProcessGroup"):
        fused.linear_cross_entropy(hidden, torch.randn(4, WIDTH), target, process_group="all")
    with refused(ValueError, "hidden_grad: expected 'sum' where one process"):
        fused.linear_cross_entropy(
            hidden, torch.randn(N_CLASSES, WIDTH), target, hidden_grad="part"
        )
    # Parts of their own, without a DTensor.
    own = module.head.weight.to_local().detach()
    biases = module.head.bias.to_local().detach()
    group = mesh.get_group()
    found = fused.linear_cross_entropy(hidden, own, target, biases, process_group=group)
    shared = parallel.ClassParallel(copy.deepcopy(head), mesh, rows="shared")
    torch.testing.assert_close(found, shared(hidden, target).detach())
    # What differs between processes is found where it is asked for.
    other = hidden.clone()
    other[0, 0] = torch.nan if rank == 1 else 0.0
    for given, words in (
        ((other, target), "hidden: expected finite numbers in every process, got inf or NaN in"),
        ((hidden, (target + rank) % N_CLASSES), "target: expected the same targets"),
    ):
        with lastlayer.debug(), refused(ValueError, words):
            shared(*given)
    shared.head.label_smoothing = 0.1 * rank
    with lastlayer.debug(), refused(ValueError, "head: expected the same options"):
        shared(hidden, target)
    with refused(FileNotFoundError, "folder: expected config.json"):
        parallel.ClassParallel.load(folder / "nowhere", mesh)
    with refused(TypeError, "head: expected plain parameters", "gather()"):
        testing.check_head(module)
    _wrong_in_one(rank, mesh, folder, refused)


def _wrong_in_one(rank: int, mesh, folder: Path, refused) -> None:
    """What fails, or differs, in one process alone is an error in all."""
    head, (hidden, target) = heads.FullSoftmax(WIDTH, N_CLASSES), batch()
    others = "expected no error in any process, got one in rank 1;"

    def refused_in_one(error, *words):
        return refused(error, *words) if rank == 1 else refused(RuntimeError, others)

    with refused_in_one(ValueError, "rows: expected"):
        parallel.ClassParallel(head, mesh, rows="mine" if rank == 1 else "local")
    with refused_in_one(ValueError, "reduction: expected"):
        reduction = "all" if rank == 1 else "mean"
        parallel.ClassParallel.build(
            heads.FullSoftmax, WIDTH, N_CLASSES, reduction=reduction, mesh=mesh
        )
    with refused(ValueError, "head: expected the same options of the head", "rank 1 than in rank"):
        parallel.ClassParallel(heads.FullSoftmax(WIDTH, N_CLASSES + (rank == 1)), mesh)
    module = parallel.ClassParallel(head, mesh)
    if rank == 0:
        (folder / "file").write_text("")
    dist.barrier()
    with refused((FileExistsError, RuntimeError), "File exists" if rank == 0 else "in rank 0;"):
        module.save(folder / "file")
    module.save(folder / "saved")
    with refused_in_one(FileNotFoundError, "folder: expected config.json"):
        parallel.ClassParallel.load(folder / ("nowhere" if rank == 1 else "saved"), mesh)
    words = "expected recording of gradients", "got none in rank 1"
    with refused(RuntimeError, *words), torch.set_grad_enabled(rank != 1):
        module(hidden, target)
    with refused(RuntimeError, "expected training mode", "got none in rank 1"):
        module.train(rank != 1)(hidden, target)
    module.train()
    with refused(RuntimeError, "expected lists of classes", "got none in ranks 0, 2"):
        module.log_prob(hidden, target if rank == 1 else None)
    even = parallel.ClassParallel(heads.FullSoftmax(WIDTH, N_CLASSES), mesh, even_rows=True)
    n = 3 + (rank == 1)
    with lastlayer.debug(), refused(ValueError, "hidden: expected the same number of rows"):
        even(hidden[:n], target[:n])
    labels = parallel.ClassParallel(heads.MultiLabel(WIDTH, N_CLASSES), mesh)
    values = torch.ones(ROWS, 1)
    with refused((ValueError, RuntimeError), "values: expected" if rank == 1 else "rank 1"):
        labels(hidden, target[:, None], values=values[:, 0] if rank == 1 else values)
    with refused(RuntimeError, "expected values in every process", "got none in rank 1"):
        labels(hidden, target[:, None], values=None if rank == 1 else values)
    with refused(TypeError, "values: expected None", "FullSoftmax"):
        module(hidden, target, values=values)
    sharded = DTensor.from_local(hidden, mesh, [Replicate()])
    with refused(TypeError, "hidden: expected", "DTensor", "to_local"):
        module(sharded, target)
    with refused(TypeError, "hidden: expected the same plain tensor", "full_tensor"):
        fused.linear_cross_entropy(sharded, module.head.weight, target)
    whole, group = torch.ones(N_CLASSES, WIDTH), mesh.get_group()
    with lastlayer.debug(), refused(ValueError, "weight: expected the class vectors of each"):
        fused.linear_cross_entropy(hidden, whole, target, process_group=group)
    with lastlayer.debug():
        fused.linear_cross_entropy(hidden, whole * (rank + 1), target, process_group=group)
    with refused(RuntimeError, "save: expected a head with all classes", "ClassParallel.save"):
        module.head.save(folder / "inside")
    with refused(RuntimeError, "predict: expected a head", "ClassParallel.gather().predict"):
        labels.head.predict(hidden)
    copied = copy.deepcopy(module)
    assert bool(torch.isfinite(copied(hidden, target)))
    # All of them can go on.
    assert bool(torch.isfinite(module(hidden, target)))


def _pointer():
    return heads.GlobalPointer(8, 3)


CHECKS = {
    "build": build,
    "curve": curve,
    "shards": shards,
    "plane": plane,
    "training": training,
    "unlike": unlike,
    "wrong": wrong,
}


def process(rank: int, processes: int, folder: Path, *names: str) -> None:
    for name in names:
        CHECKS[name](rank, processes, folder)
        dist.barrier()


if __name__ == "__main__":
    main(process)
