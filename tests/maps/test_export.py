"""The reference path leaves torch: ONNX, and inductor's own code."""

import shutil

import numpy as np
import pytest
import torch

from lastlayer import entmax, sparsemax, topk_softmax


class ReferenceMap(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        if self.name == "sparsemax":
            return sparsemax(scores, impl="reference")
        if self.name == "topk_softmax":
            return topk_softmax(scores, 3, impl="reference")
        return entmax(scores, float(self.name.split()[1]), impl="reference")


@pytest.mark.thin(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["sparsemax", "entmax 1.5", "entmax 1.25", "topk_softmax"])
def test_onnx_runs_the_reference(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = ReferenceMap(name).eval()
    path = tmp_path / "map.onnx"
    example = torch.randn(4, 9)
    torch.onnx.export(
        module,
        (example,),
        path,
        dynamo=True,
        verbose=False,
        input_names=["scores"],
        dynamic_shapes={"scores": {0: torch.export.Dim("rows", min=1, max=4096)}},
    )
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for rows in (4, 11):
        scores = 2 * torch.randn(rows, 9)
        scores[0, 3] = -torch.inf
        scores[1] = -torch.inf
        (probs,) = session.run(None, {"scores": scores.numpy()})
        assert np.abs(probs - module(scores).numpy()).max() < 1e-6


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor needs a C++ compiler on the CPU",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_a_layer_around_a_map():
    torch.compiler.reset()
    layer = torch.nn.Linear(6, 11)

    def model(x):
        return (entmax(layer(x) * 2, 1.5) * torch.arange(11.0)).sum(-1)

    x = torch.randn(5, 6, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)(x)
    expected = model(x)
    assert (compiled - expected).abs().max() < 1e-5
    (ours,) = torch.autograd.grad(compiled.sum(), x)
    (eager,) = torch.autograd.grad(expected.sum(), x)
    assert (ours - eager).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_graph_serves_every_shape():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: topk_softmax(sparsemax(x), 2), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for shape in ((3, 5), (4, 9), (7, 33)):
        scores = torch.randn(shape)
        assert torch.equal(compiled(scores), topk_softmax(sparsemax(scores), 2))


def test_meta_tensors_have_shapes():
    scores = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    for probs in (sparsemax(scores), entmax(scores, 1.2), topk_softmax(scores, 2)):
        assert probs.shape == (3, 5)
        assert probs.dtype == torch.bfloat16
        assert probs.device.type == "meta"
