"""Two processes that share one GPU, with Triton's kernels: ``gpu_process.py PROCESSES FOLDER``.

NCCL refuses two processes on one GPU. They meet through gloo, which moves what they send through
the host. With ``nccl`` as the third argument a single process uses NCCL.
"""

import copy
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lastlayer import heads, parallel, samplers, trees
from tests.processes import main

WIDTH, N_CLASSES, ROWS = 64, 1003, 96
COUNTS = range(N_CLASSES, 0, -1)
HEADS = {
    "full": lambda **g: heads.FullSoftmax(WIDTH, N_CLASSES, label_smoothing=0.1, **g),
    "entmax": lambda **g: heads.EntmaxHead(WIDTH, N_CLASSES, **g),
    "top 16": lambda **g: heads.TopKSoftmaxHead(WIDTH, N_CLASSES, 16, **g),
    "zlpr": lambda **g: heads.MultiLabel(WIDTH, N_CLASSES, **g),
    "adaptive": lambda **g: heads.AdaptiveSoftmax(
        WIDTH, cutoffs=[200, 500], n_classes=N_CLASSES, **g
    ),
    "bands": lambda **g: heads.DifferentiatedSoftmax(WIDTH, [(203, 40), (800, 24)], **g),
    "huffman": lambda **g: heads.HierarchicalSoftmax(WIDTH, trees.huffman(COUNTS), **g),
    "two-level": lambda **g: heads.HierarchicalSoftmax(WIDTH, trees.two_level(N_CLASSES), **g),
    "sampled": lambda **g: heads.SampledSoftmax(
        WIDTH, N_CLASSES, samplers.Unigram(COUNTS), 64, **g
    ),
}  # fmt: skip
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}


def check(name, mesh, dtype):
    torch.manual_seed(0)
    alone = HEADS[name](device="cuda", dtype=dtype)
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, rows="local")
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to("cuda", dtype)
    shape = (ROWS, 3) if name == "zlpr" else (ROWS,)
    target = torch.randint(N_CLASSES, shape, generator=generator).cuda()
    size = ROWS // mesh.size()
    part = slice(mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size)
    whole, own = hidden.clone().requires_grad_(), hidden[part].clone().requires_grad_()
    expected, found = alone(whole, target), module(own, target[part])
    expected.backward()
    found.backward()
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(found, expected, **close)

    def same(one, other):
        scale = other.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(one / scale, other / scale, **close)

    same(own.grad, whole.grad[part])
    for key, parameter in alone.named_parameters():
        gradient = module.head.get_parameter(key).grad
        if not hasattr(gradient, "to_local"):
            same(gradient, parameter.grad)
            continue
        layout, rows = module._layout_of(key), torch.arange(len(parameter), device="cuda")
        rows = rows if layout is None else layout.classes_at(rows)
        shard = -(-len(parameter) // mesh.size())
        mine = rows[mesh.get_local_rank() * shard : (mesh.get_local_rank() + 1) * shard]
        same(gradient.to_local(), parameter.grad[mine])


def check_uses(name, mesh, folder):
    """A head that is built on the mesh, trained, used, saved and opened again."""
    make = HEADS[name]
    plain = make(device="cuda")
    options = {key: value for key, value in plain.config().items() if key != "device"}
    head = parallel.ClassParallel.build(type(plain), mesh=mesh, **options)
    hidden = torch.randn(ROWS, WIDTH, device="cuda")
    shape = (ROWS, 3) if name == "zlpr" else (ROWS,)
    target = torch.randint(N_CLASSES, shape, device="cuda")
    optimizer = torch.optim.SGD(parallel.parameter_groups(head.parameters()), lr=0.1)
    before = head(hidden, target)
    before.backward()
    optimizer.step()
    head.save(folder / name)
    opened = parallel.ClassParallel.load(folder / name, mesh=mesh)
    wanted = head.log_prob(hidden)
    # The log of an entmax probability near 0 has few digits.
    same = partial(torch.testing.assert_close, rtol=1e-3, atol=2e-3)
    same(opened.log_prob(hidden), wanted)
    same(head.topk(hidden, 5).values, wanted.topk(5).values)
    if name != "zlpr":
        assert head.sample(hidden, 3).shape == (ROWS, 3)
    same(head.gather().log_prob(hidden), wanted)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
        sampler = samplers.Unigram(COUNTS)
        self.head = heads.SampledSoftmax(
            WIDTH, N_CLASSES, sampler, 64, sparse=True, device="cuda"
        )  # fmt: skip

    def forward(self, hidden, target):
        return self.head(self.body(hidden), target)


def check_ddp(mesh):
    """Row-sparse gradients under DDP: NCCL has no sparse all-reduce."""
    model = Model()
    alone = copy.deepcopy(model)
    heads.prepare_ddp(model, mesh.get_group())
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    hidden = torch.randn(ROWS, WIDTH, device="cuda")
    target = torch.randint(N_CLASSES, (ROWS,), device="cuda")
    for each in (alone, wrapped):
        each(hidden, target).backward()
    found, wanted = ([each.grad.to_dense() for each in of.parameters()] for of in (model, alone))
    torch.testing.assert_close(found, wanted)


def process(rank: int, processes: int, folder: Path, backend: str = "gloo") -> None:
    torch.cuda.set_device(0)
    group = dist.group.WORLD
    if backend == "nccl":
        group = dist.new_group(backend="nccl")
        # NCCL's group and file store warn when they are closed in this order.
        warnings.simplefilter("ignore")
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("classes",))
    for name in HEADS:
        for dtype in TOLERANCES:
            try:
                check(name, mesh, dtype)
            except Exception as wrong:
                raise AssertionError(f"rank {rank}, {name}, {dtype}: {wrong}") from wrong
        if backend == "nccl":
            check_uses(name, mesh, folder)
    if backend == "nccl":
        check_ddp(mesh)


if __name__ == "__main__":
    main(process)
