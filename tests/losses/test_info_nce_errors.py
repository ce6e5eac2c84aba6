"""What is refused by the contrastive losses, and with which words."""

import pytest
import torch

from lastlayer.losses.contrastive import InfoNCELoss, info_nce
from lastlayer.losses.queue import NegativeQueue

X = torch.randn(4, 3)
G = torch.arange(4)
GROUPS = dict(negatives=X, groups=G)
WRONG = [
    (dict(query=[1.0]), TypeError, "query: expected a torch.Tensor, got list"),
    (dict(query=G), TypeError, "query: expected a floating dtype"),
    (dict(query=X[0]), ValueError, r"query: expected shape \(n, d\), got \(3,\)"),
    (dict(key=X[:3]), ValueError, r"key: expected the shape of query, \(4, 3\)"),
    (dict(key=X.double()), TypeError, "key: expected the dtype of query, torch.float32"),
    (dict(negatives=X[:, :2]), ValueError, r"negatives: expected shape \(m, 3\)"),
    (dict(negatives=torch.randn(3, 2, 3)), ValueError, r"or \(4, m, 3\), m per query"),
    (dict(in_batch=False), ValueError, "negatives: expected a tensor with in_batch=False"),
    (
        dict(negatives=X, in_batch=False, symmetric=True),
        ValueError,
        "symmetric: expected False with in_batch=False",
    ),
    (dict(temperature=0.0), ValueError, "temperature: expected a finite number above 0, got 0.0"),
    (dict(temperature=-1), ValueError, "temperature: expected a finite number above 0, got -1"),
    (
        dict(temperature=float("nan")),
        ValueError,
        "temperature: expected a finite number above 0, got nan",
    ),
    (dict(temperature=torch.tensor(-0.5)), ValueError, "above 0, got -0.5"),
    (dict(temperature=torch.ones(1)), ValueError, "temperature: expected a 0-dimensional tensor"),
    (dict(temperature=torch.tensor(1)), TypeError, "temperature: expected a number or a floating"),
    (dict(temperature="low"), TypeError, "temperature: expected a number .* got str"),
    (
        dict(groups=G[:3]),
        ValueError,
        r"groups: expected shape \(4,\), one group per pair, got \(3,",
    ),
    (dict(groups=X[:, 0]), TypeError, "groups: expected an integer tensor, got torch.float32"),
    (dict(groups=[0, 1, 2, 3]), ValueError, "for queries and for keys.*, got 4"),
    (dict(groups=(G, G[:2])), ValueError, r"groups\[1\]: expected shape \(4,\), one group per key"),
    (dict(negative_groups=G), ValueError, "negative_groups: expected None without negatives"),
    (
        dict(negatives=X, negative_groups=G),
        ValueError,
        "negative_groups: expected None without groups",
    ),
    (dict(**GROUPS, negative_groups=G[:2]), ValueError, r"negative_groups: expected shape \(4,\)"),
    (dict(same_group="push"), ValueError, "same_group: expected one of .* got 'push'"),
    (dict(reduction="max"), ValueError, "reduction: expected one of"),
    (dict(chunk_rows=0), ValueError, "chunk_rows: expected at least 1, got 0"),
    (dict(chunk_rows="all"), TypeError, "chunk_rows: expected an int, 'auto' or 'low'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_info_nce_refuses(options, error, message):
    with pytest.raises(error, match=message):
        info_nce(**(dict(query=X, key=X) | options))


def test_module_refuses():
    with pytest.raises(TypeError, match="temperature: expected a number, got a tensor"):
        InfoNCELoss(torch.tensor(0.1))
    with pytest.raises(ValueError, match=r"temperature: expected at least 1/max_scale = 0.01"):
        InfoNCELoss(0.001, learn_temperature=True)
    with pytest.raises(ValueError, match="max_scale: expected a finite number above 0"):
        InfoNCELoss(0.1, max_scale=0.0)
    with pytest.raises(TypeError, match="max_scale: expected a number, got str"):
        InfoNCELoss(0.1, max_scale="100")
    with pytest.raises(TypeError, match="margin: expected one of the options"):
        InfoNCELoss(0.1, margin=2)


def test_queue_refuses():
    with pytest.raises(ValueError, match="size: expected at least 1, got 0"):
        NegativeQueue(0, 3)
    with pytest.raises(TypeError, match="dim: expected an int, got float"):
        NegativeQueue(4, 3.0)
    queue = NegativeQueue(4, 3)
    with pytest.raises(ValueError, match=r"keys: expected shape \(n, 3\), got \(4, 2\)"):
        queue.push(X[:, :2])
    with pytest.raises(ValueError, match=r"groups: expected shape \(4,\)"):
        queue.push(X, G[:2])
    queue.push(X, G)
    with pytest.raises(ValueError, match="groups: expected groups, as for the keys in the queue"):
        queue.push(X)
