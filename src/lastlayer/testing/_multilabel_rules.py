"""Rules that only a head with any number of labels a row has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer.testing._heads_errors import _refused
from lastlayer.testing._heads_suite import HeadSuite, wide


def probabilities_are_probabilities(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        head = suite.head(dtype)
        for scale in (0.01, 1.0, 20.0):
            hidden = suite.hidden(5, dtype=dtype, scale=scale)
            log_prob = head.log_prob(hidden).detach()
            rule = f"log_prob of {dtype} hidden is {wide(dtype)} with one number a row and label"
            as_promised = log_prob.dtype == wide(dtype) and log_prob.shape == (5, suite.n_classes)
            got = f"got {log_prob.dtype} {tuple(log_prob.shape)}"
            suite.require(rule, as_promised, got, hidden)
            rule = "log_prob is at most 0"
            suite.require(rule, (log_prob <= 0).all(-1), f"got {log_prob.max():g}", hidden)
            rule = "probability is exp(log_prob)"
            suite.close(rule, head.probability(hidden), log_prob.exp(), suite.same, hidden)


def predicted_lists_are_the_most_probable_labels(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3, scale=3.0)
    lists, padding = head.predict(hidden), suite.given.ignore_index
    rule = "predict gives lists of class ids, (*batch, m)"
    shaped = lists.dtype == torch.int64 and lists.shape[:-1] == (2, 3)
    suite.require(rule, shaped, f"got {lists.dtype} {tuple(lists.shape)}", hidden)
    log_prob = head.log_prob(hidden).detach().reshape(6, -1)
    for row, labels in enumerate(lists.reshape(6, -1).tolist()):
        chosen = [label for label in labels if label != padding]
        rule = "a list is ascending, with padding behind it"
        in_order = chosen == sorted(set(chosen)) and labels[: len(chosen)] == chosen
        suite.require(rule, in_order, f"got {labels}", hidden)
        rest = log_prob[row].clone()
        rest[chosen] = -torch.inf
        least = min((log_prob[row, label].item() for label in chosen), default=0.0)
        rule = "no label is left out that is more probable than a predicted one"
        suite.require(rule, rest.max().item() <= least, f"got {labels}", hidden)
    rule = "the loss takes the lists that predict gives"
    loss = suite.runs(rule, hidden, suite.loss, head, hidden, lists)
    suite.require(rule, loss.isfinite(), f"got {loss:g}", hidden)


def padding_and_duplicates_count_for_nothing(suite: HeadSuite) -> None:
    head, hidden, lists = suite.head(reduction="none"), suite.hidden(6), suite.targets(6)
    losses = suite.loss(head, hidden, lists)
    padding = torch.full_like(lists[:, :2], suite.given.ignore_index)
    rule = "padding and duplicates change nothing"
    wider = torch.cat([padding, lists.flip(-1), lists], -1)
    suite.close(rule, suite.loss(head, hidden, wider), losses, suite.same, hidden)


def csr_is_the_same_as_padded(suite: HeadSuite) -> None:
    head, hidden, lists = suite.head(reduction="none"), suite.hidden(6), suite.targets(6)
    kept = lists != suite.given.ignore_index
    offsets = torch.nn.functional.pad(kept.sum(-1).cumsum(0), (1, 0))
    rule = "lists one after the other with offsets are the same as padded ones"
    losses = suite.runs(rule, hidden, head, hidden, lists[kept], offsets)
    suite.close(rule, losses, suite.loss(head, hidden, lists), suite.same, hidden)


def batch_dimensions_do_not_matter(suite: HeadSuite) -> None:
    head = suite.head(reduction="none")
    flat, lists = suite.hidden(6), suite.targets(6)
    losses, log_prob, predicted = (
        suite.loss(head, flat, lists),
        head.log_prob(flat),
        head.predict(flat),
    )
    for batch in ((2, 3), (1, 6, 1), (3, 1, 2)):
        hidden = flat.reshape(*batch, -1)
        rule = f"batch dimensions do not matter, {batch}"
        loss = suite.loss(head, hidden, lists.reshape(*batch, -1))
        suite.close(f"{rule}: loss", loss, losses.reshape(batch), suite.same, hidden)
        shaped = log_prob.reshape(*batch, -1)
        suite.close(f"{rule}: log_prob", head.log_prob(hidden), shaped, suite.same, hidden)
        same = torch.equal(head.predict(hidden), predicted.reshape(*batch, -1))
        suite.require(f"{rule}: predict", same, "got other lists", hidden)
    rule = "a row alone is the same as a row in a batch"
    suite.close(rule, suite.loss(head, flat[2], lists[2]), losses[2], suite.same, flat)


def an_empty_batch_works(suite: HeadSuite) -> None:
    for batch in ((0,), (2, 0)):
        hidden, lists = suite.hidden(*batch), suite.targets(*batch)
        for reduction, shape in (("none", batch), ("sum", ()), ("mean", ())):
            rule = f"an empty batch {batch} has loss 0, reduction={reduction!r}"
            loss = suite.runs(rule, hidden, suite.loss, suite.head(None, reduction), hidden, lists)
            suite.close(rule, loss, torch.zeros(shape, device=suite.device), 0.0, hidden)
        head = suite.head()
        results: dict[str, tuple[tuple[int, ...], Callable[..., Any], Any]] = {
            "log_prob": ((*batch, suite.n_classes), head.log_prob, ()),
            "probability of a label": ((*batch, 1), head.probability, (lists.new_zeros(1),)),
            "topk": ((*batch, 1), head.topk, (1,)),
            "predict": ((*batch, 0), head.predict, ()),
        }
        for name, (wanted, function, arguments) in results.items():
            rule = f"{name} of an empty batch {batch} is empty"
            result = suite.runs(rule, hidden, function, hidden, *arguments)
            for each in result if isinstance(result, tuple) else (result,):
                suite.require(rule, each.shape == wanted, f"got {tuple(each.shape)}", hidden)


def autocast_keeps_float32(suite: HeadSuite) -> None:
    rule = "autocast to bfloat16"
    head, lists = suite.head(torch.float32), suite.targets(5)
    hidden = suite.hidden(5, dtype=torch.float32).requires_grad_()
    plain = suite.loss(head, hidden, lists)
    expected = suite.gradients(head, plain, hidden)

    def run() -> tuple[Tensor, dict[str, Tensor], Tensor]:
        with torch.autocast(suite.device.type, dtype=torch.bfloat16):
            loss = suite.loss(head, hidden, lists)
            probs = head.probability(hidden)
        return loss, suite.gradients(head, loss, hidden), probs

    loss, made, probs = suite.runs(rule, hidden, run)
    for name, each in {"the loss": loss, "probability": probs, **made}.items():
        got = f"got {each.dtype}"
        suite.require(f"{rule}: {name} is float32", each.dtype == torch.float32, got, hidden)
    suite.close(rule, loss, plain, 5e-2, hidden)
    for name, grad in made.items():
        # By its norm: a sparse map may count other labels in once scores are rounded.
        error, norm = float((grad - expected[name]).norm()), float(expected[name].norm())
        away = f"it is off by {error:g}, with a norm of {norm:g}"
        suite.require(f"{rule}: the gradient of {name}", error <= 0.4 * norm, away, hidden)


def bad_input_is_refused(suite: HeadSuite) -> None:
    head, hidden, lists = suite.head(), suite.hidden(2, 3), suite.targets(2, 3)
    n = suite.n_classes
    wider = torch.cat([hidden, hidden[..., :1]], -1)
    calls: dict[str, Callable[[Any], Any]] = {
        "forward": lambda given: head(given, lists),
        "log_prob": head.log_prob,
        "probability": head.probability,
        "topk": lambda given: head.topk(given, 1),
        "predict": head.predict,
    }
    for name, call in calls.items():
        _refused(suite, "hidden", f"hidden of another width ({name})", call, wider)
        _refused(suite, "hidden", f"hidden of integers ({name})", call, hidden.long())
        _refused(suite, "hidden", f"hidden that is no tensor ({name})", call, hidden.tolist())

    def loss(given: Any) -> Any:
        return head(hidden, given)

    _refused(suite, "positives", f"a label of {n}", loss, torch.full_like(lists, n))
    _refused(suite, "positives", "lists of another batch", loss, lists[:, :2])
    _refused(suite, "positives", "lists that are no tensor", loss, lists.tolist())
    _refused(suite, "positives", "0/1 labels", loss, torch.zeros_like(lists, dtype=torch.bool))
    wrong = torch.zeros(3, dtype=torch.int64, device=suite.device)
    _refused(suite, "offsets", "offsets of another length",
             lambda given: head(hidden, wrong, given), wrong)  # fmt: skip

    def chosen(given: Any) -> Any:
        return head.log_prob(hidden, given)

    _refused(suite, "classes", f"a class of {n}", chosen, torch.full_like(lists[0, 0], n))
    _refused(suite, "classes", "a class of -1", chosen, torch.full_like(lists[0, 0], -1))
    for k in (0, -1, n + 1, 1.0, True):
        _refused(suite, "k", f"k={k}", lambda given: head.topk(hidden, given), k)
