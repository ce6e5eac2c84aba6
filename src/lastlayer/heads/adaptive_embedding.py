"""An input layer on the class vectors of an adaptive softmax."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lastlayer._checks import checked_ids

if TYPE_CHECKING:
    from lastlayer.heads.adaptive import AdaptiveSoftmax


class AdaptiveEmbedding(torch.nn.Module):
    r"""Vectors of classes, looked up in an adaptive softmax: the two are tied.

    .. math:: e_c = w_c \quad\text{at the top,}\qquad e_c = P_i^\top w_c \quad\text{in cluster } i

    It is the vector whose product with a hidden state is the score of the class in its softmax,
    in the head as well, so that input and output agree on what a class is. Made by
    :meth:`AdaptiveSoftmax.embedding`.

    Choose it for a language model whose words come in and go out: it saves the input table, and
    rare words learn from both ends.

    The parameters belong to the head alone. They are not among those of this layer, nor in its
    ``state_dict``: a model that has both saves, moves and optimises them once. Such a model must
    therefore have the head among its modules. Gradients of both uses add up in the head.

    Cost: a product of ids × the widths of all clusters × in_features, and no wait for the device.

    Args:
        head: whose vectors they are.

    Example:
        >>> import torch
        >>> from lastlayer.heads import AdaptiveSoftmax
        >>> head = AdaptiveSoftmax(64, cutoffs=[100, 1000], n_classes=5000)
        >>> embedding = head.embedding()
        >>> embedding(torch.tensor([[3, 4999, 100]])).shape
        torch.Size([1, 3, 64])
        >>> len(embedding.state_dict())
        0

    Reference:
        Baevski and Auli, Adaptive input representations for neural language modeling, ICLR 2019,
        arXiv:1809.10853.
    """

    def __init__(self, head: "AdaptiveSoftmax") -> None:
        super().__init__()
        # In a tuple: as an attribute of its own the head would be a part of this module.
        self._tied = (head,)

    @property
    def head(self) -> "AdaptiveSoftmax":
        """The head that owns the vectors."""
        return self._tied[0]

    def forward(self, classes: Tensor) -> Tensor:
        """Vectors ``(*batch, in_features)`` of class ids ``(*batch)``, in the dtype of the head."""
        head = self.head
        classes = _check_ids(classes, head)
        place = head._places_of(classes.reshape(-1))
        n, dtype = head._n_top, head.head_weight.dtype
        at_top = (place < n).unsqueeze(-1)
        made = torch.where(at_top, embedding(place.clamp(max=n - 1), head.head_weight), 0.0)
        if head._clusters:
            narrow = []
            for (first, last), vectors in zip(head._clusters, head.tails, strict=True):
                inside = ((place >= first) & (place < last)).unsqueeze(-1)
                found = embedding(place.clamp(first, last - 1) - first, vectors)
                narrow.append(torch.where(inside, found, 0.0))
            # Side by side, all but one of them 0: one product for all clusters.
            below = torch.cat(narrow, -1) @ torch.cat(list(head.projections))
            made = made + below.to(dtype)
        return made.reshape(*classes.shape, head.in_features)

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Embedding`` shows them."""
        return f"{self.head.n_classes}, {self.head.in_features}"


def _check_ids(classes: Any, head: "AdaptiveSoftmax") -> Tensor:
    if not isinstance(classes, Tensor):
        raise TypeError(f"classes: expected a torch.Tensor, got {type(classes).__name__}")
    if classes.dtype != torch.int64:
        raise TypeError(
            f"classes: expected torch.int64 class ids, got {classes.dtype}; convert with "
            "classes.long()"
        )
    device = head.head_weight.device
    if classes.device != device:
        raise ValueError(
            f"classes: expected the device of the head, {device}, got {classes.device}"
        )
    return checked_ids("classes", classes, head.n_classes)
