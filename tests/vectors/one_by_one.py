"""The truth: the same windows and draws, a loss for each window, and its gradient by autograd."""

import numpy as np
import torch
from torch.nn.functional import log_softmax, logsigmoid, softplus

from lastlayer import samplers, trees

MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
LAST_RATE = 0.004


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def windows(tokens, counts, window, subsample, seed, epoch):
    """Centre, the words around it, and its place, for each window of an epoch, sentence by
    sentence."""
    key = mix((seed + (2 * epoch + 1) * GOLDEN) & MASK)
    random = [mix((key + place * GOLDEN) & MASK) for place in range(len(tokens))]
    if subsample:
        whole = subsample * counts.sum() / np.maximum(counts, 1)
        chance = np.minimum(1, np.sqrt(whole) + whole)
    else:
        chance = np.ones(len(counts))
    sentences, sentence = [], []
    for place, token in enumerate([*tokens.tolist(), -1]):
        if token < 0:
            sentences.append(sentence)
            sentence = []
        elif (random[place] >> 32) < np.floor(chance[token] * 2**32):
            sentence.append(place)
    for sentence in sentences:
        for i, place in enumerate(sentence):
            reach = 1 + ((random[place] & 0xFFFFFFFF) * window >> 32)
            near = sentence[max(0, i - reach) : i][::-1] + sentence[i + 1 : i + 1 + reach]
            if near:
                yield int(tokens[place]), [int(tokens[j]) for j in near], place


class Draws:
    """Negatives one after the other, from an alias table."""

    def __init__(self, table, seed, epoch, group):
        self.table, self.bits = table.tolist(), len(table).bit_length() - 1
        key = mix((seed + (2 * epoch + 2) * GOLDEN) & MASK)
        self.state = mix((key + group * GOLDEN) & MASK)

    def __call__(self, n):
        drawn = []
        for _ in range(n):
            self.state = (self.state + GOLDEN) & MASK
            r = mix(self.state)
            column = r >> (64 - self.bits)
            entry = self.table[column]
            drawn.append(column if (r & 0xFFFFFFFF) < (entry & 0xFFFFFFFF) else entry >> 32)
        return drawn


def negative_loss(x, y, centre, drawn):
    others = [d for d in drawn if d != centre]
    return -logsigmoid(x @ y[centre]) - logsigmoid(-(y[others] @ x)).sum()


def softmax_loss(x, y, centre, drawn, log_q):
    others = [d for d in drawn if d != centre]
    scores = y[others] @ x - log_q[others] - np.log(max(1, len(others)))
    scores = scores + torch.log1p(-log_q[centre].exp())
    right = x @ y[centre]
    return torch.cat([scores, right[None]]).logsumexp(0) - right


def tree_loss(x, y, centre, tree):
    """Minus the logarithm of the sum of the probabilities of all paths."""
    sizes = np.where(tree.arity == 2, 1, tree.arity)
    first = np.concatenate([[0], np.cumsum(sizes)])
    logs = []
    for path in range(tree.class_start[centre], tree.class_start[centre + 1]):
        total = x.new_zeros(())
        for step in range(tree.path_start[path], tree.path_start[path + 1]):
            node, position = int(tree.path_node[step]), int(tree.path_position[step])
            scores = y[first[node] : first[node + 1]] @ x
            if len(scores) == 1:
                total = total - softplus((1 - 2 * position) * scores[0])
            else:
                total = total + log_softmax(scores, 0)[position]
        logs.append(total)
    return -torch.stack(logs).logsumexp(0)


def train(tokens, n_words, *, dim, window, model, objective, n_negatives=5, power=0.75, share=1,
          tree=None, subsample, epochs, lr, seed):  # fmt: skip
    counts = np.bincount(tokens[tokens >= 0], minlength=n_words)
    start = (np.random.default_rng(seed).random((n_words, dim)) - 0.5) / dim
    x = torch.from_numpy(start).requires_grad_()
    tree = trees.huffman(counts) if objective == "hierarchical" and tree is None else tree
    n_rows = n_words if tree is None else int(np.where(tree.arity == 2, 1, tree.arity).sum())
    y = torch.zeros(n_rows, dim, dtype=torch.float64, requires_grad=True)
    sampler = samplers.Unigram(counts, power)
    log_q = sampler.log_prob(torch.arange(n_words)).double()
    for epoch in range(epochs):
        for centre, near, place in windows(tokens, counts, window, subsample, seed, epoch):
            draw = Draws(sampler.table, seed, epoch, place // max(1, share))
            hidden = [x[near].mean(0)] if model == "cbow" else list(x[near])
            drawn = draw(n_negatives)
            loss = 0
            for i, h in enumerate(hidden):
                if share == 0 and i:
                    drawn = draw(n_negatives)
                if objective == "negative":
                    loss = loss + negative_loss(h, y, centre, drawn)
                elif objective == "softmax":
                    loss = loss + softmax_loss(h, y, centre, drawn, log_q)
                else:
                    loss = loss + tree_loss(h, y, centre, tree)
                if share == 0:
                    # Pairs are steps of their own.
                    step(loss, x, y, rate(lr, epoch, epochs, place, len(tokens)))
                    hidden[i + 1 :] = list(x[near])[i + 1 :]
                    loss = 0
            if share:
                step(loss, x, y, rate(lr, epoch, epochs, place, len(tokens)))
    return x.detach(), y.detach()


def rate(lr, epoch, epochs, place, n):
    return lr * (1 - (1 - LAST_RATE) * (epoch * n + place) / (epochs * n))


def step(loss, x, y, lr):
    for parameter, gradient in zip((x, y), torch.autograd.grad(loss, (x, y)), strict=True):
        parameter.data -= lr * gradient
