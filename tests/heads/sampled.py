"""What the tests of sampled heads share: chance that is gone through completely."""

import itertools

import torch

from lastlayer import samplers


class Scripted(samplers.Unigram):
    """Says the probabilities of a unigram, and draws what it is told."""

    def __init__(self, counts, ids):
        super().__init__(counts)
        self.ids = torch.tensor(ids)

    def _draw_both(self, n, _counter, _context):
        ids = self.ids[:n]
        return samplers.Sampled(ids, self.log_prob(ids))

    def _draw(self, n, _counter, _context):
        return self.ids[:n]


def every_draw(n_classes, n):
    """All that n draws from so many classes can be."""
    return (list(each) for each in itertools.product(range(n_classes), repeat=n))


def expected_gradient(head_class, logits, counts, target, n, **options):
    """The mean gradient of the scores over all draws, each as often as it is probable."""
    head = head_class(
        1, len(logits), Scripted(counts, [0] * n), n, bias=False, dtype=torch.float64, **options
    )
    with torch.no_grad():
        head.weight.copy_(logits[:, None])
    probs = head.sampler.log_prob(torch.arange(len(logits)), dtype=torch.float64).exp()
    total = torch.zeros_like(logits)
    for ids in every_draw(len(logits), n):
        head.sampler.ids = torch.tensor(ids)
        head.weight.grad = None
        head(torch.ones(1, 1, dtype=torch.float64), torch.tensor([target])).backward()
        total += probs[ids].prod() * head.weight.grad[:, 0]
    return total
