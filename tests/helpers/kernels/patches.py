"""Mistakes that people make in kernels, as changes of the reference (patterns: ``rewrite.py``)."""

from typing import Any, NamedTuple

from tests.helpers.kernels.rewrite import kernel_of, rewritten


class Patch(NamedTuple):
    """One mistake: in a function of the reference, what has this form becomes that."""

    title: str
    op: str
    wrong: str  # a result that must be named
    where: str  # forward, backward, or the function's own name
    old: str
    new: str

    @property
    def kernel(self) -> Any:
        """The op with this mistake."""
        changed = rewritten(self.op, self.where, self.old, self.new, self.title)
        return kernel_of(self.op, changed, self.title)


def _read(block: str) -> Patch:
    """Return the mistake that three lines describe: op: title | wrong | where, old, new."""
    first, old, new = block.splitlines()
    what, wrong, where = first.split(" | ")
    op, title = what.split(": ", 1)
    return Patch(title, op, wrong, where, old.strip(), new.strip())


_TABLE = """
attention: scale missing in dq | dq | backward
    s_ * (d_ @ k_)
    d_ @ k_

attention: scale twice in dk | dk | backward
    s_ * np.sum(m_, axis=2)
    s_ * s_ * np.sum(m_, axis=2)

attention: mask leaves out the diagonal | out | allowed
    d_ >= 0
    d_ > 0

attention: mask shows one key too many | out | allowed
    d_ >= 0
    d_ >= -1

attention: causal from the top left | out | distance
    np.arange(S_ - T_, S_)
    np.arange(T_)

attention: key mask turned around | out | allowed
    a_ & m_[:, None, :]
    a_ & ~m_[:, None, :]

attention: documents of the wrong queries | out | allowed
    a_[:, S_ - T_ :, None]
    a_[:, :T_, None]

attention: documents compared with ≥ | out | allowed
    a_[:, s_:, None] == b_
    a_[:, s_:, None] >= b_

attention: ALiBi with the wrong sign | out | forward
    s_ - m_ * d_.astype(t_)
    s_ + m_ * d_.astype(t_)

attention: ALiBi by distance either way | out | forward
    m_ * d_.astype(t_)
    m_ * np.abs(d_).astype(t_)

attention: slopes in the wrong order of heads | out | forward
    a_.reshape(H_, G_, 1, 1)
    a_.reshape(G_, H_).T.reshape(H_, G_, 1, 1)

attention: query heads interleaved over key heads | out | forward
    q_.reshape(B_, T_, H_, G_, d_).transpose(0, 2, 3, 1, 4)
    q_.reshape(B_, T_, G_, H_, d_).transpose(0, 3, 2, 1, 4)

attention: dv of the first head of a group only | dv | backward
    dv = np.sum(m_, axis=2)
    dv = m_[:, :, 0]

attention: mean over the group for sum in dk | dk | backward
    s_ * np.sum(m_, axis=2)
    s_ * np.mean(m_, axis=2)

attention: dropout missing in dP | dq | backward
    x_ = x_ * y_
    pass

attention: dropout missing in dv | dv | backward
    p_ if c_ is None else p_ * c_
    p_

attention: no 1/(1 - p) in attention | out | forward
    k_.astype(t_) / (1 - p_)
    k_.astype(t_)

attention: rows with nothing allowed give a mean | out | forward
    np.where(a_, s_, -np.inf)
    np.where(a_, s_, -1e30)

attention: no maximum taken off | out | forward
    np.where(c_, 0, m_)
    np.where(c_, 0, 0)

attention: softmax backward without its mean | dq | softmax_backward
    p_ * (d_ - np.sum(d_ * p_, axis=-1, keepdims=True))
    p_ * d_

rmsnorm: ε outside the root | out | forward
    np.sqrt(m_ + e_)
    (np.sqrt(m_) + e_)

rmsnorm: sum for mean of squares | out | forward
    np.mean(x_ * x_, axis=-1, keepdims=True)
    np.sum(x_ * x_, axis=-1, keepdims=True)

rmsnorm: the projection along n missing | dx | backward
    r_ * (d_ - n_ * m_)
    r_ * d_

rmsnorm: gain missing in dx | dx | backward
    dn = d_ * g_
    dn = d_

rmsnorm: mean for sum in dgain | dgain | backward
    np.sum(p_, axis=tuple(a_))
    np.mean(p_, axis=tuple(a_))

rmsnorm: dgain of the first axis only | dgain | backward
    np.sum(p_, axis=tuple(a_))
    np.sum(p_, axis=0).reshape(-1, p_.shape[-1])[0]

layernorm: variance by D - 1 | out | forward
    np.mean(x_ * x_, axis=-1, keepdims=True)
    np.sum(x_ * x_, axis=-1, keepdims=True) / max(1, x_.shape[-1] - 1)

layernorm: mean(dn) missing | dx | backward
    d_ - np.mean(d_, axis=-1, keepdims=True) - a_
    d_ - a_

layernorm: the mean not taken off | out | forward
    x_ - np.mean(x_, axis=-1, keepdims=True)
    x_ + 0

layernorm: dbias is dgain | dbias | backward
    np.sum(d__, axis=rows)
    np.sum(d__ * n, axis=rows)

layernorm: variance that cancels | out | forward
    np.mean(x_ * x_, axis=-1, keepdims=True)
    np.maximum(np.mean(x * x, axis=-1, keepdims=True) - np.mean(x, axis=-1, keepdims=True) ** 2, 0)

rope: sine with the wrong sign | out | _rotate
    e_ * c_ - o_ * s_
    e_ * c_ + o_ * s_

rope: start ignored | out | forward
    np.expand_dims(s_, -1)
    np.zeros_like(np.expand_dims(s_, -1))

rope: positions from one | out | forward
    s_ + np.arange(n_)
    s_ + np.arange(1, n_ + 1)

rope: the first row's start for all | out | forward
    np.expand_dims(s_, -1)
    np.reshape(s_, -1)[:1]

rope: the backward turns on | dx | backward
    -s_
    s_

rope: frequencies by j/d | out | frequencies
    np.arange(0, d_, 2)
    np.arange(0, d_ // 2)

rope: scaling ignored | out | forward
    frequencies(b_, d_, s_)
    frequencies(b_, d_)

rope: scaling of every pair | out | stretch
    np.clip(t_, 0, 1)
    np.clip(t_, 0, 0)

rope: scaling without a blend | out | stretch
    np.clip(t_, 0, 1)
    np.round(np.clip(t_, 0, 1))

rope: 2π left out of the wavelength | out | stretch
    o_ * w_ / (2 * np.pi)
    o_ * w_

rope: angles in float32 | out | forward
    p_[..., None, None] * w_
    np.float32(p_)[..., None, None] * np.float32(w_)

rope: all heads turn | out | forward
    _rotate(x_, c_, s_, h_)
    _rotate(x_, c_, s_, x_.shape[2])

swiglu: gate and up swapped | out | forward
    a_, b_ = f_(x_, 2, axis=-1)
    b_, a_ = f_(x_, 2, axis=-1)

swiglu: gradients swapped | dx | backward
    [g_, u_]
    [u_, g_]

swiglu: σ for its derivative | dx | backward
    1 + g_ * (1 - s_)
    1 - s_

gelu: the density missing | dx | backward
    c_ + x_ * d_
    c_

relu: gradient at the kink | dx | backward
    x_ > 0
    x_ >= 0

scale: scale missing in the backward | dx | backward
    d_ * f_
    d_

dropout: no 1/(1 - p) | out | forward
    x_ / (1 - p_)
    x_

dropout: no 1/(1 - p) in the backward | dx | backward
    d_ / (1 - p_)
    d_

dropout: dropout keeps what it should drop | out | keep_mask
    w_ >= t_
    w_ < t_

dropout: the sample's number ignored | out | keep_mask
    k_.sample + n_
    n_

dropout: the high half of the seed lost | out | keep_mask
    k_.seed >> 32
    0

embedding: repeated ids overwrite | dtable | backward
    np.add.at(t_, i_, d_)
    t_.__setitem__(i_, d_)

linear: dx with W | dx | backward
    d_ @ w_.T
    d_ @ (w_ if w_.shape[0] == w_.shape[1] else w_.T)

linear: bias left out | out | forward
    y_ = y_ + b_
    pass

split_heads: heads cut in the wrong order | out[0] | forward
    np.split(x_, n_, axis=2)
    np.split(x_, n_, axis=2)[::-1]

merge_heads: heads after tokens | out | forward
    x_.reshape(B_, T_, H_ * d_)
    x_.swapaxes(2, 3).reshape(B_, T_, H_ * d_)

linear_cross_entropy: mean for sum in the loss | total | forward
    Loss(t_, n_)
    Loss(t_ / max(1, n_), n_)

linear_cross_entropy: masked targets counted | n_valid | forward
    Loss(t_, int(np.sum(m_)))
    Loss(t_, int(m_.size))

linear_cross_entropy: dloss ignored | dx | backward
    z_ * float(d_)
    z_

linear_cross_entropy: one-hot forgotten | dx | dlogits
    np.take_along_axis(p_, t_, axis=-1) - 1
    np.take_along_axis(p_, t_, axis=-1)

linear_cross_entropy: masked rows pass a gradient | dx | dlogits
    np.where(m_[..., None], p_, 0)
    p_

linear_cross_entropy: the last chunk lost | total | _chunks
    range(0, n_, c_)
    range(0, max(1, n_ - c_ + 1), c_)

linear_cross_entropy: dhead of the last chunk only | dhead | backward
    h_ += z_.T @ x_
    h_ = z_.T @ x_

softmax: softmax over the wrong axis | out | softmax
    np.sum(e_, axis=-1, keepdims=True)
    np.sum(e_, axis=0, keepdims=True)

adamw: ε inside the root | master | adamw
    np.sqrt(v_) + e_
    np.sqrt(v_ + e_)

adamw: no bias correction | master | adamw
    m_ / (1 - beta1**step)
    m_ / 1

adamw: coupled decay | v | adamw
    grad * s_
    grad * s_ + weight_decay * master

adamw: everything decays | master | adamw
    u_[:n_] += w_ * m_[:n_]
    u_ += w_ * m_

adamw: clipping forgotten | m | adamw
    grad * s_
    grad

adamw: v of g rather than g² | v | adamw
    b_ * g_ * g_
    b_ * g_

muon: the norm is not taken off | master | orthogonalise
    x_ / max(n_, TINY)
    x_ / 1

muon: a coefficient left out | master | orthogonalise
    B * g_ + C * (g_ @ g_)
    B * g_

muon: four steps of Newton-Schulz | master | orthogonalise
    range(ITERATIONS)
    range(ITERATIONS - 1)

muon: no look ahead | master | muon
    orthogonalise(n_[:, c_])
    orthogonalise(m[:, c_])

muon: matrices side by side as one | master | muon
    zip(p_, e_, strict=True)
    zip([len(grad[0])], [len(grad[0])], strict=True)

muon: the factor of wide matrices for all | master | muon
    math.sqrt(max(len(g_), w_))
    math.sqrt(w_)

muon: clipping forgotten | m | muon
    grad * s_
    grad

square_sums: float32 sums | out | square_sums
    x_.astype(np.float64) ** 2
    x_.astype(np.float32) ** 2

square_sums: blocks off by one | out | square_sums
    s_[i_ : i_ + b_]
    s_[i_ : i_ + b_ - 1]

global_norm: no root | out | global_norm
    math.sqrt(x_)
    x_

accumulate: assigned, not added | dst | accumulate
    dst += src
    dst[...] = src
"""

PATCHES = [_read(block) for block in _TABLE.strip().split("\n\n")]
