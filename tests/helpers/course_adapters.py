"""A right ``adapters.py`` of the course exercise, over NumPy; tests put mistakes into its text."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import regex


def run_linear(d_in, d_out, weights, in_features):
    assert weights.shape == (d_out, d_in)
    return in_features @ weights.T


def run_embedding(vocab_size, d_model, weights, token_ids):
    assert weights.shape == (vocab_size, d_model)
    return weights[token_ids]


def run_silu(in_features):
    return in_features / (1 + np.exp(-in_features))


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    assert w2_weight.shape == (d_model, d_ff)
    return (run_silu(in_features @ w1_weight.T) * (in_features @ w3_weight.T)) @ w2_weight.T


def run_softmax(in_features, dim):
    e = np.exp(in_features - in_features.max(axis=dim, keepdims=True))
    return e / e.sum(axis=dim, keepdims=True)


def run_rmsnorm(d_model, eps, weights, in_features):
    assert weights.shape == (d_model,)
    r = np.sqrt((in_features**2).mean(axis=-1, keepdims=True) + eps)
    return (in_features / r * weights).astype(in_features.dtype)


def run_cross_entropy(inputs, targets):
    z = inputs - inputs.max(axis=-1, keepdims=True)
    return (np.log(np.exp(z).sum(axis=-1)) - z[np.arange(len(z)), targets]).mean()


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    s = Q @ K.swapaxes(-1, -2) / np.float32(math.sqrt(Q.shape[-1]))
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    return run_softmax(s, -1) @ V


def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    assert in_query_or_key.shape[-1] == d_k and token_positions.max() < max_seq_len
    omega = theta ** (-np.arange(0, d_k, 2) / d_k)
    angle = token_positions[..., None] * omega
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = in_query_or_key[..., 0::2], in_query_or_key[..., 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(in_query_or_key.shape)


def run_gradient_clipping(parameters, max_l2_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
    if norm > max_l2_norm:
        for g in grads:
            g *= max_l2_norm / (norm + 1e-6)


def run_get_lr_cosine_schedule(
    it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters
):
    if it < warmup_iters:
        return it / warmup_iters * max_learning_rate
    x = min(1, (it - warmup_iters) / (cosine_cycle_iters - warmup_iters))
    span = max_learning_rate - min_learning_rate
    return min_learning_rate + span * (1 + math.cos(math.pi * x)) / 2


class AdamW:
    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params, self.lr, self.betas = list(params), lr, betas
        self.eps, self.decay, self.t = eps, weight_decay, 0
        self.m = [np.zeros_like(p.data) for p in self.params]
        self.v = [np.zeros_like(p.data) for p in self.params]

    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            if p.grad is None:
                continue
            g = p.grad
            m += (1 - b1) * (g - m)
            v += (1 - b2) * (g * g - v)
            a = self.lr * math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
            p.data -= a * m / (np.sqrt(v) + self.eps)
            p.data -= self.lr * self.decay * p.data


def get_adamw_cls():
    return AdamW


PAT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def run_train_bpe(input_path, vocab_size, special_tokens, **kwargs):
    with open(input_path, encoding="utf-8", newline="") as file:
        text = file.read()
    parts = [text]
    if special_tokens:
        parts = regex.split("|".join(map(regex.escape, special_tokens)), text)
    words = Counter(word for part in parts for word in regex.findall(PAT, part))
    words = {tuple(bytes([b]) for b in word.encode()): n for word, n in words.items()}
    tokens = [bytes([b]) for b in range(256)] + [s.encode() for s in special_tokens]
    merges = []
    while len(tokens) < vocab_size:
        pairs = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        if not pairs:
            break
        a, b = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append((a, b))
        tokens.append(a + b)
        merged = {}
        for word, n in words.items():
            out = []
            for token in word:
                fresh = out and out[-1] == a and token == b
                out[-1:] = [a + b] if fresh else [*out[-1:], token]
            merged[tuple(out)] = merged.get(tuple(out), 0) + n
        words = merged
    return dict(enumerate(tokens)), merges
