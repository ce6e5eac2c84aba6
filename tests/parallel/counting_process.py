"""Calls between processes are counted: ``counting_process.py PROCESSES FOLDER``."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lastlayer import heads, parallel, samplers, trees
from tests.processes import main

WIDTH, N_CLASSES, ROWS = 8, 60, 5


def _target(**given):
    head = heads.TargetSampling(WIDTH, N_CLASSES, **given)
    head.use(range(N_CLASSES))
    return head


SPELLINGS = [f"word{i}" for i in range(N_CLASSES)]
# Each with how many numbers per row it exchanges before the gradient.
HEADS = {
    "softmax": (1, lambda **g: heads.FullSoftmax(WIDTH, N_CLASSES, **g)),
    "softmax, z-loss, softcap": (
        1, lambda **g: heads.FullSoftmax(WIDTH, N_CLASSES, z_loss=0.1, softcap=9.0, **g),
    ),
    "softmax, smooth": (
        1, lambda **g: heads.FullSoftmax(WIDTH, N_CLASSES, label_smoothing=0.1, **g),
    ),
    "softmax, class weights": (
        2, lambda **g: heads.FullSoftmax(
            WIDTH, N_CLASSES, class_weight=torch.linspace(0.5, 1.5, N_CLASSES), **g),
    ),
    "self-normalised": (1, lambda **g: heads.SelfNormalized(WIDTH, N_CLASSES, **g)),
    "self-normalised, some rows": (
        3, lambda **g: heads.SelfNormalized(
            WIDTH, N_CLASSES, fraction=0.5,
            class_weight=torch.linspace(0.5, 1.5, N_CLASSES), **g),
    ),
    "entmax": (33, lambda **g: heads.EntmaxHead(WIDTH, N_CLASSES, **g)),
    "sparsemax": (33, lambda **g: heads.EntmaxHead(WIDTH, N_CLASSES, 2.0, **g)),
    "entmax 1": (1, lambda **g: heads.EntmaxHead(WIDTH, N_CLASSES, 1.0, **g)),
    "top 7": (7, lambda **g: heads.TopKSoftmaxHead(WIDTH, N_CLASSES, 7, **g)),
    "top 40": (None, lambda **g: heads.TopKSoftmaxHead(WIDTH, N_CLASSES, 40, **g)),
    "zlpr": (2, lambda **g: heads.MultiLabel(WIDTH, N_CLASSES, **g)),
    "bce": (0, lambda **g: heads.MultiLabel(WIDTH, N_CLASSES, "bce", **g)),
    "asymmetric": (0, lambda **g: heads.MultiLabel(WIDTH, N_CLASSES, "asymmetric", **g)),
    "asymmetric, smooth": (1, lambda **g: heads.MultiLabel(
        WIDTH, N_CLASSES, "asymmetric", label_smoothing=0.1, **g)),
    "labels by sparsemax": (
        35, lambda **g: heads.MultiLabel(WIDTH, N_CLASSES, "sparsemax", chunk_rows=4, **g),
    ),
    "adaptive": (
        2, lambda **g: heads.AdaptiveSoftmax(
            WIDTH, cutoffs=[10, 30], n_classes=N_CLASSES, min_width=2, **g),
    ),
    "adaptive, smooth": (
        6, lambda **g: heads.AdaptiveSoftmax(
            WIDTH, cutoffs=[10, 30], n_classes=N_CLASSES, min_width=2, label_smoothing=0.1, **g),
    ),
    "differentiated": (
        1, lambda **g: heads.DifferentiatedSoftmax(WIDTH, [(10, 5), (50, 3)], **g),
    ),
    "projections": (
        1, lambda **g: heads.DifferentiatedSoftmax(
            WIDTH, [(10, 5), (50, 3)], variant="projections", **g),
    ),
    "char_cnn": (1, lambda **g: heads.CharCNNSoftmax(WIDTH, SPELLINGS, **g)),
    "huffman": (0, lambda **g: heads.HierarchicalSoftmax(
        WIDTH, trees.huffman(range(1, N_CLASSES + 1)), **g)),
    "overlapping tree": (2, lambda **g: heads.HierarchicalSoftmax(
        WIDTH, trees.from_codes([[f"{c:06b}"] + ["1111"] * (c == 9) for c in range(60)]
        ), **g)),
    "partition": (0, _target),
    # More draws than rows: these travel, and each process compares them with its draws.
    "sampled": (
        2, lambda **g: heads.SampledSoftmax(WIDTH, N_CLASSES, samplers.Uniform(N_CLASSES), 30, **g),
    ),
    "sampled by a table": (
        2, lambda **g: heads.SampledSoftmax(
            WIDTH, N_CLASSES, samplers.Unigram(range(1, N_CLASSES + 1)), 30, **g),
    ),
    "sampled by an order, unique": (
        2, lambda **g: heads.SampledSoftmax(
            WIDTH, N_CLASSES, samplers.LogUniform(N_CLASSES, order=range(N_CLASSES)), 30,
            unique=True, **g),
    ),
}  # fmt: skip


def counted_step(module, hidden, target):
    with parallel.CountedCommunication() as forward:
        loss = module(hidden, target)
    with parallel.CountedCommunication() as backward:
        loss.backward()
    return forward, backward


def batch(rank, labels, dtype=torch.float32, rows=ROWS):
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    # In the clusters of the adaptive softmax: the most that it sends.
    shape = (rows, labels) if labels > 1 else (rows,)
    return hidden, torch.randint(10, N_CLASSES, shape, generator=generator)


def compare(found, expected, what):
    """Calls and bytes, by name."""
    assert dict(found.calls) == {name: n for name, (n, _) in expected.items()}, (what, found)
    for name, (_, nbytes) in expected.items():
        assert found.received[name] == pytest.approx(nbytes), (what, name, found, nbytes)


def check(name, mesh, *, shared, dtype=torch.float32):
    floats, make = HEADS[name]
    torch.manual_seed(0)
    head = make(dtype=dtype)
    labels = 3 if isinstance(head, heads.MultiLabel) else 1
    if isinstance(head, heads.EntmaxHead):
        # As after training: few classes have a probability.
        with torch.no_grad():
            head.weight.mul_(8.0)
    asked = N_CLASSES if name == "partition" else None
    options = {"targets": labels, "asked": asked, "dtype": dtype}
    expected = parallel.communication(head, mesh, ROWS, shared=shared, **options)
    module = parallel.ClassParallel(head, mesh, rows="shared" if shared else "local")
    hidden, target = batch(0 if shared else mesh.get_local_rank(), labels, dtype)
    module(hidden, target).backward()  # what is asked once, such as which nodes a process has
    forward, backward = counted_step(module, hidden, target)
    what = name, mesh.size(), shared
    compare(forward, expected.calls("forward"), (*what, "forward"))
    compare(backward, expected.calls("backward"), (*what, "backward"))
    if floats is not None:
        assert expected.floats_per_row == floats, what
    # Known of the module as well, and without its mesh.
    again = parallel.communication(module, mesh.size(), ROWS, **options, device="cpu")
    assert again == expected, what


def check_chunks(mesh):
    head = heads.FullSoftmax(WIDTH, N_CLASSES, chunk_rows=2)
    expected = parallel.communication(head, mesh, ROWS)
    module = parallel.ClassParallel(head, mesh)
    forward, _ = counted_step(module, *batch(mesh.get_local_rank(), 1))
    compare(forward, expected.calls("forward"), "chunks")
    total = ROWS * mesh.size()
    (rounds,) = [each.rounds for each in expected.exchanges if each.what == "logsumexp"]
    assert rounds == -(-total // 2)


def check_even_rows(mesh):
    module = parallel.ClassParallel(heads.FullSoftmax(WIDTH, N_CLASSES), mesh, even_rows=True)
    forward, _ = counted_step(module, *batch(mesh.get_local_rank(), 1))
    compare(forward, parallel.communication(module, mesh, ROWS).calls("forward"), "even rows")
    module = parallel.ClassParallel(heads.MultiLabel(WIDTH, N_CLASSES), mesh, even_rows=True)
    forward, _ = counted_step(module, *batch(mesh.get_local_rank(), 3))
    expected = parallel.communication(module, mesh, ROWS, targets=3)
    compare(forward, expected.calls("forward"), "even rows, lists")


def check_flat_entmax(mesh):
    """Of untrained scores more classes have a probability than are told: more rounds."""
    head = heads.EntmaxHead(WIDTH, 6000, 1.1)
    module = parallel.ClassParallel(head, mesh)
    forward, _ = counted_step(module, *batch(mesh.get_local_rank(), 1))
    least = parallel.communication(module, mesh, ROWS)
    assert forward.rounds > least.rounds_forward
    assert forward.nbytes > least.bytes_forward


def check_sampled(mesh, head, *, shared):
    """Vectors and entries of tables travel, of no more classes than were drawn and meant."""
    rows = 40
    most = parallel.communication(head, mesh, rows, shared=shared)
    module = parallel.ClassParallel(head, mesh, rows="shared" if shared else "local")
    hidden, target = batch(0 if shared else mesh.get_local_rank(), 1, rows=rows)
    forward, backward = counted_step(module, hidden, target)
    assert dict(forward.calls) == {name: n for name, (n, _) in most.calls("forward").items()}
    assert dict(backward.calls) == {name: n for name, (n, _) in most.calls("backward").items()}
    assert "hidden states" not in {each.what for each in most.exchanges}
    reduced = most.calls("forward")["all_reduce"][1]
    assert forward.received["all_reduce"] == pytest.approx(reduced)
    # What a process receives may be all from others; of all processes together it is known.
    others = torch.tensor(float(forward.received["all_to_all"]))
    torch.distributed.all_reduce(others)
    bound = most.calls("forward")["all_to_all"][1] * mesh.size() ** 2 / (mesh.size() - 1)
    assert 0 < others <= bound
    assert most.floats_per_row == 0


def check_wide_tree(mesh):
    """A node that is cut by the end of a range: its vectors are asked for."""
    head = heads.HierarchicalSoftmax(WIDTH, trees.two_level(N_CLASSES))
    most = parallel.communication(head, mesh, ROWS)
    module = parallel.ClassParallel(head, mesh)
    hidden, target = batch(mesh.get_local_rank(), 1)
    module(hidden, target).backward()
    forward, backward = counted_step(module, hidden, target)
    for found, when in ((forward, "forward"), (backward, "backward")):
        calls = most.calls(when)
        assert dict(found.calls) == {name: n for name, (n, _) in calls.items()}
        for name, (_, nbytes) in calls.items():
            # Of at most so many vectors all may come from others.
            slack = mesh.size() / (mesh.size() - 1) if name == "all_to_all" else 1.0
            assert found.received[name] <= nbytes * slack * (1 + 1e-9), (name, found, nbytes)


def check_log_prob(mesh, *, shared):
    """With a gradient, backward sends one number per row, and the gradients of rows."""
    module = parallel.ClassParallel(
        heads.FullSoftmax(WIDTH, N_CLASSES), mesh, rows="shared" if shared else "local"
    )
    processes, k = mesh.size(), 2
    hidden, classes = batch(0 if shared else mesh.get_local_rank(), k)
    n = ROWS if shared else ROWS * processes
    most = -(-N_CLASSES // processes)
    others, ring = processes - 1, (processes - 1) / processes
    # Bytes that a process receives, by what they are. The last are ids: 8 bytes each.
    lse, hidden_grad = 4 * n * others, 4 * n * WIDTH * ring
    met = {} if shared else {"all_gather": (2, (24 + 4 * ROWS * WIDTH) * others)}
    ids = 8 * (1 + most) * others
    expected = {
        # Chosen classes and their logsumexp; in backward also the gradient of what was asked for.
        (True, "forward"): _added(
            met,
            {"all_gather": (1, lse), "all_reduce": (1, 2 * 4 * n * k * ring)},
            {} if shared else {"all_gather": (1, 8 * ROWS * k * others)},
        ),
        (True, "backward"): _added(
            {"all_gather": (1, lse), "all_reduce": (1, 2 * 4 * n * ring)},
            {} if shared else {"all_gather": (1, 4 * ROWS * k * others)},
            _of_hidden(shared, hidden_grad),
        ),
        # All columns, and who has which.
        (False, "forward"): _added(
            met, {"all_gather": (1, lse)}, {"all_gather": (3, ids + 4 * n * most * others)}
        ),
        (False, "backward"): _added(
            {"all_reduce": (1, 2 * 4 * n * ring)},
            {} if shared else {"reduce_scatter": (1, 4 * n * most * others)},
            _of_hidden(shared, hidden_grad),
        ),
    }
    for chosen in (True, False):
        given = (hidden, classes) if chosen else (hidden,)
        with torch.no_grad(), parallel.CountedCommunication() as unrecorded:
            module.log_prob(*given)
        with parallel.CountedCommunication() as forward:
            made = module.log_prob(*given)
        with parallel.CountedCommunication() as backward:
            made.sum().backward()
        compare(unrecorded, expected[chosen, "forward"], (chosen, shared, "no_grad"))
        compare(forward, expected[chosen, "forward"], (chosen, shared, "forward"))
        compare(backward, expected[chosen, "backward"], (chosen, shared, "backward"))


def check_log_prob_of_a_tree(mesh):
    """One number per row and class, not the scores of all nodes."""
    module = parallel.ClassParallel(
        heads.HierarchicalSoftmax(WIDTH, trees.huffman(range(1, N_CLASSES + 1))), mesh
    )
    hidden, target = batch(mesh.get_local_rank(), 1)
    module.log_prob(hidden, target)  # what is asked once
    with parallel.CountedCommunication() as counted:
        module.log_prob(hidden, target)
    others, n = mesh.size() - 1, ROWS * mesh.size()
    expected = {
        "all_gather": (3, (24 + 4 * ROWS * WIDTH + 8 * ROWS) * others),
        "all_reduce": (1, 2 * 4 * n * others / mesh.size()),
    }
    compare(counted, expected, "log_prob of a tree")


def _of_hidden(shared, nbytes):
    return {"all_reduce": (1, 2 * nbytes)} if shared else {"reduce_scatter": (1, nbytes)}


def _added(*parts):
    """Calls and bytes of several, by name."""
    made = {}
    for part in parts:
        for name, (calls, nbytes) in part.items():
            before = made.get(name, (0, 0))
            made[name] = before[0] + calls, before[1] + nbytes
    return made


def process(rank: int, processes: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=("classes",))
    for shared in (False, True):
        for name in HEADS:
            check(name, mesh, shared=shared)
        unigram = samplers.Unigram(range(1, N_CLASSES + 1))
        ordered = samplers.LogUniform(N_CLASSES, order=range(N_CLASSES))
        for sampler in (samplers.LogUniform(N_CLASSES), ordered, unigram):
            for kind in (heads.SampledSoftmax, heads.NoiseContrastive, heads.NegativeSampling):
                check_sampled(mesh, kind(WIDTH, N_CLASSES, sampler, 12), shared=shared)
        exact = heads.SampledSoftmax(WIDTH, N_CLASSES, unigram, 12, head_classes=4)
        check_sampled(mesh, exact, shared=shared)
        check_log_prob(mesh, shared=shared)
    check("softmax", mesh, shared=False, dtype=torch.float64)
    check("softmax", mesh, shared=False, dtype=torch.bfloat16)
    check_chunks(mesh)
    check_even_rows(mesh)
    check_flat_entmax(mesh)
    check_wide_tree(mesh)
    check_log_prob_of_a_tree(mesh)
    with parallel.CountedCommunication() as counted:
        pass
    assert (counted.rounds, counted.nbytes) == (0, 0)


if __name__ == "__main__":
    main(process)
