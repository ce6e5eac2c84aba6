"""Heads leave torch: ONNX programs give what torch gives, for any number of rows."""

import numpy as np
import pytest
import torch

from tests.heads.every_head import EVERY_HEAD, WIDTH, make


class Method(torch.nn.Module):
    def __init__(self, head, k):
        super().__init__()
        self.head, self.k = head, k

    def forward(self, hidden):
        return tuple(self.head.topk(hidden, self.k)) if self.k else self.head.log_prob(hidden)


ROWS = {0: torch.export.Dim("rows", min=1, max=4096)}


@pytest.mark.thin(4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("name", ["full", "entmax", "adaptive", "huffman", "two_level"])
def test_onnx(name, k, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, path = Method(make(name, dtype=torch.float32), k).eval(), tmp_path / "head.onnx"
    with torch.no_grad():
        torch.onnx.export(
            module,
            (torch.randn(4, WIDTH),),
            path,
            dynamo=True,
            verbose=False,
            input_names=["hidden"],
            dynamic_shapes={"hidden": ROWS},
        )
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for rows in (1, 9):
            hidden = torch.randn(rows, WIDTH)
            if rows > 1:
                hidden[1] = 0.0  # ties, where biases are equal
            made, expected = session.run(None, {"hidden": hidden.numpy()}), module(hidden)
            if k:
                assert np.array_equal(made[1], expected[1].numpy())
            values = expected[0] if k else expected
            np.testing.assert_allclose(made[0], values.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", EVERY_HEAD)
def test_chosen_classes_export_too(name):
    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = make(name).eval()

        def forward(self, hidden, classes):
            return self.head.log_prob(hidden, classes)

    module, rows = Chosen(), torch.export.Dim("rows", min=1, max=1024)
    given = torch.randn(4, WIDTH, dtype=torch.float64), torch.randint(23, (4, 2))
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=({0: rows}, {0: rows}))
        hidden, classes = torch.randn(7, WIDTH, dtype=torch.float64), torch.randint(23, (7, 2))
        torch.testing.assert_close(program.module()(hidden, classes), module(hidden, classes))
    own = [str(node.target) for node in program.graph.nodes if "lastlayer" in str(node.target)]
    assert not own, own
