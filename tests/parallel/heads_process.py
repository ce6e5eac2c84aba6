"""Every head with its classes over processes: ``heads_process.py PROCESSES FOLDER NAME...``."""

import copy
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lastlayer import heads, parallel, samplers, trees
from tests.heads.every_head import COUNTS, EVERY_HEAD, LABELS, N_CLASSES, WIDTH
from tests.processes import main

# Heads whose classes are not spread, each with a word of the reason.
REFUSED = {
    "adaptive_importance": "by the scores of all",
    "partial": "by the scores of all",
}
# Heads that draw by one number per draw, in the order of the classes.
SAME_DRAWS = "full", "entmax", "self_normalized", "char_cnn"
ROWS = 5, 0, 3, 8
COUNTED = samplers.Unigram(COUNTS)
# Beside one head of every kind: options that have a part of their own.
MORE = {
    "options": partial(
        heads.FullSoftmax, WIDTH, N_CLASSES, bias=False, label_smoothing=0.1, z_loss=0.01,
        softcap=4.0, temperature=0.8, class_weight=torch.linspace(0.5, 2.0, N_CLASSES),
    ),
    "self-normalised, some rows": partial(heads.SelfNormalized, WIDTH, N_CLASSES, fraction=0.4),
    "self-normalised, weighted": partial(
        heads.SelfNormalized, WIDTH, N_CLASSES, bias=False,
        class_weight=torch.linspace(0.5, 2.0, N_CLASSES),
    ),
    "self-normalised, both": partial(
        heads.SelfNormalized, WIDTH, N_CLASSES, fraction=0.4,
        class_weight=torch.linspace(0.5, 2.0, N_CLASSES),
    ),
    "few": partial(heads.FullSoftmax, WIDTH, 3),
    "sparsemax": partial(heads.EntmaxHead, WIDTH, N_CLASSES, 2.0),
    "adaptive, smooth": partial(
        heads.AdaptiveSoftmax, WIDTH, cutoffs=[4, 11], n_classes=N_CLASSES, head_bias=True,
        label_smoothing=0.1,
    ),
    "differentiated, projected": partial(
        heads.DifferentiatedSoftmax, WIDTH, [(6, 7), (17, 4)], variant="projections",
        label_smoothing=0.1,
    ),
    # So many draws that rows travel.
    "many draws": partial(
        heads.SampledSoftmax, WIDTH, N_CLASSES, COUNTED, 22, unique=True, bias=False
    ),
    "noise, learned": partial(
        heads.NoiseContrastive, WIDTH, N_CLASSES, COUNTED, 6, log_z="learned"
    ),
    "classic": partial(
        heads.SampledSoftmax, WIDTH, N_CLASSES, COUNTED, 22, correction="classic", temperature=0.7
    ),
    "ordered": partial(
        heads.SampledSoftmax, WIDTH, N_CLASSES,
        samplers.LogUniform(N_CLASSES, order=torch.arange(N_CLASSES).flip(0)), 6,
    ),
    "noise, ordered": partial(
        heads.NoiseContrastive, WIDTH, N_CLASSES,
        samplers.LogUniform(N_CLASSES, order=torch.arange(N_CLASSES).roll(5)), 6,
    ),
    # The sampler has the other classes alone.
    "exact and drawn": partial(
        heads.SampledSoftmax, WIDTH, N_CLASSES, samplers.Unigram(COUNTS[4:]), 6, head_classes=4
    ),
    "few, drawn": partial(heads.SampledSoftmax, WIDTH, 3, samplers.Unigram([5, 1, 2]), 2),
    "few, ordered": partial(
        heads.SampledSoftmax, WIDTH, 3, samplers.LogUniform(3, order=[2, 0, 1]), 2
    ),
    # Some classes have several paths.
    "overlap": lambda **given: heads.HierarchicalSoftmax(
        WIDTH,
        trees.cluster(
            torch.randn(N_CLASSES, 3, generator=torch.Generator().manual_seed(1)),
            kind="adaptive", overlap=0.3, progress=False,
        ),
        **given,
    ),
    "overlap, wide": lambda **given: heads.HierarchicalSoftmax(
        WIDTH,
        trees.from_codes([[[c // 4, c % 4]] + [[5, 3]] * (c == 2) for c in range(N_CLASSES)]),
        **given,
    ),
    # With more processes than words, some have none.
    "few words": partial(heads.CharCNNSoftmax, WIDTH, ["a", "bc"]),
    "bce": partial(heads.MultiLabel, WIDTH, N_CLASSES, "bce", label_smoothing=0.1),
    "asymmetric": partial(heads.MultiLabel, WIDTH, N_CLASSES, "asymmetric"),
    # From dense labels, for two reasons.
    # The number of the class that is ignored is also that of a row.
    "ignored class": partial(heads.FullSoftmax, WIDTH, N_CLASSES, ignore_index=5),
    "few labels": partial(heads.MultiLabel, WIDTH, 2, "sparsemax"),
    "asymmetric, smooth": partial(
        heads.MultiLabel, WIDTH, N_CLASSES, "asymmetric", label_smoothing=0.1, chunk_rows=2
    ),
    "sparsemax_labels, smooth": partial(
        heads.MultiLabel, WIDTH, N_CLASSES, "sparsemax", label_smoothing=0.1, chunk_rows=3
    ),
}  # fmt: skip
OF_LABELS = (
    *LABELS,
    *(
        name
        for name in MORE
        if name.startswith(("bce", "asymmetric", "sparsemax_labels", "few labels"))
    ),
)
FEW = "few", "few, drawn", "few, ordered", "few words", "few labels"


def make(name: str):
    """A head in float64, the same each time."""
    torch.manual_seed(0)
    return (EVERY_HEAD | MORE)[name](dtype=torch.float64)


def n_classes(name: str) -> int:
    return 2 if name in ("few words", "few labels") else 3 if name in FEW else N_CLASSES


def problem(name: str, processes: int):
    """Hidden states and targets of all processes, and how many rows each has."""
    counts = [ROWS[rank % len(ROWS)] for rank in range(processes)]
    n, generator = sum(counts), torch.Generator().manual_seed(processes)
    hidden = torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)
    target = torch.randint(
        n_classes(name), (n, 3) if name in OF_LABELS else (n,), generator=generator
    )
    if name not in OF_LABELS:
        target[::4] = 5 if name == "ignored class" else -100
    return hidden, target, counts


def close(one, other, what):
    one = one.full_tensor() if hasattr(one, "full_tensor") else one
    assert torch.allclose(one, other, rtol=1e-10, atol=1e-11), (what, one, other)


def in_class_order(module, name, tensor):
    """A gathered table as a plain head has it."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    layout = module._layout_of(name) if name in module._family.names else None
    return tensor if layout is None else tensor[layout.rows_of(torch.arange(layout.n_classes))]


def same_gradients(module, alone, what):
    for name, parameter in alone.named_parameters():
        found = module.head.get_parameter(name).grad
        if parameter.grad is None or parameter.grad.abs().max() == 0:
            assert found is None or in_class_order(module, name, found).abs().max() == 0, (
                what,
                name,
            )
        else:
            close(in_class_order(module, name, found), parameter.grad, (what, name))


def check_training(name, mesh, rows, reduction, *, training=True):
    rank, processes = mesh.get_local_rank(), mesh.size()
    alone = make(name).train(training)
    alone.reduction = reduction
    assignment = "spread" if name == "ignored class" else "auto"
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, rows=rows, assignment=assignment)
    module.train(training)
    hidden, target, counts = problem(name, processes)
    first = sum(counts[:rank])
    part = slice(first, first + counts[rank]) if rows == "local" else slice(None)
    whole, own = hidden.clone().requires_grad_(), hidden[part].clone().requires_grad_()
    factors = torch.linspace(0.5, 1.5, len(hidden), dtype=torch.float64)
    # A second step has other draws.
    for step in range(2 if reduction == "mean" else 1):
        alone.zero_grad(), module.zero_grad()
        whole.grad = own.grad = None
        expected, found = alone(whole, target), module(own, target[part])
        what = name, rows, reduction, step
        close(found, expected[part] if reduction == "none" else expected, what)
        if reduction == "none":
            expected, found = (expected * factors).sum(), (found * factors[part]).sum()
        expected.backward()
        found.backward()
        close(own.grad, whole.grad[part], (*what, "hidden"))
        same_gradients(module, alone, what)
    return module


@torch.no_grad()
def check_predictions(name, mesh, rows):
    rank, processes = mesh.get_local_rank(), mesh.size()
    alone = make(name).eval()
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, rows=rows).eval()
    hidden, target, counts = problem(name, processes)
    first = sum(counts[:rank])
    part = slice(first, first + counts[rank]) if rows == "local" else slice(None)
    own = hidden[part]
    close(module.log_prob(own), alone.log_prob(own), (name, "log_prob"))
    classes = torch.randint(
        n_classes(name), (len(hidden), 4), generator=torch.Generator().manual_seed(3)
    )
    close(module.log_prob(own, classes[part]), alone.log_prob(own, classes[part]), "of classes")
    close(module.log_prob(own, classes[part, 0]), alone.log_prob(own, classes[part, 0]), "of one")
    for k in {1, min(3, n_classes(name)), n_classes(name)}:
        found, expected = module.topk(own, k), alone.topk(own, k)
        close(found.values, expected.values, (name, k, "topk"))
        assert torch.equal(found.classes, expected.classes), (name, k, found, expected)
    if name not in OF_LABELS:
        drawn = module.sample(own, 5, generator=torch.Generator().manual_seed(rank))
        assert drawn.shape == (len(own), 5)
        logs = alone.log_prob(own, drawn)
        assert bool((logs > -torch.inf).all())
        if name in SAME_DRAWS:
            seed = rank if rows == "local" else 0
            one = alone.sample(own, 5, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(drawn, one), (name, drawn, one)
    # No process has a row.
    assert module.log_prob(own[:0]).shape == (0, n_classes(name))
    assert module.topk(own[:0], 1).classes.shape == (0, 1)
    expected = alone(hidden, target)
    found = module(own, target[part])
    close(found, expected, (name, "eval"))


def check_gradients_of_log_prob(name, mesh, rows):
    """Of all classes, of one class per row, and of several, other ones in each process."""
    rank, processes = mesh.get_local_rank(), mesh.size()
    alone = make(name)
    # In several chunks, which backward makes again.
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh, rows=rows, hidden_grad_scale=3.0)
    if hasattr(module.head, "chunk_rows"):
        module.head.chunk_rows = 3
    hidden, _, counts = problem(name, processes)
    bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
    parts = [slice(*each) for each in pairwise(bounds)] if rows == "local" else [slice(None)]
    generator = torch.Generator().manual_seed(4)
    for k in (None, 1, 2):
        widths = [k and (k if k == 1 else k + i) for i in range(len(parts))]
        classes, factors = [], []
        for part, width in zip(parts, widths, strict=True):
            n = len(hidden[part])
            some = width and torch.randint(n_classes(name), (n, width), generator=generator)
            classes.append(some.squeeze(-1) if width == 1 else some)
            shape = (n, n_classes(name)) if some is None else classes[-1].shape
            factors.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        alone.zero_grad(), module.zero_grad()
        whole = hidden.clone().requires_grad_()
        for part, some, each in zip(parts, classes, factors, strict=True):
            _weighted_logs(alone.log_prob(whole[part], some), each).backward()
        mine = rank if rows == "local" else 0
        own = hidden[parts[mine]].clone().requires_grad_()
        _weighted_logs(module.log_prob(own, classes[mine]), factors[mine]).backward()
        what = name, rows, k, "gradient of log_prob"
        close(own.grad / 3.0, whole.grad[parts[mine]], (*what, "hidden"))
        same_gradients(module, alone, what)
    if name == "negative":
        # Its loss in eval mode is made of log-probabilities.
        check_training(name, mesh, rows, "none", training=False)


def _weighted_logs(logs, factors):
    """Without what is impossible, which has no gradient."""
    return (factors * logs.masked_fill(logs == -torch.inf, 0.0)).sum()


def check_concatenated_lists(name, mesh, rows):
    """Other lengths in each process, empty lists and values; also with as many rows in each."""
    rank, processes = mesh.get_local_rank(), mesh.size()
    for even, counts in ((False, problem(name, processes)[2]), (True, [4] * processes)):
        n, generator = sum(counts), torch.Generator().manual_seed(6)
        hidden = torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)
        lengths = torch.randint(3, (n,), generator=generator)
        lengths[-1] = 6
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        positives = torch.randint(n_classes(name), (int(offsets[-1]),), generator=generator)
        labels = torch.rand(len(positives), dtype=torch.float64, generator=generator)
        first = sum(counts[:rank]) if rows == "local" else 0
        last = first + counts[rank] if rows == "local" else n
        some = slice(int(offsets[first]), int(offsets[last]))
        alone = make(name)
        for values in (None, labels):
            module = parallel.ClassParallel(
                copy.deepcopy(alone), mesh, rows=rows, even_rows=even and rows == "local"
            )
            alone.zero_grad()
            whole = hidden.clone().requires_grad_()
            own = hidden[first:last].clone().requires_grad_()
            expected = alone(whole, positives, offsets, values=values)
            starts = offsets[first : last + 1] - offsets[first]
            told = None if values is None else values[some]
            found = module(own, positives[some], starts.int(), values=told)
            what = name, rows, even, values is None, "offsets"
            close(found, expected, what)
            expected.backward()
            found.backward()
            close(own.grad, whole.grad[first:last], (*what, "hidden"))
            same_gradients(module, alone, what)


@torch.no_grad()
def check_sampler_tables(name, mesh):
    """A process has its part of the tables; draws are the bits of one process."""
    alone = make(name).sampler
    module = parallel.ClassParallel(make(name), mesh)
    found, counter = module.head.sampler, torch.tensor([7, 3])
    for draw in ("_draw_both", "_draw_wide"):
        expected, drawn = (getattr(each, draw)(50, counter, None) for each in (alone, found))
        assert torch.equal(drawn.ids, expected.ids), (name, draw)
        close(drawn.log_prob.double(), expected.log_prob.double(), (name, draw))
    # Other classes in each process, one of them none.
    classes = torch.arange(alone.n_classes)[mesh.get_local_rank() :].repeat(2)
    close(found.log_prob(classes, dtype=torch.float64), alone._log_prob(classes, None), name)
    targets = torch.cat([classes, torch.tensor([-1])])
    close(
        found.log_complement(targets, dtype=torch.float64),
        alone.log_complement(targets, dtype=torch.float64),
        (name, "complement"),
    )
    rank, processes = mesh.get_local_rank(), mesh.size()
    for table in alone.spreadable:
        whole = getattr(alone, table)
        if whole is not None:
            most = -(-len(whole) // processes)
            here = max(0, min(most, len(whole) - rank * most))
            part = getattr(found, table).to_local()
            assert part.shape == (here,), (name, table)
            # Its own memory, not a view of the whole table; a last part may be padded.
            assert part.untyped_storage().nbytes() <= 8 * most, (name, table)


def check_state(name, mesh, folder):
    rank, processes = mesh.get_local_rank(), mesh.size()
    alone = make(name)
    module = parallel.ClassParallel(copy.deepcopy(alone), mesh)
    whole = module.gather()
    for key, value in alone.state_dict().items():
        if rank == 0:
            close(whole.state_dict()[key].to(value), value, (name, key, "gathered"))
        else:
            assert all(each.is_meta for each in whole.parameters())
    module.save(folder / name)
    again = heads.Head.load(folder / name)
    for key, value in alone.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), (name, key)
    loaded = parallel.ClassParallel.load(folder / name, mesh)
    hidden, target, counts = problem(name, processes)
    first = sum(counts[:rank])
    part = slice(first, first + counts[rank])
    if name == "target":
        # Which classes a step looks at is no part of the state.
        loaded.head.use(module.head.classes)
    close(loaded(hidden[part], target[part]), module(hidden[part], target[part]), (name, "loaded"))
    if name not in (*OF_LABELS, *FEW):
        try:
            alone.init_bias_from_counts(COUNTS)
        except (NotImplementedError, ValueError):
            return
        module.init_bias_from_counts(COUNTS)
        whole = module.gather()
        if rank == 0:
            for key, value in alone.named_parameters():
                close(whole.get_parameter(key), value, (name, key, "counts"))
            if getattr(alone, "class_weight", None) is not None:
                close(whole.class_weight, alone.class_weight, (name, "class_weight", "counts"))


def process(rank: int, processes: int, folder: Path, *names: str) -> None:
    mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=("classes",))
    for name in names or (EVERY_HEAD | MORE):
        try:
            if name in REFUSED:
                with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
                    parallel.ClassParallel(make(name), mesh)
                continue
            for rows in ("local", "shared"):
                for reduction in ("mean", "sum", "none"):
                    check_training(name, mesh, rows, reduction)
                check_predictions(name, mesh, rows)
                check_gradients_of_log_prob(name, mesh, rows)
                if name in OF_LABELS:
                    check_concatenated_lists(name, mesh, rows)
            check_state(name, mesh, folder)
            if hasattr(make(name), "sampler"):
                check_sampler_tables(name, mesh)
        except Exception as wrong:
            raise AssertionError(f"rank {rank} of {processes}, {name}: {wrong!r}") from wrong


if __name__ == "__main__":
    main(process)
