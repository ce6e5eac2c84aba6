"""The rules shared by check_head and check_multilabel_head."""

import copy
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from lastlayer._processes import is_dtensor
from lastlayer._torch import accumulation_dtype
from lastlayer.heads import Head, prepare_ddp
from lastlayer.testing.suite import INTEGERS, REDUCTIONS, Suite

# Tolerance of probabilities in half precision, compared with the same parameters in float64.
HALF_TOLERANCE = 3e-2
# Maximum number of classes in the check that every parameter gets a gradient.
MOST_TARGETS = 512
# Step size of finite differences, and their tolerance.
STEP = 1e-5
SLOPE_TOLERANCE = 1e-6


@dataclass(kw_only=True)
class HeadSuite(Suite):
    """A head, which is copied and not modified, with inputs for it."""

    # Any, since the suite checks whether it is a head.
    given: Any
    draws: int = 0
    loss_is_nll: bool = False
    input_name = "hidden"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.given, torch.nn.Module):
            with self.same_chance():
                self.given = self.given()
        sharded = [name for name, each in self.given.named_parameters() if is_dtensor(each)]
        if sharded:
            # Its loss covers the rows of all processes, which these rules do not know.
            raise TypeError(
                f"head: expected plain parameters, got a DTensor in {sharded[0]}; check the head "
                "before it is sharded, or ClassParallel.gather() in the first process, and compare "
                "losses and gradients of the sharded head with those of the plain one"
            )

    @property
    def n_classes(self) -> int:
        return int(self.given.n_classes)

    @property
    def ignore_index(self) -> int | None:
        ignored: int | None = self.given.ignore_index
        return ignored

    def head(self, dtype: torch.dtype | None = None, reduction: str = "mean") -> Any:
        """A copy in training mode, in ``dtype`` or the finest dtype."""
        head = copy.deepcopy(self.given).to(self.device, dtype or self.finest).train()
        head.reduction = reduction
        return head

    def hidden(self, *batch: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return scale * self.normal(*batch, self.given.in_features, dtype=dtype or self.finest)

    def targets(self, *batch: int) -> Tensor:
        """Random class ids other than the ignored one."""
        ids = self.integers(self.n_classes, *batch)
        if self.ignore_index is None or self.n_classes == 1:
            return ids
        return torch.where(ids == self.ignore_index, (ids + 1) % self.n_classes, ids)

    def all_targets(self) -> Tensor:
        """All class ids except the ignored one."""
        ids = torch.arange(self.n_classes, device=self.device)
        return ids if self.ignore_index is None else ids[ids != self.ignore_index]

    def calls(self, head: Any) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]]:
        """Methods on hidden states, by name: last dimensions of the result, and the call."""
        k = min(3, self.n_classes)

        def first(hidden: Tensor) -> Tensor:
            return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=self.device)

        return {
            "log_prob": ((self.n_classes,), head.log_prob),
            "topk": ((k,), lambda hidden: head.topk(hidden, k)),
            "log_prob of one class": ((), lambda hidden: head.log_prob(hidden, first(hidden))),
        }

    def loss(self, head: Any, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss, with the same random draws in each call, also if they come from a counter."""
        before = [each.clone() for each in head.buffers()]
        with self.same_chance():
            loss: Tensor = head(hidden, target)
        with torch.no_grad():
            for buffer, value in zip(head.buffers(), before, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        return loss

    def values(self, head: Any, hidden: Tensor, target: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Everything with gradients; log-probabilities of the top class, which is never -inf."""
        best = head.topk(hidden, 1).classes
        return {
            "the loss": lambda: self.loss(head, hidden, target),
            "log_prob(hidden, classes)": lambda: head.log_prob(hidden, best),
            "log_prob(hidden)": lambda: head.log_prob(hidden).gather(-1, best),
        }

    def gradients(
        self, head: Any, value: Tensor, hidden: Tensor, upstream: Tensor | None = None, **how: bool
    ) -> dict[str, Tensor]:
        """Gradients by hidden and by each parameter; zeros instead of None."""
        leaves = self.leaves(head, hidden)
        upstream = torch.ones_like(value) if upstream is None else upstream
        made: tuple[Tensor | None, ...] = torch.autograd.grad(
            value, list(leaves.values()), upstream, allow_unused=True, **how
        )
        return {
            name: torch.zeros_like(leaf) if grad is None else grad.to_dense()
            for (name, leaf), grad in zip(leaves.items(), made, strict=True)
        }

    @staticmethod
    def leaves(head: Any, hidden: Tensor) -> dict[str, Tensor]:
        learned = {name: each for name, each in head.named_parameters() if each.requires_grad}
        return {"hidden": hidden, **learned}

    def same_gradients(
        self, rule: str, found: dict[str, Tensor], expected: dict[str, Tensor], hidden: Tensor
    ) -> None:
        for name, gradient in found.items():
            of = f"{rule}: the gradient of {name}"
            self.close(of, gradient, expected[name], self.same, hidden)


def it_says_what_it_is(suite: HeadSuite) -> None:
    head = suite.head()
    shown = head.extra_repr()
    for name in ("in_features", "n_classes"):
        said = f"{name}={getattr(head, name)}" in shown
        suite.require(f"extra_repr has {name}", said, f"got {shown}")


def log_prob_has_the_promised_form(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        hidden, wide = suite.hidden(5, dtype=dtype), accumulation_dtype(dtype)
        rule = f"log_prob of {dtype} hidden is {wide} with one number per row and class"
        suite.typed(rule, suite.head(dtype).log_prob(hidden), wide, (5, suite.n_classes), hidden)


def chosen_classes_are_the_gathered_ones(suite: HeadSuite) -> None:
    head, hidden, n = suite.head(), suite.hidden(2, 3), suite.n_classes
    everything = head.log_prob(hidden)
    rule = "log_prob(hidden, classes) is log_prob(hidden) at these classes"

    def compare(what: str, rows: Tensor, classes: Tensor, expected: Tensor) -> None:
        found = suite.runs(f"{rule}{what}", rows, head.log_prob, rows, classes)
        suite.close(f"{rule}{what}", found, expected, suite.same, rows)

    for width in (1, 4):
        own, shared = suite.integers(n, 2, 3, width), suite.integers(n, width)
        compare("", hidden, own, everything.gather(-1, own))
        expanded = shared.expand(2, 3, width)
        compare(", the same for every row", hidden, expanded, everything[..., shared])
    one = suite.integers(n, 2, 3)
    gathered = everything.gather(-1, one.unsqueeze(-1)).squeeze(-1)
    compare(", one for each row", hidden, one, gathered)
    for classes in (suite.integers(n), suite.integers(n, 4)):
        compare(", a single row", hidden[1, 2], classes, everything[1, 2][classes])
    for dtype in _integers_up_to(n):
        compare(f", classes of {dtype}", hidden, one.to(dtype), gathered)


def topk_is_a_sort(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3, scale=2.0)
    everything = head.log_prob(hidden).detach()
    for k in sorted({1, min(5, suite.n_classes), min(1000, suite.n_classes)}):
        values, classes = head.topk(hidden, k)
        best = everything.sort(-1, descending=True).values[..., :k]
        rule = f"topk(hidden, {k})"
        sort = f"{rule} has the values of a sort of log_prob"
        suite.close(sort, values, best, suite.same, hidden)
        of_values = f"{rule} has the classes of its values"
        suite.typed(of_values, classes, torch.int64, (2, 3, k), hidden)
        suite.close(of_values, everything.gather(-1, classes), values, suite.same, hidden)
        ordered = classes.sort(-1).values
        different = (ordered[..., 1:] != ordered[..., :-1]).all(-1)
        suite.require(f"{rule} has no class twice", different, f"got {classes.tolist()}", hidden)


def reductions_agree(suite: HeadSuite) -> None:
    hidden, target = suite.hidden(2, 3), suite.targets(2, 3)
    none, mean, total = (
        suite.loss(suite.head(reduction=each), hidden, target) for each in REDUCTIONS
    )
    suite.reductions(none, mean, total, (2, 3), hidden)


def targets_may_have_any_integer_dtype(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(), suite.hidden(6).requires_grad_(), suite.targets(6)
    expected = suite.loss(head, hidden, target)
    slopes = suite.gradients(head, expected, hidden)
    for dtype in _integers_up_to(suite.n_classes, int(target.min())):
        rule = f"targets of {dtype} give the results of int64"
        loss = suite.runs(rule, hidden, suite.loss, head, hidden, target.to(dtype))
        suite.close(rule, loss, expected, suite.same, hidden)
        suite.same_gradients(rule, suite.gradients(head, loss, hidden), slopes, hidden)


def batch_dimensions_do_not_matter(suite: HeadSuite) -> None:
    head, flat, target = suite.head(reduction="none"), suite.hidden(6), suite.targets(6)

    def results(hidden: Tensor, target: Tensor) -> dict[str, Tensor]:
        found = {"loss": suite.loss(head, hidden, target)}
        for name, (_, call) in suite.calls(head).items():
            if name != "sample":
                result = call(hidden)
                found[name] = result[0] if isinstance(result, tuple) else result
        return found

    expected = results(flat, target)
    for batch in ((2, 3), (1, 6, 1), (3, 1, 2)):
        hidden = flat.reshape(*batch, -1)
        for name, found in results(hidden, target.reshape(*batch, *target.shape[1:])).items():
            right = expected[name].reshape(*batch, *expected[name].shape[1:])
            rule = f"batch dimensions do not matter, {batch}: {name}"
            suite.close(rule, found, right, suite.same, hidden)
    for name, found in results(flat[2], target[2]).items():
        rule = f"a row alone is the same as a row in a batch: {name}"
        # Predicted lists of labels are padded to the longest list of the batch.
        right = expected[name][2, : len(found)] if found.dim() else expected[name][2]
        suite.close(rule, found, right, suite.same, flat)


def an_empty_batch_works(suite: HeadSuite) -> None:
    for batch in ((0,), (2, 0)):
        hidden, target = suite.hidden(*batch), suite.targets(*batch)
        for reduction in REDUCTIONS:
            rule = f"an empty batch {batch} has loss 0, reduction={reduction!r}"
            loss = suite.runs(rule, hidden, suite.loss, suite.head(None, reduction), hidden, target)
            shape = batch if reduction == "none" else ()
            suite.close(rule, loss, torch.zeros(shape, device=suite.device), 0.0, hidden)
        for name, (last, call) in suite.calls(suite.head()).items():
            rule = f"{name} of an empty batch {batch} is empty"
            result = suite.runs(rule, hidden, call, hidden)
            for each in result if isinstance(result, tuple) else (result,):
                wanted = (*batch, 0) if name == "predict" else (*batch, *last)
                suite.require(rule, each.shape == wanted, f"got {tuple(each.shape)}", hidden)


def a_nan_stays_in_its_row(suite: HeadSuite) -> None:
    head, target, clean = suite.head(reduction="none"), suite.targets(3), suite.hidden(3)
    hidden = clean.clone()
    hidden[1, 0] = math.nan
    for name, call in {
        "loss": lambda rows: suite.loss(head, rows, target),
        "log-probabilities": head.log_prob,
    }.items():
        rule = f"a NaN makes the {name} of its row NaN and no other"
        expected = call(clean).detach()
        expected[1] = math.nan
        suite.close(rule, call(hidden), expected, suite.same, hidden)


def a_masked_row_has_log_prob_minus_infinity(suite: HeadSuite) -> None:
    """For a head with one bias per class: a bias of -inf masks its class."""
    hidden, n = suite.hidden(4), suite.n_classes
    plain = suite.head(reduction="none")
    bias = getattr(plain, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != (n,):
        return

    def masked(which: Any) -> Any:
        head = copy.deepcopy(plain)
        with torch.no_grad():
            head.bias[which] = -math.inf
        return head

    possible = plain.log_prob(hidden) > -math.inf
    for each in suite.permutation(n)[:3].tolist():
        found = masked(each).log_prob(hidden)
        suite.require("a bias of -inf gives no NaN", ~found.isnan().any(-1), "got NaN", hidden)
        lost = possible & (found == -math.inf)
        lost[:, each] = False
        if bool(lost.any()) or bool((found[:, each] > -math.inf).any()):
            return  # Not biases of classes, but for example of the nodes of a tree.
    head, rule = masked(slice(None)), "with every class masked log_prob is -inf"
    classes, target = suite.integers(n, 4, 3), suite.targets(4)
    suite.close(rule, head.log_prob(hidden), -math.inf, 0.0, hidden)
    chosen = head.log_prob(hidden, classes)
    suite.close(f"{rule}, for chosen classes too", chosen, -math.inf, 0.0, hidden)
    if suite.loss_is_nll:
        rule = "with every class masked the loss is +inf"
        suite.close(rule, suite.loss(head, hidden, target), math.inf, 0.0, hidden)


def half_precision_keeps_to_float64(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        rounded = suite.head(dtype, "none")
        hidden, target = suite.hidden(7, dtype=dtype), suite.targets(7)
        losses, wide = suite.loss(rounded, hidden, target), accumulation_dtype(dtype)
        suite.typed(f"the loss of {dtype} hidden is {wide}", losses, wide, (7,), hidden)
        probs = rounded.log_prob(hidden).exp()
        exact = rounded.double()
        tolerance = HALF_TOLERANCE if torch.finfo(dtype).eps > 1e-6 else 1e-4
        expected = suite.loss(exact, hidden.double(), target)
        suite.close(f"the loss in {dtype} agrees with float64", losses, expected, tolerance, hidden)
        rule = f"the probabilities in {dtype} agree with float64"
        suite.close(rule, probs, exact.log_prob(hidden.double()).exp(), tolerance, hidden)


def nothing_is_left_to_chance_in_eval(suite: HeadSuite) -> None:
    head, hidden, target = suite.head().eval(), suite.hidden(5), suite.targets(5)
    k = min(3, suite.n_classes)
    for name, call in {
        "the loss": lambda: head(hidden, target),
        "log_prob": lambda: head.log_prob(hidden),
        "topk": lambda: head.topk(hidden, k).values,
    }.items():
        suite.close(f"{name} is the same each time in eval mode", call(), call(), 0.0, hidden)


def a_pass_without_gradients_changes_nothing(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(), suite.hidden(5), suite.targets(5)
    rule = "a forward pass under no_grad"
    before = {name: each.clone() for name, each in head.named_buffers()}

    def chance() -> Tensor:
        cuda = suite.device.type == "cuda"
        return torch.cuda.get_rng_state(suite.device) if cuda else torch.random.get_rng_state()

    state = chance()
    with torch.no_grad():
        suite.runs(rule, hidden, head, hidden, target)
    suite.close(f"{rule} does not draw from torch's generator", chance(), state, 0.0)
    for name, each in head.named_buffers():
        suite.close(f"{rule} does not change {name}", each, before[name], 0.0)


def other_reductions_are_refused(suite: HeadSuite) -> None:
    head = suite.head(reduction="avg")
    suite.refused("reduction", "reduction='avg'", head, suite.hidden(2), suite.targets(2))


def every_parameter_gets_a_gradient(suite: HeadSuite) -> None:
    head = suite.head()
    # All classes if possible, since a parameter may belong to some classes only.
    target = torch.cat([suite.targets(32), suite.all_targets()[:MOST_TARGETS]])
    hidden = suite.hidden(len(target)).requires_grad_()
    for name, grad in suite.gradients(head, suite.loss(head, hidden, target), hidden).items():
        rule = f"{name} gets a gradient"
        suite.require(rule, bool((grad != 0).any()), "it is 0 everywhere", hidden)
        suite.require(rule, grad.isfinite().all(), "it is not finite", hidden)


def the_gradient_is_right(suite: HeadSuite) -> None:
    hidden, target, upstream = suite.hidden(6), suite.targets(6), suite.normal(6)
    for reduction in ("mean", "none"):
        head = suite.head(torch.float64, reduction)

        def value(head: Any = head) -> Tensor:
            return (suite.loss(head, hidden, target) * upstream).sum()

        rule = f"the gradient of the loss, reduction={reduction!r}"
        _compare_slopes(suite, rule, value, head, hidden)


def the_gradient_of_log_prob_is_right(suite: HeadSuite) -> None:
    head, hidden = suite.head(torch.float64), suite.hidden(4)
    for name, value in suite.values(head, hidden, suite.targets(4)).items():
        if name != "the loss":

            def total(value: Callable[[], Tensor] = value) -> Tensor:
                return value().sum()

            _compare_slopes(suite, f"the gradient of {name}", total, head, hidden)


def backward_can_be_repeated(suite: HeadSuite) -> None:
    target = suite.targets(5)
    for reduction in REDUCTIONS:
        head, hidden = suite.head(reduction=reduction), suite.hidden(5).requires_grad_()
        for name, make in suite.values(head, hidden, target).items():
            value = make()
            upstream = suite.normal(*value.shape, dtype=value.dtype)
            slopes = partial(suite.gradients, head, value, hidden)
            # Copied, since a later backward may scale gradients in place.
            first = {of: each.clone() for of, each in slopes(upstream, retain_graph=True).items()}
            rule = f"backward of {name} with retain_graph=True, reduction={reduction!r}"
            again = suite.runs(rule, hidden, partial(slopes, upstream, retain_graph=True))
            suite.same_gradients(f"{rule}, a second time", again, first, hidden)
            double = {of: 2 * gradient for of, gradient in first.items()}
            rule = f"{rule}, a third time with twice the upstream gradient"
            suite.same_gradients(rule, slopes(2 * upstream), double, hidden)


def changes_before_backward_are_noticed(suite: HeadSuite) -> None:
    """As in torch: an error, or the gradients at the parameters of the forward pass."""
    target, given = suite.targets(4), suite.hidden(4)
    for changed in suite.leaves(suite.head(), given):
        head, hidden = suite.head(), given.clone().requires_grad_()
        for name, make in suite.values(head, hidden, target).items():
            expected = suite.gradients(head, make(), hidden)
            value = make()
            leaf = suite.leaves(head, hidden)[changed]
            with torch.no_grad():
                before = leaf.clone()
                leaf.add_(suite.normal(*leaf.shape, dtype=leaf.dtype))
            try:
                found = suite.gradients(head, value, hidden)
            except RuntimeError:
                found = expected
            with torch.no_grad():
                leaf.copy_(before)
            rule = f"{changed} is changed in place between {name} and backward: no error, and"
            suite.same_gradients(rule, found, expected, hidden)


def a_checkpoint_changes_nothing(suite: HeadSuite) -> None:
    target = suite.targets(5)
    head, hidden = suite.head(), suite.hidden(5).requires_grad_()
    best = head.topk(hidden, 1).classes
    for name, inputs in {
        "forward": (target,),
        "log_prob": (),
        "log_prob of classes": (best,),
    }.items():
        rule = f"{name} inside torch.utils.checkpoint(use_reentrant=False)"
        results = []
        for way in (lambda call, *given: call(*given), partial(checkpoint, use_reentrant=False)):
            copied = copy.deepcopy(head)
            call = copied if name == "forward" else copied.log_prob
            with suite.same_chance():
                value = suite.runs(rule, hidden, way, call, hidden, *inputs)
            upstream = torch.where(value > -math.inf, 1.0, 0.0).to(value.dtype)
            slopes = suite.runs(rule, hidden, suite.gradients, copied, value, hidden, upstream)
            results.append((value, slopes))
        (plain, expected), (value, slopes) = results
        suite.close(rule, value, plain, suite.same, hidden)
        suite.same_gradients(rule, slopes, expected, hidden)


def transforms_give_the_same_gradients(suite: HeadSuite) -> None:
    head, target = suite.head(), suite.targets(4)
    hidden = suite.hidden(4).requires_grad_()
    loss = suite.loss(head, hidden, target)
    expected = suite.gradients(head, loss, hidden)

    def transformed(leaves: dict[str, Tensor]) -> Tensor:
        hidden, parameters = leaves["hidden"], {n: leaves[n] for n in leaves if n != "hidden"}
        made: Tensor = torch.func.functional_call(head, parameters, (hidden, target))
        return made

    rule = "torch.func.grad of functional_call gives the gradients of backward"
    leaves = {name: each.detach() for name, each in suite.leaves(head, hidden).items()}
    with suite.same_chance():
        found, value = suite.runs(rule, hidden, torch.func.grad_and_value(transformed), leaves)
    suite.close(rule, value, loss, suite.same, hidden)
    suite.same_gradients(rule, {n: each.to_dense() for n, each in found.items()}, expected, hidden)


def storages_stay_resizable(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4).requires_grad_()
    suite.loss(head, hidden, suite.targets(4)).backward()
    for _, call in suite.calls(head).values():
        call(hidden)
    for name, each in suite.leaves(head, hidden).items():
        rule = "storages stay resizable, as FSDP2 needs them; Tensor.numpy() forbids it for good"
        suite.require(rule, each.untyped_storage().resizable(), f"{name} is not", hidden)


def a_distributed_head_gives_the_same(suite: HeadSuite) -> None:
    if suite.device.type != "cpu" or not dist.is_available() or not dist.is_gloo_available():
        return
    # FSDP2 and DDP do not support row-sparse gradients.
    if dist.is_initialized() or getattr(suite.given, "sparse", False):
        return
    with warnings.catch_warnings():
        # Warnings of torch's own code.
        warnings.simplefilter("ignore")
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            _compare_distributed(suite)
        finally:
            dist.destroy_process_group()


def _compare_distributed(suite: HeadSuite) -> None:
    """Compare a head with itself inside DDP and inside FSDP2, each with one process."""
    # Imported here: not every build of torch has these.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    head, target, hidden = suite.head(), suite.targets(4), suite.hidden(4).requires_grad_()
    loss = suite.loss(head, hidden, target)
    expected = suite.gradients(head, loss, hidden)
    log_prob = head.log_prob(hidden)

    def ddp(head: Any) -> Any:
        prepare_ddp(head)
        return torch.nn.parallel.DistributedDataParallel(head)

    def fsdp(head: Any) -> Any:
        return fully_shard(head, mesh=init_device_mesh("cpu", (1,)))

    for way, wrap in {"DistributedDataParallel": ddp, "fully_shard": fsdp}.items():
        rule, own = f"a head inside {way} gives the same", copy.deepcopy(head)
        leaf = hidden.detach().requires_grad_()

        def step(own: Any = own, leaf: Tensor = leaf, wrap: Any = wrap) -> Tensor:
            with suite.same_chance():
                made: Tensor = wrap(own)(leaf, target)
            made.backward()
            return made

        made = suite.runs(rule, hidden, step)
        suite.close(rule, made, loss, suite.same, hidden)
        found: dict[str, Any] = {name: each.grad for name, each in suite.leaves(own, leaf).items()}
        for name, each in found.items():
            whole = each.full_tensor() if hasattr(each, "full_tensor") else each
            found[name] = torch.zeros_like(expected[name]) if whole is None else whole.to_dense()
        suite.same_gradients(rule, found, expected, hidden)
        if isinstance(own, Head):
            # These methods use the full parameters, too.
            again = suite.runs(rule, hidden, own.log_prob, hidden)
            suite.close(f"{rule}: log_prob", again, log_prob, suite.same, hidden)


def a_state_dict_is_all_it_takes(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4)
    other = _changed(suite, head)
    rule = "a head with the state_dict of another gives the same"
    keys = suite.runs(rule, hidden, other.load_state_dict, head.state_dict())
    suite.require(rule, not keys.missing_keys, f"without {keys.missing_keys}", hidden)
    suite.close(rule, other.log_prob(hidden), head.log_prob(hidden), 0.0, hidden)


def a_config_makes_the_same_head(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(), suite.hidden(4), suite.targets(4)
    rule, config = "cls(**head.config()) gives the same head", head.config()
    torch.default_generator.manual_seed(suite.seed + 1)  # other initial parameters
    other = suite.runs(rule, None, lambda: type(head)(**config))
    again = other.config()
    suite.require(rule, _equal(again, config), f"its config is {again}, and was {config}")
    other = other.to(suite.device, suite.finest).train()
    suite.runs(rule, hidden, other.load_state_dict, head.state_dict())
    suite.close(rule, other.log_prob(hidden), head.log_prob(hidden), 0.0, hidden)
    loss = suite.loss(head, hidden, target)
    suite.close(f"{rule}: loss", suite.loss(other, hidden, target), loss, 0.0, hidden)


def a_head_that_was_on_meta_is_whole_once_loaded(suite: HeadSuite) -> None:
    head = suite.head()
    _compare_loaded(suite, "moved to the meta device", head, lambda: copy.deepcopy(head).to("meta"))


def a_head_made_on_meta_is_whole_once_loaded(suite: HeadSuite) -> None:
    head = suite.head()

    def made() -> Any:
        config = copy.deepcopy(head.config())
        with torch.device("meta"):
            return type(head)(**config).to(suite.finest).train()

    _compare_loaded(suite, "constructed on the meta device", head, made)


def a_copy_stands_alone(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4)
    before = head.log_prob(hidden).detach().clone()
    same = copy.deepcopy(head).log_prob(hidden)
    suite.close("a deepcopy gives the same", same, before, 0.0, hidden)
    _changed(suite, head)
    suite.close("a deepcopy shares nothing", head.log_prob(hidden), before, 0.0, hidden)


def saving_and_loading_change_nothing(suite: HeadSuite) -> None:
    for dtype in {suite.finest, suite.dtypes[0]}:
        head, hidden = suite.head(dtype), suite.hidden(4, dtype=dtype)
        rule = "load gives the head that was saved"
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "head"
            suite.runs(rule, hidden, head.save, place)
            loaded = suite.runs(rule, hidden, type(head).load, place)
        suite.require(rule, type(loaded) is type(head), f"got {type(loaded).__name__}", hidden)
        loaded = loaded.to(suite.device)
        suite.require(rule, repr(loaded) == repr(head), f"got {loaded!r}", hidden)
        # Not bitwise equal: rounding of a product may depend on the alignment of its operands.
        suite.close(rule, loaded.log_prob(hidden), head.log_prob(hidden), suite.same, hidden)


def autocast_works(suite: HeadSuite) -> None:
    rule = "autocast to bfloat16"
    head, target = suite.head(torch.float32), suite.targets(5)
    hidden = suite.hidden(5, dtype=torch.float32).requires_grad_()
    plain = suite.loss(head, hidden, target)
    expected = suite.gradients(head, plain, hidden)

    def run() -> tuple[Tensor, dict[str, Tensor], Tensor]:
        with torch.autocast(suite.device.type, dtype=torch.bfloat16):
            loss, probs = suite.loss(head, hidden, target), head.log_prob(hidden).exp()
        return loss, suite.gradients(head, loss, hidden), probs

    loss, made, probs = suite.runs(rule, hidden, run)
    for name, each in {"the loss": loss, "log_prob": probs, **made}.items():
        got = f"got {each.dtype}"
        suite.require(f"{rule}: {name} is float32", each.dtype == torch.float32, got, hidden)
    suite.close(rule, loss, plain, 5e-2, hidden)
    for name, grad in made.items():
        # Compared by norm: rounded scores may change the support of a sparse head.
        error, norm = float((grad - expected[name]).norm()), float(expected[name].norm())
        away = f"its error is {error:g}, its norm {norm:g}"
        suite.require(f"{rule}: the gradient of {name}", error <= 0.4 * norm, away, hidden)


def compiling_changes_nothing(suite: HeadSuite) -> None:
    head, target = suite.head(), suite.targets(5)
    hidden = suite.hidden(5).requires_grad_()

    def evaluate(module: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = suite.loss(module, hidden, target)
        return loss, suite.gradients(head, loss, hidden)

    rule, compiled = suite.compiles(head, evaluate, hidden, suite.same)
    if suite.device.type != "cpu":
        return
    outside = target.clone()
    # Far enough out of range to cause a segmentation fault if it is not checked.
    outside[-1] = suite.n_classes + 2**40
    try:
        suite.loss(compiled, hidden, outside)
    except Exception:  # noqa: BLE001  # whatever a head raises
        return
    raise suite.failure(f"{rule}: a target out of range is refused", "nothing was raised")


class _Method(torch.nn.Module):
    """A method of a head as a module that can be exported."""

    def __init__(self, head: Any, k: int) -> None:
        super().__init__()
        self.head, self.k = head, k

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.k:
            return tuple(self.head.topk(hidden, self.k))
        made: Tensor = self.head.log_prob(hidden)
        return made


def exporting_changes_nothing(suite: HeadSuite) -> None:
    head = suite.head().eval()
    rows = {0: torch.export.Dim("rows", min=1, max=1024)}
    for name, k in (("log_prob", 0), ("topk", min(3, suite.n_classes))):
        module, given = _Method(head, k), suite.hidden(5)
        rule = f"torch.export of {name} with any number of rows"
        with torch.no_grad():
            export = partial(torch.export.export, dynamic_shapes=(rows,))
            program = suite.runs(rule, given, export, module, (given,)).module()
            for n in (1, 9):
                hidden = suite.hidden(n)
                made = suite.runs(f"{rule}, of {n}", hidden, program, hidden)
                expected = module(hidden)
                made, expected = ((each,) if not k else each for each in (made, expected))
                for one, other in zip(made, expected, strict=True):
                    suite.close(rule, one, other, 10 * suite.same, hidden)


def hidden_classes_and_k_are_checked(suite: HeadSuite) -> None:
    head, hidden, n = suite.head(), suite.hidden(2, 3), suite.n_classes
    calls = {name: call for name, (_, call) in suite.calls(head).items() if " " not in name}
    calls["forward"] = lambda given: head(given, suite.targets(2, 3))
    inputs = {
        "of another width": torch.cat([hidden, hidden[..., :1]], -1),
        "of integers": hidden.long(),
        "that is no tensor": hidden.tolist(),
    }
    for name, call in calls.items():
        for what, given in inputs.items():
            suite.refused("hidden", f"hidden {what} ({name})", call, given)
    one = suite.integers(n, 2, 3)
    for what, classes in {
        f"a class of {n}": torch.full_like(one, n),
        "a class of -1": torch.full_like(one, -1),
        "classes of another batch": one.new_zeros(3, 2, 1),
        "a list that is not expanded to the batch": one.new_zeros(4),
        "floating classes": one.double(),
        "bool classes": one > 0,
    }.items():
        suite.refused("classes", what, head.log_prob, hidden, classes)
    for k in (0, -1, n + 1, 1.0, True):
        suite.refused("k", f"k={k}", head.topk, hidden, k)


def _compare_loaded(suite: HeadSuite, how: str, head: Any, made: Callable[[], Any]) -> None:
    """Compare a head with meta heads that get its state, in all ways of loading a state."""
    hidden, target = suite.hidden(4).requires_grad_(), suite.targets(4)
    log_prob, loss = head.log_prob(hidden), suite.loss(head, hidden, target)
    slopes = suite.gradients(head, loss, hidden)

    def emptied(other: Any, state: dict[str, Tensor]) -> None:
        # Like to_empty, but the memory certainly contains wrong values.
        other._apply(lambda each: _nonsense(each, suite.device))
        other.load_state_dict(state)

    def assigned(other: Any, state: dict[str, Tensor]) -> None:
        other.load_state_dict(state, assign=True)

    def set_one_by_one(other: Any, state: dict[str, Tensor]) -> None:
        # Like loaders of other libraries, which allocate buffers that were not saved.
        for module in other.modules():
            for name in module._non_persistent_buffers_set & module._buffers.keys():
                if module._buffers[name] is not None:
                    setattr(module, name, _nonsense(module._buffers[name], suite.device))
        for path, value in state.items():
            module_path, _, name = path.rpartition(".")
            module = other.get_submodule(module_path)
            known = module._parameters.get(name)
            is_learned = known is not None
            setattr(module, name, torch.nn.Parameter(value) if is_learned else value)

    for way, load in {
        "to_empty and load_state_dict": emptied,
        "load_state_dict(assign=True)": assigned,
        "setting each tensor": set_one_by_one,
    }.items():
        rule = f"a head {how}, then {way}, gives the same"
        other = suite.runs(rule, hidden, made)
        suite.runs(rule, hidden, load, other, copy.deepcopy(head.state_dict()))
        found = suite.runs(rule, hidden, other.log_prob, hidden)
        suite.close(rule, found, log_prob, suite.same, hidden)
        again = suite.runs(rule, hidden, suite.loss, other, hidden, target)
        suite.close(f"{rule}: loss", again, loss, suite.same, hidden)
        suite.same_gradients(rule, suite.gradients(other, again, hidden), slopes, hidden)


def _nonsense(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype, with values that no table or parameter has."""
    value = math.nan if tensor.is_floating_point() else min(2**30, _most(tensor.dtype))
    made = torch.full_like(tensor, value, device=device)
    return torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made


def _most(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _integers_up_to(n_classes: int, least: int = 0) -> list[torch.dtype]:
    """The integer dtypes that can represent all class ids and ``least``."""
    limits = {dtype: torch.iinfo(dtype) for dtype in INTEGERS}
    return [each for each, of in limits.items() if of.min <= least and n_classes <= of.max]


def _changed(suite: HeadSuite, head: Any) -> Any:
    """A copy with different parameters."""
    other = copy.deepcopy(head)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(suite.normal(*parameter.shape, dtype=parameter.dtype))
    return other


def _equal(one: Any, other: Any) -> bool:
    """Whether two configs are equal; modules and trees are compared by their ``repr``."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one is other or repr(one) == repr(other))


def _compare_slopes(
    suite: HeadSuite, rule: str, value: Callable[[], Tensor], head: Any, hidden: Tensor
) -> None:
    """Compare gradients with finite differences, along one random direction per tensor."""
    hidden.requires_grad_()
    made = suite.gradients(head, value(), hidden)
    for name, leaf in suite.leaves(head, hidden).items():
        direction = suite.normal(*leaf.shape)
        direction /= direction.norm()
        expected = (made[name] * direction).sum()
        ends = []
        with torch.no_grad():
            before = leaf.detach().clone()
            for step in (STEP, -STEP):
                leaf.copy_(before + step * direction)
                ends.append(value())
            leaf.copy_(before)
        slope = (ends[0] - ends[1]) / (2 * STEP)
        tolerance = SLOPE_TOLERANCE * max(1.0, float(made[name].norm()))
        suite.close(f"{rule} by {name}: against differences", expected, slope, tolerance, hidden)


# Rules for all heads, in the order in which a failure is most informative.
FORM = it_says_what_it_is, log_prob_has_the_promised_form
CHOICES = chosen_classes_are_the_gathered_ones, topk_is_a_sort
BATCHES = (
    reductions_agree,
    targets_may_have_any_integer_dtype,
    batch_dimensions_do_not_matter,
    an_empty_batch_works,
)


_SAVING = (
    a_config_makes_the_same_head,
    a_head_made_on_meta_is_whole_once_loaded,
    saving_and_loading_change_nothing,
)


def others(
    *,
    gradients: bool,
    log_prob_gradients: bool,
    checkpoint: bool,
    save: bool,
    compiles: bool,
    transforms: bool,
    distributed: bool,
) -> list[Callable[[Any], None]]:
    """The other rules of this module, except autocast, as selected by the arguments."""
    return [
        a_nan_stays_in_its_row,
        a_masked_row_has_log_prob_minus_infinity,
        half_precision_keeps_to_float64,
        nothing_is_left_to_chance_in_eval,
        a_pass_without_gradients_changes_nothing,
        every_parameter_gets_a_gradient,
        *([the_gradient_is_right] if gradients else []),
        *([the_gradient_of_log_prob_is_right] if log_prob_gradients else []),
        backward_can_be_repeated,
        changes_before_backward_are_noticed,
        *([a_checkpoint_changes_nothing] if checkpoint else []),
        a_state_dict_is_all_it_takes,
        a_head_that_was_on_meta_is_whole_once_loaded,
        a_copy_stands_alone,
        storages_stay_resizable,
        *([transforms_give_the_same_gradients] if transforms else []),
        *([a_distributed_head_gives_the_same] if distributed else []),
        *(_SAVING if save else ()),
        hidden_classes_and_k_are_checked,
        other_reductions_are_refused,
        *([compiling_changes_nothing, exporting_changes_nothing] if compiles else []),
    ]
