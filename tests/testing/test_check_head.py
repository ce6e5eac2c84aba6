"""check_head catches what it is there to catch, and says it well."""

import math
import re
from functools import partial

import pytest
import torch
from torch.nn import functional

from lastlayer.heads import EntmaxHead, FullSoftmax, Head, TopK, TopKSoftmaxHead
from lastlayer.testing import check_head

quick = partial(check_head, compile=False, dtypes=(torch.float32, torch.float64))


class Minimal(Head):
    """What a head has to define, on a matrix of scores."""

    def __init__(self, in_features=6, n_classes=17, **options):
        super().__init__(in_features, n_classes, **options)
        linear = torch.nn.Linear(in_features, n_classes)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, hidden, target):
        self._check_hidden(hidden)
        target = self._check_target(hidden, target)
        counted = target != self.ignore_index
        rows = torch.where(counted.unsqueeze(-1), hidden, 0.0)
        chosen = torch.where(counted, target, 0).unsqueeze(-1)
        losses = -self.log_probs(rows).gather(-1, chosen).squeeze(-1)
        losses = torch.where(counted, losses, 0.0)
        if self.reduction == "none":
            return losses
        return losses.sum() / (counted.sum().clamp(min=1) if self.reduction == "mean" else 1)

    def log_prob(self, hidden, classes=None):
        self._check_hidden(hidden)
        log_prob = self.log_probs(hidden)
        if classes is None:
            return log_prob
        chosen, shape = self._check_classes(hidden, classes)
        return log_prob.reshape(-1, self.n_classes).gather(-1, chosen).reshape(shape)

    def log_probs(self, hidden):
        scores = functional.linear(hidden, self.weight, self.bias).to(_wide(hidden))
        masked = (scores == -math.inf).all(-1, keepdim=True)
        return torch.where(masked, -math.inf, torch.log_softmax(scores, -1))


def _wide(hidden):
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def test_a_head_that_defines_two_functions_has_the_rest(seed):
    check_head(Minimal, seed=seed)
    check_head(Minimal(ignore_index=3), compile=False, seed=seed)


class Unnormalised(Minimal):
    def log_prob(self, hidden, classes=None):
        return super().log_prob(hidden, classes) + 0.01


class NormalisedOverTheChosen(Minimal):
    def log_prob(self, hidden, classes=None):
        log_prob = super().log_prob(hidden, classes)
        return log_prob if classes is None else torch.log_softmax(log_prob, -1)


class SharedClassesAlone(Minimal):
    """Takes the classes of the first row for every row."""

    def log_prob(self, hidden, classes=None):
        if classes is not None and classes.dim() == hidden.dim() > 1 and hidden.numel():
            classes = classes.flatten(0, -2)[0].expand_as(classes)
        return super().log_prob(hidden, classes)


class HalfLogProb(Minimal):
    def log_prob(self, hidden, classes=None):
        return super().log_prob(hidden, classes).bfloat16()


class TopOfTheFirstHalf(Minimal):
    """As an approximate search would: it misses some of the best."""

    def topk(self, hidden, k):
        best = super().topk(hidden, min(2 * k, self.n_classes))
        keep = [*range(1, k), best.values.shape[-1] - 1]
        return TopK(best.values[..., keep], best.classes[..., keep])


class TopProbabilities(Minimal):
    def topk(self, hidden, k):
        best = super().topk(hidden, k)
        return best._replace(values=best.values.exp())


class TopOfOtherClasses(Minimal):
    def topk(self, hidden, k):
        best = super().topk(hidden, k)
        return best._replace(classes=(best.classes + 1) % self.n_classes)


class TopUnsorted(Minimal):
    def topk(self, hidden, k):
        best = super().topk(hidden, k)
        return TopK(best.values.flip(-1), best.classes.flip(-1))


class BiasedSampler(Minimal):
    def sample(self, hidden, n_samples=1, *, generator=None):
        log_prob = torch.log_softmax(self.log_prob(hidden) / 1.15, -1)
        flat = log_prob.exp().flatten(0, -2)
        drawn = torch.multinomial(flat, n_samples, True, generator=generator)
        return drawn.reshape(*hidden.shape[:-1], n_samples)


class SameChanceForEachRow(Minimal):
    def sample(self, hidden, n_samples=1, *, generator=None):
        chance = torch.rand(n_samples, dtype=hidden.dtype, generator=generator)
        reached = self.log_prob(hidden).exp().cumsum(-1)
        chance = chance.expand(*hidden.shape[:-1], n_samples).contiguous()
        return torch.searchsorted(reached, chance).clamp(max=self.n_classes - 1)


class DeafToTheGenerator(Minimal):
    def sample(self, hidden, n_samples=1, *, generator=None):
        return super().sample(hidden, n_samples)


class OutsideTheSupport(EntmaxHead):
    def sample(self, hidden, n_samples=1, *, generator=None):
        softmax = FullSoftmax.from_linear(self.to_linear())
        return softmax.sample(hidden, n_samples, generator=generator)


class CountsIgnoredRows(Minimal):
    def forward(self, hidden, target):
        super().forward(hidden, target)
        losses = -self.log_prob(hidden, target.clamp(min=0))
        if self.reduction == "none":
            return losses
        return losses.sum() / (max(1, losses.numel()) if self.reduction == "mean" else 1)


class MeanOverAllRows(Minimal):
    def forward(self, hidden, target):
        if self.reduction != "mean":
            return super().forward(hidden, target)
        self.reduction = "sum"
        total = super().forward(hidden, target)
        self.reduction = "mean"
        return total / max(1, target.numel())


class NanOfIgnoredRows(Minimal):
    """Multiplies ignored rows by 0, which a NaN survives."""

    def forward(self, hidden, target):
        ignored = (target == self.ignore_index).unsqueeze(-1)
        return super().forward(hidden, target) + (hidden * ignored).sum() * 0


class NanWhereAllIsIgnored(Minimal):
    def forward(self, hidden, target):
        loss = super().forward(hidden, target)
        everything = target.numel() and (target == self.ignore_index).all()
        return loss / 0 if everything and self.reduction == "mean" else loss


class SumsAlways(Minimal):
    def forward(self, hidden, target):
        loss = super().forward(hidden, target)
        return loss.sum() if self.reduction == "none" else loss


class FlatOnly(Minimal):
    def forward(self, hidden, target):
        if hidden.dim() != 2:
            raise RuntimeError("expected a matrix")
        return super().forward(hidden, target)


class WithoutEmptyBatches(Minimal):
    def log_prob(self, hidden, classes=None):
        return super().log_prob(hidden - 0 * hidden.amax(), classes)


class NanEverywhere(Minimal):
    def forward(self, hidden, target):
        return super().forward(hidden, target) + 0 * hidden[target != self.ignore_index].sum()


class NanUnseen(Minimal):
    def forward(self, hidden, target):
        return super().forward(hidden.nan_to_num(), target)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class WrongGradient(Minimal):
    def forward(self, hidden, target):
        return HalfGradient.apply(super().forward(hidden, target))


class WrongGradientOfLogProb(Minimal):
    def log_prob(self, hidden, classes=None):
        return HalfGradient.apply(super().log_prob(hidden, classes))


class UnusedParameter(Minimal):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.temperature = torch.nn.Parameter(torch.ones(1))


class Forgetful(Minimal):
    """An argument that its config does not have."""

    def __init__(self, *args, shift=0.0, **options):
        super().__init__(*args, **options)
        self.kept_shift = shift

    def log_prob(self, hidden, classes=None):
        return super().log_prob(hidden + self.kept_shift, classes)


class UnsavedTable(Minimal):
    """A table that is neither saved nor made again."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("table", torch.arange(self.n_classes), persistent=False)

    def log_prob(self, hidden, classes=None):
        made = super().log_prob(hidden, classes)
        return made.index_select(-1, self.table) if classes is None else made


class OutsideItsState(Minimal):
    """A tensor that no state_dict has."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.places = [torch.randn(self.in_features)]

    def log_prob(self, hidden, classes=None):
        return super().log_prob(hidden + self.places[0].to(hidden), classes)


class Shared(Minimal):
    """Its copies have the same memory."""

    def __deepcopy__(self, memo):
        other = Shared(self.in_features, self.n_classes).to(self.weight.dtype)
        other.weight.data, other.bias.data = self.weight.data, self.bias.data
        return other


class NoisyInEval(Minimal):
    def forward(self, hidden, target):
        return super().forward(hidden + 0.01 * torch.randn(()), target)


class HalfLossUnderAutocast(Minimal):
    def forward(self, hidden, target):
        loss = super().forward(hidden, target)
        return loss.bfloat16() if torch.is_autocast_enabled("cpu") else loss


class Unchecked(Minimal):
    def topk(self, hidden, k):
        if isinstance(k, int) and 1 <= k <= self.n_classes and not isinstance(k, bool):
            return super().topk(hidden, k)
        raise RuntimeError("selected index k out of range")


class Vague(Minimal):
    def forward(self, hidden, target):
        try:
            return super().forward(hidden, target)
        except (TypeError, ValueError) as error:
            if str(error).startswith("target"):
                raise ValueError("bad target") from error
            raise


class Silent(Minimal):
    def extra_repr(self):
        return ""


class OneListForAllRows(Minimal):
    """A list of classes need not be expanded."""

    def log_prob(self, hidden, classes=None):
        if isinstance(classes, torch.Tensor) and hidden.dim() > 2 and classes.dim() == 1:
            classes = classes.expand(*hidden.shape[:-1], -1)
        return super().log_prob(hidden, classes)


class LongTargetsAlone(Minimal):
    def forward(self, hidden, target):
        if target.dtype != torch.int64:
            raise TypeError(f"target: expected torch.int64, got {target.dtype}")
        return super().forward(hidden, target)


class LongClassesAlone(Minimal):
    def log_prob(self, hidden, classes=None):
        if isinstance(classes, torch.Tensor) and classes.dtype != torch.int64:
            raise TypeError(f"classes: expected torch.int64, got {classes.dtype}")
        return super().log_prob(hidden, classes)


class MaskedRowsAreNan(Minimal):
    def log_probs(self, hidden):
        scores = functional.linear(hidden, self.weight, self.bias).to(_wide(hidden))
        return torch.log_softmax(scores, -1)


class MadeInForward(torch.autograd.Function):
    """The gradient by hidden is made in forward and scaled in backward, in place."""

    @staticmethod
    def forward(ctx, loss, hidden, gradient):
        ctx.gradient = gradient
        return loss.detach().clone()

    @staticmethod
    def backward(ctx, upstream):
        return None, ctx.gradient.mul_(upstream), None


class ScalesInPlace(Minimal):
    def forward(self, hidden, target):
        loss = super().forward(hidden, target)
        if not (hidden.requires_grad and loss.requires_grad and loss.dim() == 0):
            return loss
        (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        rest = super().forward(hidden.detach(), target)
        return rest + MadeInForward.apply(0 * loss, hidden, gradient)


class OneBackward(Minimal):
    def forward(self, hidden, target):
        loss, seen = super().forward(hidden, target), []
        if loss.requires_grad:
            loss.register_hook(lambda grad: seen.append(grad) or self.check(seen))
        return loss

    def check(self, seen):
        if len(seen) > 1:
            raise RuntimeError("backward through the graph a second time")


class RecomputedScores(torch.autograd.Function):
    """Keeps the head, not its parameters, and computes everything again in backward."""

    @staticmethod
    def forward(ctx, head, hidden, *parameters):
        ctx.head = head
        ctx.save_for_backward(hidden)
        return head.plain_log_probs(hidden)

    @staticmethod
    def backward(ctx, upstream):
        (hidden,) = ctx.saved_tensors
        leaves = [
            each.detach().requires_grad_() for each in (hidden, ctx.head.weight, ctx.head.bias)
        ]
        with torch.enable_grad():
            scores = functional.linear(*leaves).to(upstream.dtype)
            made = torch.autograd.grad(torch.log_softmax(scores, -1), leaves, upstream)
        return None, *made


class RecomputesFromTheHead(Minimal):
    plain_log_probs = Minimal.log_probs

    def log_probs(self, hidden):
        return RecomputedScores.apply(self, hidden, self.weight, self.bias)


class UnpacksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] / 2).exp() * (ctx.saved_tensors[0] / 2).exp()


class UnpacksItsTensorsTwice(Minimal):
    def forward(self, hidden, target):
        return super().forward(hidden, target).neg().mul(0.5) * -2 + (
            UnpacksTwice.apply(hidden.clamp(-50, 0)).sum() * 0 if hidden.requires_grad else 0
        )


class DrawsWithoutGradients(Minimal):
    def forward(self, hidden, target):
        torch.rand(())
        return super().forward(hidden, target)


class StepsWithoutGradients(Minimal):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("rng_counter", torch.tensor(0))

    def forward(self, hidden, target):
        self.rng_counter += 1
        return super().forward(hidden, target)


class AnyReduction(Minimal):
    def forward(self, hidden, target):
        before = self.reduction
        self.reduction = before if before in ("none", "sum") else "mean"
        try:
            return super().forward(hidden, target)
        finally:
            self.reduction = before


class WithoutResizableStorages(Minimal):
    def log_prob(self, hidden, classes=None):
        self.weight.detach().numpy()
        return super().log_prob(hidden, classes)


class _OldStyle(torch.autograd.Function):
    """Without setup_context."""

    @staticmethod
    def forward(ctx, losses):
        return losses.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class NotForTransforms(Minimal):
    def forward(self, hidden, target):
        return _OldStyle.apply(super().forward(hidden, target))


class OnlyByItsOwnName(Minimal):
    """FSDP2 makes another class of it."""

    def log_probs(self, hidden):
        if type(self).__name__ != "OnlyByItsOwnName":
            raise RuntimeError("another class")
        return super().log_probs(hidden)


BROKEN = {
    Unnormalised: "probabilities sum to 1, scale 0.01: expected 1 within",
    NormalisedOverTheChosen: "log_prob(hidden, classes) is log_prob(hidden) at these classes",
    SharedClassesAlone: "log_prob(hidden, classes) is log_prob(hidden) at these classes",
    HalfLogProb: "log_prob of torch.float32 hidden is torch.float32",
    TopOfTheFirstHalf: "topk(hidden, 1) has the values of a sort of log_prob",
    TopProbabilities: "has the values of a sort of log_prob",
    TopOfOtherClasses: "topk(hidden, 1) has the classes of its values",
    TopUnsorted: "topk(hidden, 5) has the values of a sort of log_prob",
    BiasedSampler: "draws follow the probabilities of their row",
    SameChanceForEachRow: "rows draw independently",
    DeafToTheGenerator: "a generator with the same seed gives the same draws",
    CountsIgnoredRows: "an ignored row has loss 0",
    MeanOverAllRows: "the mean is over the rows that are not ignored",
    NanOfIgnoredRows: "an ignored row has loss 0, even if hidden is NaN",
    NanWhereAllIsIgnored: "reduction='mean' is 0 if all rows are ignored",
    SumsAlways: "reduction='none' gives one loss per row",
    FlatOnly: "raised RuntimeError: expected a matrix",
    WithoutEmptyBatches: "log_prob of an empty batch (0,) is empty: raised",
    NanEverywhere: "a NaN makes the loss of its row NaN and no other",
    NanUnseen: "a NaN makes the loss of its row NaN and no other",
    WrongGradient: "the gradient of the loss, reduction='mean' by hidden: against differences",
    WrongGradientOfLogProb: "the gradient of log_prob(hidden, classes) by hidden",
    UnusedParameter: "temperature gets a gradient: it is 0 everywhere",
    Forgetful: "cls(**head.config()) gives the same head",
    OutsideItsState: "cls(**head.config()) gives the same head",
    UnsavedTable: "moved to the meta device, then to_empty and load_state_dict, gives the same",
    Shared: "a deepcopy shares nothing",
    NoisyInEval: "the loss is the same each time in eval mode",
    HalfLossUnderAutocast: "autocast to bfloat16: the loss is float32",
    Unchecked: "k=0: a ValueError or TypeError that names the argument: raised RuntimeError",
    Vague: "a target of 17: a ValueError or TypeError that names the argument: expected 'target:",
    Silent: "extra_repr has in_features",
    OneListForAllRows: "a list that is not expanded to the batch: a ValueError or TypeError",
    LongTargetsAlone: "targets of torch.uint8 give the results of int64: raised TypeError",
    LongClassesAlone: "at these classes, classes of torch.uint8: raised TypeError",
    MaskedRowsAreNan: "with every class masked log_prob is -inf",
    ScalesInPlace: "backward of the loss with retain_graph=True, reduction='mean', a second time",
    OneBackward: "backward of the loss with retain_graph=True, reduction='none': raised Runt",
    RecomputesFromTheHead: "weight is changed in place between the loss and backward: no error",
    UnpacksItsTensorsTwice: "forward inside torch.utils.checkpoint(use_reentrant=False): raised",
    DrawsWithoutGradients: "a forward pass under no_grad does not draw from torch's generator",
    StepsWithoutGradients: "a forward pass under no_grad does not change rng_counter",
    WithoutResizableStorages: "storages stay resizable, as FSDP2 needs them; Tensor.numpy() ",
    NotForTransforms: "torch.func.grad of functional_call gives the gradients of backward: raised",
    OnlyByItsOwnName: "a head inside fully_shard gives the same: raised RuntimeError: another",
    AnyReduction: "reduction='avg': a ValueError or TypeError that names the argument: nothing was",
}


@pytest.mark.parametrize("cls", BROKEN)
def test_a_broken_head_is_told_its_rule(cls, seed):
    head = cls(shift=0.5) if cls is Forgetful else cls()
    # These have another loss as well, which would be met first.
    nll = cls not in (Forgetful, OutsideItsState, NoisyInEval, SumsAlways)
    with pytest.raises(AssertionError, match=re.escape(BROKEN[cls])) as caught:
        quick(head, loss_is_nll=nll, seed=seed)
    assert f"repeat with: seed={seed}" in str(caught.value)


def test_draws_outside_the_support_are_told(seed):
    head = OutsideTheSupport(6, 17, 2.0)
    torch.nn.init.normal_(head.weight)
    with pytest.raises(AssertionError, match="a class of probability 0 is never drawn"):
        quick(head, loss_is_nll=False, seed=seed)


def test_a_loss_that_is_no_likelihood_is_told(seed):
    for head in (FullSoftmax(6, 17, label_smoothing=0.1), TopKSoftmaxHead(6, 17, 4)):
        with pytest.raises(AssertionError, match="the loss is minus log_prob of the target"):
            quick(head, seed=seed)


def test_a_program_for_one_number_of_rows_is_told(seed):
    class Specialised(Minimal):
        def log_prob(self, hidden, classes=None):
            if torch.compiler.is_exporting():
                assert int(hidden.shape[0])
            return super().log_prob(hidden, classes)

    with pytest.raises(AssertionError, match=r"torch.export of log_prob with any number of rows"):
        check_head(Specialised(), seed=seed)


def test_a_graph_break_is_told(seed):
    class Breaks(Minimal):
        def forward(self, hidden, target):
            torch._dynamo.graph_break()
            return super().forward(hidden, target)

    with pytest.raises(AssertionError, match=r"torch.compile\(fullgraph=True"):
        check_head(Breaks, dtypes=(torch.float32,), draws=100, seed=seed)


def test_the_head_is_left_alone():
    head = FullSoftmax(6, 17).eval()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    state = torch.random.get_rng_state()
    quick(head, draws=1000)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not head.training
    assert head.reduction == "mean"
    assert head.weight.grad is None
    for name, value in head.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_message_has_the_hidden_state_and_the_numbers():
    with pytest.raises(AssertionError) as caught:
        quick(Unnormalised(), seed=11)
    text = str(caught.value)
    assert re.search(r"expected 1 within 1e-05, got 1\.01\d* at \(\d,\)", text)
    assert re.search(r"hidden: float32 \(5, 6\), row \(\d,\) = \[-?\d", text)
    assert text.endswith("repeat with: seed=11")
