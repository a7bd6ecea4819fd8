"""Wrong kernels: ``kernels.py`` with one thing mistaken each, and a call that shows it.

Of each: the op, a name, what is wrong, words that a right hint has one of, the call, and the old
and new text in the op's section.

Written on 22 November 2026 from the contract alone, before anything of ``accel.verify``'s cases had
been read by the one who wrote them. Those of ``LATER`` ops came afterwards, by one who had.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    op: str
    name: str
    what: str  # what is wrong
    words: str  # of a hint that names it, any of them
    edits: tuple[tuple[str, ...], ...]  # (old, new), in the op's section; old may occur many times
    witness: str  # a call, by the functions of calls.py


WRONG: list[Wrong] = []
LATER = ("muon",)


def w(op, name, what, words, witness, *edits):
    WRONG.append(Wrong(op, name, what, words, edits, witness))


# fmt: off

# ---- attention ----

w("attention", "window_inclusive", "the window holds one key too many", "window",
  "att(T=12, window=3)", ("< who.window", "<= who.window"))
w("attention", "window_one_sided", "the window does not bound later keys", "window",
  "att(T=12, window=3, causal=False)", ("np.abs(distance) < who.window", "distance < who.window"))
w("attention", "window_by_last_query", "a tile starts at the last query's window", "window tile",
  "att(T=70, window=8)", ("low = t0 + shift - window + 1", "low = t1 + shift - window"))
w("attention", "causal_range_floor16", "keys behind the last multiple of 16 are dropped", "tile tail",
  "att(T=40)", ("high = t1 + shift\n    elif", "high = max((t1 + shift) // 16 * 16, 1)\n    elif"))
w("attention", "distance_int8", "distances wrap at 128", "int8 overflow",
  "att(T=200)", ("distance = t[:, None] - u[None, :]", "distance = (t[:, None] - u[None, :]).astype(np.int8)"))
w("attention", "distance_int16", "distances wrap at 32768", "int16 overflow",
  "att(T=1, S=40000, Hq=1, Hkv=1)", ("distance = t[:, None] - u[None, :]", "distance = (t[:, None] - u[None, :]).astype(np.int16)"))
w("attention", "window_int16", "a window of 32768 or more turns negative", "window int16",
  "att(T=5, window=40000)", ("who.scale = scale\n", "who.scale = scale\n    who.window = window = (window + 32768) % 65536 - 32768\n"))
w("attention", "window_uint8", "the window is taken modulo 256", "window uint8",
  "att(T=300, window=260)", ("who.scale = scale\n", "who.scale = scale\n    who.window = window = window % 256\n"))
w("attention", "alibi_float16", "ALiBi's distance is rounded to float16", "alibi float16",
  "att(T=1, S=6000, alibi=0.001)", ("(t[:, None] - u[None, :]).astype(s.dtype)", "(t[:, None] - u[None, :]).astype(np.float16).astype(s.dtype)"))
w("attention", "alibi_abs", "ALiBi takes the distance's absolute value", "alibi",
  "att(T=6, alibi=True, causal=False)", ("slopes * (t[:, None] - u[None, :])", "slopes * np.abs(t[:, None] - u[None, :])"))
w("attention", "alibi_heads_swapped", "ALiBi's slopes are laid out by group first", "alibi slope head",
  "att(T=6, Hq=4, Hkv=2, alibi=True)", ("who.alibi.reshape(q.shape[1], q.shape[2], 1, 1)", "who.alibi.reshape(q.shape[2], q.shape[1]).T[..., None, None]"))
w("attention", "alibi_times_scale", "the scale multiplies the ALiBi bias too", "alibi scale",
  "att(T=6, alibi=True)", ("s = s - slopes *", "s = s - who.scale * slopes *"))
w("attention", "head_by_shift", "the head's group comes from log2(G): wrong for G = 3", "head",
  "att(T=4, Hq=6, Hkv=2)",
  ("kh = k.transpose(0, 2, 1, 3)[:, :, None]", "of = np.minimum(np.arange(Hq) >> int(math.log2(G)), Hkv - 1).reshape(Hkv, G)\n    kh = k.transpose(0, 2, 1, 3)[:, of]"),
  ("vh = v.transpose(0, 2, 1, 3)[:, :, None]", "vh = v.transpose(0, 2, 1, 3)[:, of]"))
w("attention", "dk_first_of_group", "dk takes one query head of its group", "dk group sum head",
  "att(T=4, Hq=4, Hkv=2)", ("@ qh[..., t0:t1, :]).sum(axis=2)", "@ qh[..., t0:t1, :])[:, :, 0]"))
w("attention", "dk_mean_of_group", "dk is the mean over its group, not the sum", "dk group mean",
  "att(T=4, Hq=4, Hkv=2)", ("@ qh[..., t0:t1, :]).sum(axis=2)", "@ qh[..., t0:t1, :]).mean(axis=2)"))
w("attention", "dv_without_dropout", "dv uses the probabilities before dropout", "dv dropout",
  "att(T=6, dropout_p=0.4)", ("(kept.swapaxes(-1, -2)", "(p.swapaxes(-1, -2)"))
w("attention", "ds_dropped_twice", "ds multiplies by the dropout mask again", "dropout dq dk",
  "att(T=6, dropout_p=0.4)", ("ds = p * (dp", "ds = kept * (dp"))
w("attention", "delta_missing", "the softmax's backward lacks its sum", "softmax sum delta missing term",
  "att(T=6)", ("ds = p * (dp - delta[..., t0:t1, None])", "ds = p * dp"))
w("attention", "dk_default_scale", "dk uses 1/√d whatever the scale", "scale dk",
  "att(T=6, scale=0.2, d=5)", ("+= who.scale * (ds.swapaxes", "+= (1 / math.sqrt(d)) * (ds.swapaxes"))
w("attention", "scale_zero_default", "scale=0 is taken for the default", "scale",
  "att(T=6, scale=0.0)", ("if scale is None else float(scale)", "if not scale else float(scale)"))
w("attention", "scale_by_value_width", "the default scale is 1/√dv", "scale",
  "att(T=6, d=4, dv=7)", ("1 / math.sqrt(d) if scale", "1 / math.sqrt(dv) if scale"))
w("attention", "masked_minus_1e4", "masked scores are -10000 instead of -inf", "masked rows nothing zero",
  "att(T=6, key_mask='none')", ("who)[:, None, None], s, -np.inf)", "who)[:, None, None], s, -1e4)"))
w("attention", "masked_minus_1e30", "a row that sees nothing gives the mean of the values", "nothing zeros",
  "att(T=6, key_mask='none')", ("who)[:, None, None], s, -np.inf)", "who)[:, None, None], s, -1e30)"))
w("attention", "total_not_rescaled", "the running sum of values is not rescaled", "rescale tile online running max",
  "att(T=80)", ("total = total * shrink[..., None] +", "total = total +"))
w("attention", "denominator_not_rescaled", "the running denominator is not rescaled", "rescale tile online running max",
  "att(T=80)", ("l = l * shrink + p.sum", "l = l + p.sum"))
w("attention", "dropout_before_sum", "dropout comes before the normalisation", "dropout",
  "att(T=6, dropout_p=0.4)",
  ("            l = l * shrink + p.sum(axis=-1)\n            if kappa is not None:\n                p = p * kappa[..., t0:t1, u0:u1]\n",
   "            if kappa is not None:\n                p = p * kappa[..., t0:t1, u0:u1]\n            l = l * shrink + p.sum(axis=-1)\n"))
w("attention", "dropout_tokens_first", "the dropout index runs over (T, Hq, S)", "dropout index layout",
  "att(T=6, dropout_p=0.4)", ("kept.reshape(B, Hkv, G, T, S).astype", "kept.reshape(B, T, Hkv, G, S).transpose(0, 2, 3, 1, 4).astype"))
w("attention", "dropout_padded_rows", "the dropout index pads rows of keys to four", "dropout index",
  "att(T=6, dropout_p=0.4)",
  ("kept = keep_mask(B, Hq * T * S, dropout_p, dropout_key)\n", "S4 = -(-S // 4) * 4\n        kept = keep_mask(B, Hq * T * S4, dropout_p, dropout_key)\n        kept = kept.reshape(B, -1, S4)[..., :S]\n"))
w("attention", "documents_of_tile", "documents of the queries are read from the tile's start", "documents offset",
  "att(T=70, documents=np.arange(70) // 9)", ("who.documents[:, t, None]", "who.documents[:, t - t[0], None]"))
w("attention", "documents_uint8", "documents are compared modulo 256", "documents 8 bits",
  "att(T=6, documents=[0, 0, 0, 256, 256, 256])",
  ("who.documents[:, t, None] ==", "who.documents.astype(np.uint8)[:, t, None] =="), ("== who.documents[:, None, u]", "== who.documents.astype(np.uint8)[:, None, u]"))
w("attention", "documents_uint16", "documents are compared modulo 65536", "documents 16 bits",
  "att(T=6, documents=[1, 1, 1, 65537, 65537, 65537])",
  ("who.documents[:, t, None] ==", "who.documents.astype(np.uint16)[:, t, None] =="), ("== who.documents[:, None, u]", "== who.documents.astype(np.uint16)[:, None, u]"))
w("attention", "key_mask_first_row", "the key mask of row 0 serves the batch", "key_mask row batch",
  "att(T=6, B=3, key_mask='random')", ("who.key_mask[:, None, u]", "who.key_mask[:1, None, u]"))
w("attention", "lse_float16", "the log-sum-exp is kept in float16", "float16 precision lse",
  "att(T=6)", ("np.where(seen, m + np.log(np.where(seen, l, 1)), np.inf)", "np.where(seen, m + np.log(np.where(seen, l, 1)), np.inf).astype(np.float16)"))
w("attention", "probabilities_float16", "probabilities are rounded to float16", "float16 precision rounded",
  "att(T=6)", ("total * shrink[..., None] + p @", "total * shrink[..., None] + p.astype(np.float16).astype(p.dtype) @"))
w("attention", "maximum_from_zero", "the running maximum starts at 0", "maximum underflow",
  "att(T=6, far=True)", ("m = np.full((B, Hkv, G, t1 - t0), -np.inf, q.dtype)", "m = np.zeros((B, Hkv, G, t1 - t0), q.dtype)"))
w("attention", "no_maximum", "the maximum is not subtracted", "maximum overflow",
  "att(T=6, size=30.0, forward_only=True)", ("new = np.maximum(m, s.max(axis=-1))", "new = np.zeros_like(m)"))
w("attention", "dk_overwritten", "a tile's dk replaces the one before", "dk sum tile overwritten",
  "att(T=80)", ("dk[:, :, u0:u1] += who", "dk[:, :, u0:u1] = who"))
w("attention", "dv_lost_at_times", "one tile's dv is lost now and then, as in a race", "same twice nondeterministic race",
  "att(T=200, times=20)", ("dvalue[:, :, u0:u1] +=", "dvalue[:, :, u0:u1] += (np.random.default_rng().random() > 0.05) *"))
w("attention", "transposed_layout", "q is read as if it were contiguous", "stride contiguous",
  "att(T=6)._replace(arrays=tuple(np.asfortranarray(a) for a in att(T=6).arrays))",
  ("qh = q.reshape(B, T", "qh = q.ravel(order='K').reshape(B, T"))
w("attention", "causal_without_offset", "causal counts queries from position 0 when S > T", "offset position T S",
  "att(T=3, S=8)", ("high = t1 + shift\n    elif", "high = t1\n    elif"))
w("attention", "mask_by_tile_shape", "the mask is cached by the tile's shape", "tile mask cached",
  "att(T=70)", ("    distance = t[:, None] - u[None, :]\n", "    distance = t[:, None] - u[None, :]\n    distance = visible.__dict__.setdefault((len(t), len(u)), distance)\n"))
w("attention", "value_width_of_key", "columns of v behind d are not summed", "dv width",
  "att(T=6, d=4, dv=7)", ("out = np.ascontiguousarray(o.transpose", "o[..., d:] = 0\n    out = np.ascontiguousarray(o.transpose"))
w("attention", "nan_is_zero", "NaN comes out as 0", "nan",
  "att(T=6)._replace(arrays=(att(T=6).arrays[0] * np.nan, *att(T=6).arrays[1:]), forward_only=True)", ("o[..., t0:t1, :] = total / np.where(seen, l, 1)[..., None]", "o[..., t0:t1, :] = np.nan_to_num(total / np.where(seen, l, 1)[..., None])"))
w("attention", "keys_beyond_4096", "keys beyond 4096 of a row are not read", "long keys",
  "att(T=2, S=5000, Hq=1, Hkv=1, d=1)", ("    low = min(max(low, 0), S)\n", "    low = max(low, high - 4096) if not window else low\n    low = min(max(low, 0), S)\n"))

# ---- rope ----

w("rope", "angles_float32", "angles are computed in float32", "float32 angle position",
  "rope(start=100000)", ("angles = positions[:, :, None, None] * frequencies", "angles = positions[:, :, None, None].astype(np.float32) * frequencies.astype(np.float32)"))
w("rope", "frequencies_float32", "only the frequencies are float32", "float32 angle position",
  "rope(start=100000)", ("frequencies = np.power(float(base), -exponents)", "frequencies = np.power(float(base), -exponents).astype(np.float32).astype(np.float64)"))
w("rope", "start_int16", "positions wrap at 32768", "int16 start position",
  "rope(start=40000)", ("np.asarray(start, np.int64)", "np.asarray(start, np.int64).astype(np.int16).astype(np.int64)"))
w("rope", "start_uint16", "positions wrap at 65536", "uint16 start position",
  "rope(start=70000)", ("np.asarray(start, np.int64)", "(np.asarray(start, np.int64) % 65536)"))
w("rope", "start_of_first_row", "all rows start where row 0 does", "start row",
  "rope(start=np.array([3, 9]))", ("first[:, None] +", "first[:1, None] +"))
w("rope", "backward_all_heads", "the backward turns heads that the forward left", "rotate_heads",
  "rope(rotate_heads=2)", ("turned(dout, cos, -sin, rotate_heads)", "turned(dout, cos, -sin, dout.shape[2])"))
w("rope", "rotate_zero_heads", "rotate_heads=0 turns all heads", "rotate_heads",
  "rope(rotate_heads=0)", ("H if rotate_heads is None else rotate_heads", "rotate_heads or H"))
w("rope", "pairs_of_halves", "pairs are (j, j + d/2)", "pairs half interleaved",
  "rope()",
  ("x[:, :, :heads, 0::2], x[:, :, :heads, 1::2]", "x[:, :, :heads, : x.shape[3] // 2], x[:, :, :heads, x.shape[3] // 2 :]"),
  ("y[:, :, :heads, 0::2] =", "y[:, :, :heads, : x.shape[3] // 2] ="), ("y[:, :, :heads, 1::2] =", "y[:, :, :heads, x.shape[3] // 2 :] ="))
w("rope", "exponent_half", "the exponent is j/d, not 2j/d", "frequency exponent",
  "rope()", ("np.arange(0, d, 2) / d", "np.arange(d // 2) / d"))
w("rope", "base_fixed", "the base is always 10000", "base",
  "rope(base=500000.0)", ("float(base)", "10000.0"))
w("rope", "table_of_8192", "positions beyond a table of 8192 read its last row", "position table",
  "rope(start=9000)", ("    angles = positions", "    positions = np.minimum(positions, 8191)\n    angles = positions"))
w("rope", "in_place", "x is turned in place", "input changed written",
  "rope()", ("y = x.copy()", "y = x"))
w("rope", "not_turned_back", "the backward turns forwards", "backward sign sin",
  "rope()", ("turned(dout, cos, -sin", "turned(dout, cos, sin"))
w("rope", "tables_float16", "sine and cosine are float16", "float16 precision",
  "rope()", ("np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)", "np.cos(angles).astype(np.float16).astype(x.dtype), np.sin(angles).astype(np.float16).astype(x.dtype)"))
w("rope", "cached_by_shape", "angles are cached by shape, not by start", "cached stale start",
  "rope(start=3)._replace(then=rope(start=7))", ("    angles = positions[:, :, None, None] * frequencies\n", "    angles = positions[:, :, None, None] * frequencies\n    angles = rope_forward.__dict__.setdefault((B, T, d), angles)\n"))
w("rope", "heads_share_turn_off_by_one", "the second token of each row is one position late", "position off by one",
  "rope()", ("np.arange(T)[None, :]", "np.maximum(np.arange(T), np.minimum(np.arange(T) + 1, 2))[None, :]"))

# ---- layernorm, rmsnorm ----

w("layernorm", "variance_by_squares", "the variance is E[x²] - E[x]²", "variance cancellation mean",
  "norm('layernorm', shift=300.0)", ("var = np.sum(centred * centred, axis=-1, keepdims=True) / D", "var = np.maximum(np.sum(x * x, axis=-1, keepdims=True) / D - mean * mean, 0)"))
w("layernorm", "unbiased", "the variance divides by D - 1", "D - 1 variance unbiased",
  "norm('layernorm')", ("var = np.sum(centred * centred, axis=-1, keepdims=True) / D", "var = np.sum(centred * centred, axis=-1, keepdims=True) / max(D - 1, 1)"))
w("layernorm", "eps_outside", "ε is added to the deviation", "eps root",
  "norm('layernorm', eps=0.1)", ("1 / np.sqrt(var + x.dtype.type(eps))", "1 / (np.sqrt(var) + x.dtype.type(eps))"))
w("layernorm", "eps_at_least", "ε below 1e-5 becomes 1e-5", "eps",
  "norm('layernorm', size=0.001, eps=1e-8)", ("x.dtype.type(eps)", "x.dtype.type(max(eps, 1e-5))"))
w("layernorm", "dx_without_mean", "dx lacks the mean of dn", "mean dx term",
  "norm('layernorm')", ("dn - mean_dn - n", "dn - n"))
w("layernorm", "dx_without_projection", "dx lacks the part along n", "dx term n",
  "norm('layernorm')", (" - n * mean_dn_n", ""))
w("layernorm", "dx_without_gain", "dx ignores the gain", "gain dx",
  "norm('layernorm')", ("dn = dout * gain", "dn = dout"))
w("layernorm", "dgain_of_x", "dgain uses x, not the normalised row", "dgain normalised",
  "norm('layernorm')", ("n.reshape(-1, D)", "x.reshape(-1, D)"))
w("layernorm", "dbias_last_block", "dbias keeps the last block of 64 rows", "dbias rows block sum",
  "norm('layernorm', rows=100)", ("dbias += dy[i", "dbias[:] = dy[i"))
w("layernorm", "rows_floor64", "the last partial block of rows is dropped when there are many", "rows tail",
  "norm('layernorm', rows=100)", ("for i in range(0, len(dy), ROWS):", "for i in range(0, len(dy) // ROWS * ROWS or len(dy), ROWS):"))
w("layernorm", "mean_of_padded_width", "the mean divides by D rounded up to 4", "mean width padded",
  "norm('layernorm', D=7)", ("mean = np.sum(x, axis=-1, keepdims=True) / D", "mean = np.sum(x, axis=-1, keepdims=True) / (-(-D // 4) * 4)"))
w("layernorm", "width_over_1024", "elements behind the 1024th are not in the mean", "width 1024 block",
  "norm('layernorm', rows=2, D=1500)", ("mean = np.sum(x, axis=-1, keepdims=True) / D", "mean = np.sum(x[..., :1024], axis=-1, keepdims=True) / min(D, 1024)"))
w("layernorm", "float16_mean", "the mean is a float16", "float16 mean precision",
  "norm('layernorm', shift=5.0)", ("    centred = x - mean\n", "    mean = mean.astype(np.float16).astype(x.dtype)\n    centred = x - mean\n"))
w("layernorm", "result_reused", "results of one shape share one array", "earlier result changed buffer",
  "norm('layernorm', again='new values')", ("    return y, (x, gain", "    kept = layernorm_forward.__dict__.setdefault((y.shape, y.dtype), y)\n    kept[...] = y\n    y = kept\n    return y, (x, gain"))
w("layernorm", "gradients_exchanged", "the gradients of gain and bias come in the wrong order", "order dgain dbias swapped",
  "norm('layernorm')", ("return dx, dgain, dbias", "return dx, dbias, dgain"))
w("rmsnorm", "eps_outside", "ε is outside the root", "eps root",
  "norm('rmsnorm', eps=0.1)", ("1 / np.sqrt(square + x.dtype.type(eps))", "1 / (np.sqrt(square) + x.dtype.type(eps))"))
w("rmsnorm", "eps_fixed", "ε is 1e-6 whatever is given", "eps",
  "norm('rmsnorm', size=0.001)", ("x.dtype.type(eps)", "x.dtype.type(1e-6)"))
w("rmsnorm", "dx_no_projection", "dx lacks the part along n", "dx term n",
  "norm('rmsnorm')", ("dn - n * dot", "dn"))
w("rmsnorm", "dot_not_mean", "the part along n is a sum, not a mean", "mean sum dx D",
  "norm('rmsnorm')", ("dot = np.sum(dn * n, axis=-1, keepdims=True) / D", "dot = np.sum(dn * n, axis=-1, keepdims=True)"))
w("rmsnorm", "dot_of_dout", "the part along n forgets the gain", "gain dx",
  "norm('rmsnorm')", ("dot = np.sum(dn * n", "dot = np.sum(dout * n"))
w("rmsnorm", "rstd_overflow16", "squares are summed in float16", "float16 overflow",
  "norm('rmsnorm', size=300.0)", ("np.sum(x * x, axis=-1, keepdims=True)", "np.sum((x * x).astype(np.float16), axis=-1, keepdims=True).astype(x.dtype)"))
w("rmsnorm", "odd_tail", "the last element of an odd row is not squared", "tail odd width",
  "norm('rmsnorm', D=7)", ("np.sum(x * x, axis=-1, keepdims=True)", "np.sum((x * x)[..., : max(D // 2 * 2, 1)], axis=-1, keepdims=True)"))
w("rmsnorm", "nan_swallowed", "a row with NaN gives zeros", "nan",
  "norm('rmsnorm')._replace(arrays=(np.array([[np.nan, 1.0], [1.0, 2.0]], np.float32), np.ones(2, np.float32)), forward_only=True)", ("return x * rstd * gain, (x", "return np.nan_to_num(x * rstd * gain), (x"))
w("rmsnorm", "cached_by_pointer", "1/rms is cached by the pointer of x", "cached pointer stale",
  "norm('rmsnorm', again='new values')", ("    return x * rstd", "    rstd = rmsnorm_forward.__dict__.setdefault((x.ctypes.data, x.shape), rstd)\n    return x * rstd"))
w("rmsnorm", "out_partly", "out= gets all but its last element", "out dgain tail",
  "norm('rmsnorm', receivers='out')", ("    receive((dgain,), out)\n", "    if out is not None:\n        (out[0] if isinstance(out, tuple) else out)[:-1] = dgain[:-1]\n"))
w("rmsnorm", "memory_order", "x is read in memory order", "stride contiguous",
  "norm('rmsnorm')._replace(arrays=(np.asfortranarray(norm('rmsnorm').arrays[0]), norm('rmsnorm').arrays[1]))", ("    D = x.shape[-1]\n    square", "    D = x.shape[-1]\n    x = x.ravel(order='K').reshape(x.shape)\n    square"))
w("rmsnorm", "dgain_float16", "dgain is summed in float16", "float16 dgain precision",
  "norm('rmsnorm', rows=200)", ("dgain = np.zeros(D, dout.dtype)", "dgain = np.zeros(D, np.float16)"),
  ("    receive(", "    dgain = dgain.astype(dout.dtype)\n    receive("))

# ---- linear, logits ----

w("linear", "inner_tail", "the last partial tile of the inner axis is dropped", "tail inner tile",
  "lin(I=100)", ("for k in range(0, I, ROWS):", "for k in range(0, I // ROWS * ROWS or I, ROWS):"))
w("linear", "tf32", "inputs are rounded to TF32", "tf32 precision rounded",
  "lin()", ("    y = np.zeros((len(rows), O), x.dtype)\n", "    y = np.zeros((len(rows), O), x.dtype)\n    if x.dtype == np.float32:\n        rows = ((rows.copy().view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)\n"))
w("linear", "float16_sum", "sums are rounded to float16", "float16 precision",
  "lin()", ("@ weight[k : k + ROWS]\n", "@ weight[k : k + ROWS]\n        y = y.astype(np.float16).astype(x.dtype)\n"))
w("linear", "bf16_gradient", "dW is rounded to bf16", "bf16 precision weight",
  "lin()", ("    receive((dweight, dbias), out)\n", "    if dweight.dtype == np.float32:\n        dweight = (dweight.view(np.uint32) & 0xFFFF0000).view(np.float32)\n    receive((dweight, dbias), out)\n"))
w("linear", "bias_per_tile", "the bias is added once a tile of the inner axis", "bias tile",
  "lin(I=100)", ("@ weight[k : k + ROWS]\n    if bias is not None:\n        y += bias\n", "@ weight[k : k + ROWS]\n        if bias is not None:\n            y += bias\n"))
w("linear", "square_not_transposed", "dx forgets the transpose when W is square", "transpose dx",
  "lin(I=6, O=6)", ("(dy @ weight.T)", "(dy @ (weight if I == O else weight.T))"))
w("linear", "dw_last_rows", "dW keeps the last block of rows", "dweight rows block",
  "lin(rows=100)", ("dweight += rows", "dweight[:] = rows"))
w("linear", "dbias_mean", "dbias is the mean over rows", "dbias mean sum",
  "lin(rows=4)", ("    dbias = dbias if has_bias", "    dbias /= max(len(rows), 1)\n    dbias = dbias if has_bias"))
w("linear", "weight_memory_order", "W is read in memory order", "stride contiguous",
  "lin(transposed=True)", ("    rows = x.reshape(-1, I)\n    y =", "    rows = x.reshape(-1, I)\n    weight = weight.ravel(order='K').reshape(I, O)\n    y ="))
w("linear", "weight_packed_by_pointer", "the packed W is cached by its pointer", "cached pointer stale weight",
  "lin(again='new values')", ("    rows = x.reshape(-1, I)\n    y =", "    rows = x.reshape(-1, I)\n    weight = linear_forward.__dict__.setdefault((weight.ctypes.data, I, O), weight.copy())\n    y ="))
w("linear", "out_added", "out= is added to, not overwritten", "out overwritten added",
  "lin(receivers='out')", ("    receive((dweight, dbias), out)\n", "    if out[0] is not None:\n        out[0][...] += dweight\n        receive((None, dbias), out)\n"))
w("linear", "wide_rows_65536", "row numbers are uint16", "uint16 rows 65536",
  "lin(rows=70000, I=2, O=2)", ("    if bias is not None:\n        y += bias\n", "    y = y[np.arange(len(y)) % 65536]\n    if bias is not None:\n        y += bias\n"))
w("linear", "dout_stride", "dout is read in memory order", "stride contiguous dout",
  "lin(dout_order='F')", ("x.reshape(-1, I), dout.reshape(-1, O)\n", "x.reshape(-1, I), dout.reshape(-1, O)\n    if not dout.flags.c_contiguous:\n        dy = dout.ravel(order='K').reshape(dy.shape)\n"))
w("logits", "vocabulary_tail", "the last partial tile of the vocabulary is not written", "vocabulary tail",
  "lgt(V=300)", ("z = np.empty((len(rows), V), x.dtype)", "z = np.zeros((len(rows), V), x.dtype)"), ("for v0 in range(0, V, VOCABULARY):", "for v0 in range(0, V // VOCABULARY * VOCABULARY or V, VOCABULARY):"))
w("logits", "buffer_reused", "results of one shape share one array", "earlier result changed buffer",
  "lgt(again='new values')", ("z = np.empty((len(rows), V), x.dtype)", "z = logits.__dict__.setdefault((len(rows), V, x.dtype), np.empty((len(rows), V), x.dtype))"))
w("logits", "bias_first_tile", "the bias is added to the first 256 entries", "bias vocabulary",
  "lgt(V=300)", ("        z += bias\n", "        z[:, :VOCABULARY] += bias[:VOCABULARY]\n"))
w("logits", "vocabulary_32767", "entries beyond 32767 are not written", "int16 vocabulary",
  "lgt(rows=1, V=40000, D=1)", ("    return z.reshape", "    z[:, 32768:] = 0\n    return z.reshape"))
w("logits", "float16_head", "the head is rounded to float16", "float16 precision head",
  "lgt()", ("@ head[v0 : v0 + VOCABULARY].T", "@ head[v0 : v0 + VOCABULARY].T.astype(np.float16).astype(x.dtype)"))

# ---- linear_cross_entropy ----

w("linear_cross_entropy", "no_maximum", "the maximum is not subtracted", "maximum overflow",
  "lce(size=12.0, forward_only=True)", ("new = np.maximum(m, z.max(axis=-1))", "new = np.zeros_like(m)"))
w("linear_cross_entropy", "n_valid_all", "n_valid counts masked targets", "mask n_valid",
  "lce()", ("Loss(total, int(valid.sum()))", "Loss(total, len(valid))"))
w("linear_cross_entropy", "mask_ignored_backward", "the backward ignores the mask", "mask gradient",
  "lce()", ("np.where(ok[:, None], p - hit, 0)", "np.asarray(p - hit)"))
w("linear_cross_entropy", "mean_loss", "the loss is a mean", "mean sum",
  "lce()", ("Loss(total, int", "Loss(total / max(int(valid.sum()), 1), int"))
w("linear_cross_entropy", "dloss_ignored", "the gradient ignores dloss", "dloss",
  "lce()", (" * float(dloss)", ""))
w("linear_cross_entropy", "dloss_not_dhead", "dhead ignores dloss", "dloss dhead",
  "lce()", ("+= dz.T @ block", "+= dz.T @ block / float(dloss)"))
w("linear_cross_entropy", "bias_of_target", "the target's logit lacks the bias", "bias target",
  "lce()", ("at = at + bias[y[i : i + ROWS]]", "at = at + 0"))
w("linear_cross_entropy", "vocabulary_tail", "the last partial tile of the vocabulary is not summed", "vocabulary tail",
  "lce(V=300)", ("    for v0 in range(0, len(head), VOCABULARY):\n        z = x", "    for v0 in range(0, len(head) // VOCABULARY * VOCABULARY or len(head), VOCABULARY):\n        z = x"))
w("linear_cross_entropy", "lse_not_rescaled", "the running sum over tiles is not rescaled", "rescale tile vocabulary",
  "lce(V=600)", ("l = l * np.exp(m - new) +", "l = l +"))
w("linear_cross_entropy", "target_int16", "targets wrap at 32768", "int16 target",
  "lce(rows=2, V=40000, D=2, ids=[35000, 39999], mask=False)", ("    y = np.where(valid, y, 0)\n", "    y = np.where(valid, y, 0).astype(np.int16).astype(np.int64)\n"))
w("linear_cross_entropy", "target_uint8", "targets are taken modulo 256", "uint8 target",
  "lce(rows=2, V=300, D=2, ids=[280, 299], mask=False)", ("    y = np.where(valid, y, 0)\n", "    y = np.where(valid, y, 0) % 256\n"))
w("linear_cross_entropy", "rows_tail", "the last partial chunk of rows is not in the loss", "rows tail chunk",
  "lce(rows=100)", ("        total += float(", "        total += (len(block) == ROWS or len(rows) < ROWS) * float("))
w("linear_cross_entropy", "total_float16", "the loss is summed in float16", "float16 precision",
  "lce(rows=200)", ("        total += float(", "        total = float(np.float16(total))\n        total += float("))
w("linear_cross_entropy", "dbias_chunk", "dbias keeps the last chunk of rows", "dbias rows chunk",
  "lce(rows=100)", ("dbias[v0 : v0 + VOCABULARY] += dz", "dbias[v0 : v0 + VOCABULARY] = dz"))
w("linear_cross_entropy", "dx_last_tile", "dx keeps the last tile of the vocabulary", "dx vocabulary tile",
  "lce(V=300)", ("dx[i : i + ROWS] += dz", "dx[i : i + ROWS] = dz"))
w("linear_cross_entropy", "hit_in_tile", "a target of a later tile is taken within its tile", "target tile one-hot",
  "lce(V=300, ids=[290, 299, 1, 270, 256], mask=False)", ("ys[:, None] == np.arange(v0, v0 + len(tile))", "ys[:, None] == np.arange(len(tile))"))
w("linear_cross_entropy", "smoothed", "a probability is floored at 1e-7 before its log", "clamp floor log",
  "lce(size=4.0)", ("        total += float(np.sum(losses,", "        losses = np.minimum(losses, -math.log(1e-7))\n        total += float(np.sum(losses,"))
w("linear_cross_entropy", "mask_of_first_row", "the mask is read column by column", "mask layout",
  "Call('linear_cross_entropy', (one('relu', (3, 4, 5)).arrays[0], one('relu', (7, 5)).arrays[0], np.zeros((3, 4), np.int32)), {'mask': np.arange(12).reshape(3, 4) % 5 < 2})", ("mask.reshape(-1)", "mask.ravel(order='F')"))

# ---- embedding ----

w("embedding", "repeated_once", "an id that repeats counts once", "repeated ids",
  "emb([1, 1, 2])", ("rows[order[begin:end]].sum(axis=0)", "rows[order[end - 1]]"))
w("embedding", "accumulate_ignored", "accumulate overwrites", "accumulate",
  "emb([1, 1, 2], receivers='accumulate')", ("        if accumulate:\n            dtable = out + dtable\n", ""))
w("embedding", "always_accumulates", "out is added to without accumulate", "accumulate out overwritten",
  "emb([1, 1, 2], receivers='out')", ("        if accumulate:\n", "        if True:\n"))
w("embedding", "untouched_rows_left", "rows of out that no id names keep what they held", "untouched rows out zero",
  "emb([1, 1, 2], receivers='out')", ("        out[...] = dtable\n", "        out[np.unique(flat)] = dtable[np.unique(flat)]\n"))
w("embedding", "ids_int16", "ids wrap at 32768", "int16 ids",
  "emb([40000, 3], V=50000)", ("y[i : i + ROWS] = table[flat[i : i + ROWS]]", "y[i : i + ROWS] = table[flat[i : i + ROWS].astype(np.int16)]"))
w("embedding", "ids_uint16", "ids wrap at 65536", "uint16 ids",
  "emb([70000, 3], V=80000, D=1)", ("y[i : i + ROWS] = table[flat[i : i + ROWS]]", "y[i : i + ROWS] = table[flat[i : i + ROWS] % 65536]"))
w("embedding", "ids_int8", "ids are taken modulo 128", "int8 ids",
  "emb([200, 3], V=300)", ("y[i : i + ROWS] = table[flat[i : i + ROWS]]", "y[i : i + ROWS] = table[flat[i : i + ROWS] % 128]"))
w("embedding", "backward_uint16", "the gradient's ids wrap at 65536", "uint16 ids gradient",
  "emb([70000, 3], V=80000, D=1)", ("sorted_ids = flat[order]\n", "sorted_ids = flat[order] % 65536\n"))
w("embedding", "gradient_float16", "repeated gradients are summed in float16", "float16 precision",
  "emb([1] * 50)", ("rows[order[begin:end]].sum(axis=0)", "rows[order[begin:end]].astype(np.float16).sum(axis=0)"))
w("embedding", "lost_update", "two equal ids side by side lose one update at times", "same twice race repeated",
  "emb([1] * 50, times=30)", ("rows[order[begin:end]].sum(axis=0)", "rows[order[begin + (end - begin > 1 and np.random.default_rng().random() < 0.2) : end]].sum(axis=0)"))

# ---- softmax, square_sums, global_norm, accumulate ----

w("softmax", "no_maximum", "the maximum is not subtracted", "maximum overflow",
  "one('softmax', (3, 5), size=100.0)", ("m = np.max(x, axis=-1, keepdims=True)", "m = np.zeros_like(x[..., :1])"))
w("softmax", "maximum_of_all", "one maximum is taken of all rows", "maximum row underflow",
  "one('softmax', (2, 2), put=[900.0, 901.0, 1.0, 2.0])", ("m = np.max(x, axis=-1, keepdims=True)", "m = np.max(x) if x.size else 0"))
w("softmax", "wide_rows", "the denominator leaves out what is behind the 1024th", "wide row 1024",
  "one('softmax', (2, 1500))", ("np.sum(e, axis=-1, keepdims=True)", "np.sum(e[..., :1024], axis=-1, keepdims=True)"))
w("softmax", "float16_sum", "the denominator is a float16", "float16 precision",
  "one('softmax', (2, 50))", ("np.sum(e, axis=-1, keepdims=True)", "np.sum(e, axis=-1, keepdims=True).astype(np.float16).astype(x.dtype)"))
w("softmax", "nan_to_zero", "NaN comes out as 0", "nan",
  "one('softmax', (2, 3), put=[np.nan])", ("return e / np.sum(e, axis=-1, keepdims=True)", "return np.nan_to_num(e / np.sum(e, axis=-1, keepdims=True))"))
w("softmax", "eps_in_denominator", "the denominator gets 1e-5", "denominator eps",
  "one('softmax', (2, 3))", ("e / np.sum(e, axis=-1, keepdims=True)", "e / (np.sum(e, axis=-1, keepdims=True) + x.dtype.type(1e-5))"))
w("softmax", "axis_one", "three axes are summed over the second", "axis",
  "one('softmax', (2, 3, 3))", ("e / np.sum(e, axis=-1, keepdims=True)", "e / np.sum(e, axis=1, keepdims=True)"))
w("square_sums", "float32_sum", "squares are summed in float32", "float32 precision",
  "one('square_sums', (3000,))", ("part = x[b * 65536 : (b + 1) * 65536].astype(np.float64)", "part = x[b * 65536 : (b + 1) * 65536]"))
w("square_sums", "last_block", "the last partial block is dropped when there is a full one", "block tail",
  "one('square_sums', (70000,))", ("    return sums\n", "    if blocks > 1 and len(x) % 65536:\n        sums[-1] = 0\n    return sums\n"))
w("square_sums", "blocks_of_65535", "a block leaves out its last element", "block off by one",
  "one('square_sums', (70000,))", ("x[b * 65536 : (b + 1) * 65536]", "x[b * 65536 : (b + 1) * 65536 - (len(x) > 65536)]"))
w("square_sums", "result_float32", "the result is float32", "float64 dtype",
  "one('square_sums', (30,))", ("    return sums\n", "    return sums.astype(np.float32)\n"))
w("global_norm", "float32_sum", "squares are summed in float32 and overflow", "float32 overflow precision",
  "one('global_norm', (30,), size=1e25)", (".astype(np.float64)\n", "\n"))
w("global_norm", "tail", "elements behind the last full block are dropped", "block tail",
  "one('global_norm', (70000,))", ("range(0, len(x), 65536)", "range(0, len(x) // 65536 * 65536 or len(x), 65536)"))
w("global_norm", "sum_of_norms", "norms of the blocks are added", "block norm root",
  "one('global_norm', (70000,))", ("total += float(np.dot(part, part))", "total = (math.sqrt(total) + math.sqrt(float(np.dot(part, part)))) ** 2"))
w("accumulate", "copy_of_strided", "a strided dst is copied and the copy added to", "stride not written",
  "add_onto((3, 4), sliced=True)", ("np.add(dst, src, out=dst)", "dst = np.ascontiguousarray(dst)\n    np.add(dst, src, out=dst)"))
w("accumulate", "first_65536", "only the first 65536 elements are added to", "65536 tail",
  "add_onto((70000,))", ("np.add(dst, src, out=dst)", "dst[:65536] += src[:65536]"))
w("accumulate", "multiple_of_four", "elements behind the last multiple of 4 are left", "tail multiple vector",
  "add_onto((7,))", ("np.add(dst, src, out=dst)", "n = len(dst) // 4 * 4 if dst.ndim and len(dst) > 4 else len(dst)\n    dst[:n] += src[:n]"))
w("accumulate", "overwritten", "dst is replaced by src where dst is zero... and by half elsewhere", "overwrite sum",
  "add_onto((7,))", ("np.add(dst, src, out=dst)", "dst[...] = src"))

# ---- adamw ----

w("adamw", "eps_inside", "ε is inside the root", "eps root",
  "adam(eps=0.01)", ("(np.sqrt(v[at] / bias2) + eps)", "np.sqrt(v[at] / bias2 + eps)"))
w("adamw", "betas_swapped", "β₁ and β₂ are swapped", "beta swapped",
  "adam()", ("    bias1 = 1 - beta1**step\n", "    beta1, beta2 = beta2, beta1\n    bias1 = 1 - beta1**step\n"))
w("adamw", "bias2_of_beta1", "v̂ is corrected by β₁", "bias correction beta",
  "adam()", ("bias2 = 1 - beta2**step", "bias2 = 1 - beta1**step"))
w("adamw", "step_from_zero", "the correction counts steps from 0", "step bias correction",
  "adam(step=2)", ("bias1 = 1 - beta1**step", "step = max(step - 1, 1)\n    bias1 = 1 - beta1**step"))
w("adamw", "step_uint8", "the step wraps at 256", "step 8 bits",
  "adam(step=257, beta2=0.9999)", ("bias1 = 1 - beta1**step", "step = step % 256 or 256\n    bias1 = 1 - beta1**step"))
w("adamw", "step_uint16", "the step wraps at 65536", "step 16 bits",
  "adam(step=65537)", ("bias1 = 1 - beta1**step", "step = step % 65536 or 65536\n    bias1 = 1 - beta1**step"))
w("adamw", "no_correction_late", "the correction stops after 1000 steps", "step bias correction",
  "adam(step=1500, beta2=0.9995)", ("bias2 = 1 - beta2**step", "bias2 = 1 - beta2**step if step <= 1000 else 1.0"))
w("adamw", "decay_one_more", "one element too many decays", "n_decayed off by one",
  "adam()", ("min(n_decayed - i, at.stop - i)", "min(n_decayed + 1 - i, at.stop - i)"))
w("adamw", "decay_in_gradient", "the decay is part of the gradient", "decay coupled decoupled",
  "adam()", ("        m[at] = beta1", "        g[: max(0, n_decayed - i)] += weight_decay * master[at][: max(0, n_decayed - i)]\n        m[at] = beta1"), ("        update[:decayed] += weight_decay * master[at][:decayed]\n", ""))
w("adamw", "decay_without_lr", "the decay is not multiplied by lr", "decay lr",
  "adam()", ("update[:decayed] += weight_decay *", "update[:decayed] += weight_decay / max(lr, 1e-12) *"))
w("adamw", "decay_after_1024", "the decay stops with the first block", "decay block n_decayed",
  "adam(n=3000, n_decayed=2000)", ("decayed = max(0, min(n_decayed - i, at.stop - i))", "decayed = min(n_decayed, at.stop) if i == 0 else 0"))
w("adamw", "scale_not_squared", "v takes the gradient before its scale", "grad_scale v",
  "adam(grad_scale=0.3)", ("(1 - beta2) * g * g", "(1 - beta2) * grad[at] * grad[at]"))
w("adamw", "scale_once_in_v", "v has the scale once, not squared", "grad_scale v",
  "adam(grad_scale=0.3)", ("(1 - beta2) * g * g", "(1 - beta2) * g * grad[at]"))
w("adamw", "beta_powers_float32", "1 - β^t is computed in float32", "float32 bias correction precision",
  "adam(step=1, beta2=0.9999, lr=3.0)", ("bias2 = 1 - beta2**step", "bias2 = float(np.float32(1) - np.float32(beta2) ** np.float32(step))"))
w("adamw", "tail_of_block", "the tail behind the last multiple of 8 is not stepped", "tail multiple vector",
  "adam(n=20)", ("at = slice(i, min(i + 1024, len(master)))", "at = slice(i, min(i + 1024, len(master) // 8 * 8 or len(master)))"))
w("adamw", "gradient_scaled_in_place", "grad is scaled in place", "grad input changed written",
  "adam(grad_scale=0.3)", ("g = grad[at] * grad_scale", "grad[at] *= grad_scale\n        g = grad[at]"))
w("adamw", "moment_not_kept", "m is not written back", "m not written",
  "adam()", ("        m[at] = beta1 * m[at] + (1 - beta1) * g\n", "        first = beta1 * m[at] + (1 - beta1) * g\n"), ("update = (m[at] / bias1)", "update = (first / bias1)"))
w("adamw", "amsgrad", "v never falls", "v maximum amsgrad",
  "adam(grad_size=0.001)", ("        update = (m[at]", "        v[at] = np.maximum(v[at], v[at] / beta2 - (1 - beta2) / beta2 * g * g)\n        update = (m[at]"))
w("adamw", "nan_gradient_skipped", "a NaN gradient is taken for 0", "nan",
  "adam()._replace(arrays=(*adam().arrays[:3], np.where(np.arange(20) == 3, np.nan, 1).astype(np.float32)))", ("g = grad[at] * grad_scale", "g = np.nan_to_num(grad[at]) * grad_scale"))

# ---- muon ----

w("muon", "momentum_averaged", "the sum of gradients is an average", "momentum average",
  "matrix_step(6, 9)", ("m[:, at] = momentum * m[:, at] + g", "m[:, at] = momentum * m[:, at] + (1 - momentum) * g"))
w("muon", "look_ahead_averaged", "the look ahead is an average of the sum and the gradient", "look ahead average momentum",
  "matrix_step(6, 9)", ("x = momentum * m[:, at] + g", "x = momentum * m[:, at] + (1 - momentum) * g"))
w("muon", "norm_of_last_block", "the norm is that of the last block of rows", "norm block",
  "matrix_step(130, 300)", ("squares += float", "squares = float"))
w("muon", "norm_plus_1e_7", "1e-7 is added to the norm", "norm epsilon 1e-7",
  "matrix_step(6, 9, size=1e-6)", ("max(math.sqrt(squares), 1e-30)", "(math.sqrt(squares) + 1e-7)"))
w("muon", "zeros_divided", "a gradient of zeros is divided by its norm", "zero norm nan",
  "matrix_step(6, 9, size=0.0)", ("max(math.sqrt(squares), 1e-30)", "np.float64(math.sqrt(squares))"))
w("muon", "gram_without_tail", "columns behind the last full block are left out of X Xᵀ", "block tail product",
  "matrix_step(20, 200)", ("range(0, x.shape[1], ROWS)", "range(0, x.shape[1] // ROWS * ROWS or x.shape[1], ROWS)"))
w("muon", "gram_float16", "X Xᵀ is rounded to float16", "float16 precision",
  "matrix_step(6, 9)", ("gram += block @ block.T", "gram += (block @ block.T).astype(np.float16)"))
w("muon", "coefficient_mistyped", "two digits of c are swapped", "2.0315 coefficient",
  "matrix_step(6, 9)", ("2.0315", "2.0351"))
w("muon", "six_iterations", "there are six steps of Newton-Schulz", "iteration step newton",
  "matrix_step(6, 9)", ("range(5)", "range(6)"))
w("muon", "square_turned", "a square matrix is transposed once", "transposed square",
  "matrix_step(7, 14)", ("(x.T if tall else x)", "(x.T if rows >= width else x)"))
w("muon", "factor_of_jordan", "the factor is √max(1, I/O), as in the first paper", "factor sqrt max",
  "matrix_step(6, 9)", ("0.2 * math.sqrt(max(rows, width))", "math.sqrt(max(1, rows / width))"))
w("muon", "parts_alike", "matrices side by side are taken to be of one width", "parts width",
  "matrix_step(5, 9)", ("in parts or master.shape[1:]:", "in [sum(parts) // len(parts)] * len(parts) if parts else master.shape[1:]:"))
w("muon", "first_part_alone", "the matrices after the first are not stepped", "parts first",
  "matrix_step(5, 9)", ("        master[:, at] -= lr", "        master[:, at] -= (first == width) * lr"))
w("muon", "decay_after_step", "the decay acts on what the step has made", "decay order",
  "matrix_step(6, 9, lr=0.3)", ("master[:, at] -= lr * (update + weight_decay * master[:, at])", "master[:, at] = (master[:, at] - lr * update) * (1 - lr * weight_decay)"))
w("muon", "decay_without_lr", "the decay is not multiplied by lr", "decay lr",
  "matrix_step(6, 9)", ("weight_decay * master", "weight_decay / lr * master"))
w("muon", "gradient_scaled_in_place", "grad is scaled in place", "grad input changed written",
  "matrix_step(6, 9, grad_scale=0.3)", ("g = grad[:, at] * grad_scale", "grad[:, at] *= grad_scale\n        g = grad[:, at]"))

# ---- dropout ----

w("dropout", "scaled_by_p", "kept elements are divided by p", "scale 1 - p",
  "one('dropout', (3, 40), p=0.3, key=key())", ("np.where(kept, x / (1 - p)", "np.where(kept, x / p"))
w("dropout", "backward_unscaled", "the gradient is not divided by 1 - p", "scale backward",
  "one('dropout', (3, 40), p=0.3, key=key())", ("np.where(kept, dout / (1 - p)", "np.where(kept, dout"))
w("dropout", "sample_ignored", "samples are counted from 0", "sample key",
  "one('dropout', (3, 40), p=0.3, key=key())", ("np.uint64(key.sample) + np.arange(batch", "np.uint64(0) + np.arange(batch"))
w("dropout", "seed_32_bits", "the seed's high half is ignored", "seed high 32 bits",
  "one('dropout', (3, 40), p=0.3, key=key(seed=2**40 + 1))", ("key.seed >> 32", "0"))
w("dropout", "step_16_bits", "the step is taken modulo 65536", "step 16 bits",
  "one('dropout', (3, 40), p=0.3, key=key(step=2**16 + 1))", ("key.step, np.uint64", "key.step % 65536, np.uint64"))
w("dropout", "step_31_bits", "the step's top bit is lost", "step bit signed",
  "one('dropout', (3, 40), p=0.3, key=key(step=2**31 + 1))", ("key.step, np.uint64", "key.step % 2**31, np.uint64"))
w("dropout", "site_8_bits", "the site is taken modulo 256", "site 8 bits",
  "one('dropout', (3, 40), p=0.3, key=key(site=300))", ("key.site, np.uint64", "key.site % 256, np.uint64"))
w("dropout", "sample_16_bits", "samples wrap at 65536", "sample 16 bits",
  "one('dropout', (3, 40), p=0.3, key=key(sample=70000))", ("np.uint64(key.sample) + np.arange(batch", "np.uint64(key.sample % 65536) + np.arange(batch"))
w("dropout", "step_and_site_swapped", "step and site are in each other's counter", "step site swapped counter",
  "one('dropout', (3, 40), p=0.3, key=key())", ("(batch, blocks), key.step,", "(batch, blocks), key.SITE,"), ("(batch, blocks), key.site,", "(batch, blocks), key.step,"), ("key.SITE", "key.site"))
w("dropout", "words_transposed", "element i owns word i // blocks of counter i % blocks", "word order index",
  "one('dropout', (3, 40), p=0.3, key=key())", ("words.reshape(batch, 4 * blocks)", "words.transpose(0, 2, 1).reshape(batch, 4 * blocks)"))
w("dropout", "nine_rounds", "Philox does nine rounds", "philox rounds bits",
  "one('dropout', (3, 40), p=0.3, key=key())", ("range(10)", "range(9)"))
w("dropout", "threshold_16_bits", "p is rounded to 16 bits", "p threshold",
  "one('dropout', (3, 9000), p=0.30001, key=key())._replace(arrays=(np.ones((3, 90000), np.float32),))", ("math.floor(p * 2**32)", "math.floor(p * 2**12) * 2**20"))
w("dropout", "block_16_bits", "the element's counter wraps at 65536 blocks", "counter 16 bits large",
  "one('dropout', (1, 270000), p=0.3, key=key())", ("np.arange(blocks, dtype=np.uint64)[None", "(np.arange(blocks, dtype=np.uint64) % 65536)[None"))
w("dropout", "backward_of_first_mask", "the backward uses the first mask that was drawn for the shape", "mask cached stale",
  "Call('dropout', (np.ones((3, 40), np.float32),), {'p': 0.3, 'key': key(step=8)})", ("    return np.where(kept, x / (1 - p), x.dtype.type(0)), (kept, p)", "    first = keep_mask(x.shape[0], math.prod(x.shape[1:]), p, key._replace(step=0))\n    return np.where(kept, x / (1 - p), x.dtype.type(0)), (first.reshape(x.shape), p)"))

# ---- activations ----

w("swiglu", "halves_swapped", "up and gate are swapped", "swapped halves",
  "one('swiglu', (3, 8))", ("gate, up = x[..., :F], x[..., F:]\n    return", "up, gate = x[..., :F], x[..., F:]\n    return"))
w("swiglu", "dgate_term", "dgate lacks its second term", "gate term",
  "one('swiglu', (3, 8))", ("(s + gate * s * (1 - s))", "s"))
w("swiglu", "dup_without_gate", "dup lacks the gate", "up gate",
  "one('swiglu', (3, 8))", ("dx[..., F:] = dout * gate * s", "dx[..., F:] = dout * s"))
w("swiglu", "naive_sigmoid", "the sigmoid overflows for large gates", "overflow nan sigmoid",
  "one('swiglu', (3, 8), size=200.0)", ("return np.where(x >= 0, 1 / (1 + z), z / (1 + z))", "return np.exp(x) / (1 + np.exp(x))"))
w("swiglu", "clipped_gate", "the gate is clipped at -8", "clip gate",
  "one('swiglu', (3, 8), size=20.0)", ("return gate * sigmoid(gate) * up, x", "return np.maximum(gate, -8) * sigmoid(np.maximum(gate, -8)) * up, x"))
w("swiglu", "columns_floor4", "the last columns behind a multiple of 4 have no gradient", "tail columns",
  "one('swiglu', (3, 14))", ("    return dx\n", "    if F > 4:\n        dx[..., F // 4 * 4 : F] = 0\n    return dx\n"))
w("gelu", "tanh_form", "it is the tanh approximation", "tanh",
  "one('gelu', (30,))", ("return x * cdf(x), x", "return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), x"))
w("gelu", "density_missing", "the gradient lacks x φ(x)", "density term",
  "one('gelu', (30,))", ("(cdf(x) + x * density)", "cdf(x)"))
w("gelu", "density_constant", "the density's constant is 1/√π", "constant density",
  "one('gelu', (30,))", ("math.sqrt(2 * math.pi)", "math.sqrt(math.pi)"))
w("gelu", "flat_tail", "below -3 the result is 0", "tail zero negative",
  "one('gelu', (30,), size=3.0)", ("return x * cdf(x), x", "return np.where(x < -3, x.dtype.type(0), x * cdf(x)), x"))
w("gelu_tanh", "cubic_constant", "the constant is 0.0447", "constant 0.044715",
  "one('gelu_tanh', (30,))", ("    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)\n    return", "    inner = math.sqrt(2 / math.pi) * (x + 0.0447 * x**3)\n    return"))
w("gelu_tanh", "slope_without_3", "the slope of the cube lacks its 3", "derivative factor 3",
  "one('gelu_tanh', (30,))", ("(1 + 3 * 0.044715 * x**2)", "(1 + 0.044715 * x**2)"))
w("gelu_tanh", "exact_gradient", "the gradient is that of x σ(1.702 x)", "gradient sigmoid approximation",
  "one('gelu_tanh', (30,))", ("return dout * (0.5 * (1 + h) + 0.5 * x * (1 - h * h) * dinner)", "s = 1 / (1 + np.exp(-1.702 * x))\n    return dout * (s + 1.702 * x * s * (1 - s))"))
w("relu", "gradient_at_zero", "the gradient at 0 is dout", "kink zero",
  "one('relu', (5,), put=[0.0, 0.0])", ("np.where(x > 0, dout,", "np.where(x >= 0, dout,"))
w("relu", "nan_is_zero", "NaN comes out as 0", "nan",
  "one('relu', (5,), put=[np.nan])", ("np.where(x <= 0, x.dtype.type(0), x)", "np.where(x > 0, x, x.dtype.type(0))"))
w("relu", "in_place", "x is overwritten", "input changed written",
  "one('relu', (5,))", ("    return np.where(x <= 0, x.dtype.type(0), x), x", "    x[x <= 0] = 0\n    return x, x"))
w("relu", "leaky", "negative inputs leak by 0.01", "negative leak",
  "one('relu', (5,))", ("np.where(x <= 0, x.dtype.type(0), x)", "np.where(x <= 0, x.dtype.type(0.01) * x, x)"))

# ---- add, scale, heads ----

w("add", "middle_axis_kept", "the gradient of a repeated middle axis is its first slice", "broadcast gradient sum",
  "two('add', (2, 3, 4), (2, 1, 4))", ("dout = dout.sum(axis=axis, keepdims=True)", "dout = dout.take([0], axis=axis)"))
w("add", "leading_axis_mean", "the gradient of a missing axis is a mean", "broadcast mean sum",
  "two('add', (2, 3, 4), (4,))", ("dout = dout.sum(axis=0)", "dout = dout.mean(axis=0)"))
w("add", "in_place", "the sum is written into a", "input changed written",
  "two('add', (2, 3), (2, 3))", ("return np.add(a, b), (a.shape, b.shape)", "return (np.add(a, b, out=a) if a.shape == np.broadcast_shapes(a.shape, b.shape) else a + b), (a.shape, b.shape)"))
w("add", "a_not_summed", "da of a broadcast a is what fits its shape", "broadcast da",
  "two('add', (1, 4), (3, 4))", ("return sum_to(dout, a_shape).copy(), sum_to", "da = sum_to(dout, a_shape).copy()\n    if da.shape != dout.shape and dout.ndim == da.ndim:\n        da = dout[tuple(slice(n) for n in a_shape)].copy()\n    return da, sum_to"))
w("scale", "out_ignored", "out= is not written", "out",
  "Call('scale', (np.ones((2, 3), np.float32),), {'factor': 2.5, 'out': np.zeros((2, 3), np.float32)})", ("        out[...] = y\n        y = out\n", "        y = out\n"))
w("scale", "factor_float16", "the factor is a float16", "float16 factor precision",
  "one('scale', (5,), factor=0.1)", ("np.multiply(x, x.dtype.type(factor))", "np.multiply(x, x.dtype.type(np.float16(factor)))"))
w("scale", "backward_divides", "the gradient is divided by the factor", "factor backward",
  "one('scale', (5,), factor=0.1)", ("return dout * dout.dtype.type(factor)", "return dout / dout.dtype.type(factor)"))
w("split_heads", "equal_parts", "three parts are cut alike where they can be", "heads parts",
  "one('split_heads', (2, 3, 6, 2), heads=(4, 1, 1))", ("    parts, begin = [], 0\n", "    if len(heads) == 3 and sum(heads) % 3 == 0:\n        return tuple(np.split(x, 3, axis=2)), x.shape\n    parts, begin = [], 0\n"))
w("split_heads", "last_two_exchanged", "the last two parts are exchanged when alike", "order parts swapped",
  "one('split_heads', (2, 3, 4, 2), heads=(2, 1, 1))", ("    return tuple(parts), x.shape", "    if len(parts) > 2 and parts[-1].shape == parts[-2].shape:\n        parts[-1], parts[-2] = parts[-2], parts[-1]\n    return tuple(parts), x.shape"))
w("split_heads", "backward_exchanged", "the gradient takes the last two parts the other way when alike", "order gradient parts swapped",
  "one('split_heads', (2, 3, 4, 2), heads=(2, 1, 1))", ("    for part in dout:\n", "    if len(dout) > 2 and dout[-1].shape == dout[-2].shape:\n        dout = (*dout[:-2], dout[-1], dout[-2])\n    for part in dout:\n"))
w("merge_heads", "tokens_and_heads", "heads are merged before tokens when T = H", "transposed heads tokens",
  "one('merge_heads', (2, 3, 3, 4))", ("    return y, x.shape", "    if T == H:\n        y = x.transpose(0, 2, 1, 3).reshape(B, T, H * d).copy()\n    return y, x.shape"))
w("merge_heads", "backward_interleaved", "the gradient takes head and width the other way when H = d", "interleaved transposed heads",
  "one('merge_heads', (2, 3, 4, 4))", ("    return dx\n", "    return dx.swapaxes(2, 3).copy() if H == d else dx\n"))
w("merge_heads", "memory_order", "x is read in memory order", "stride contiguous",
  "one('merge_heads', (2, 3, 4, 5), transposed=True)", ("    y = np.empty((B, T, H * d), x.dtype)\n", "    y = np.empty((B, T, H * d), x.dtype)\n    x = x.ravel(order='K').reshape(x.shape)\n"))

# ---- kv_cache, write_kv, decode_step ----

w("kv_cache", "values_are_keys", "values and keys are one array", "same array alias",
  "cache_of()", ("values.append(np.zeros(shape, dtype))", "values.append(keys[-1])"))
w("kv_cache", "always_float32", "the cache is float32 whatever the parameters are", "dtype float32",
  "cache_of(dtype=np.float64)", ('dtype = params["embedding.weight"].dtype', "dtype = np.float32"))
w("kv_cache", "window_of_first_layer", "all layers keep what the first one does", "window layer",
  "cache_of(window=(2, 4))", ("kept_slots(config, layer, length), config", "kept_slots(config, 0, length), config"))
w("kv_cache", "alibi_keeps_window", "an ALiBi layer keeps its window only", "alibi window",
  "cache_of(window=2, position='alibi')", ('if window and config.position != "alibi":', "if window:"))
w("kv_cache", "window_plus_one", "a window keeps one slot too many", "window off by one",
  "cache_of(window=2)", ("return min(length, window)", "return min(length, window + 1)"))
w("kv_cache", "not_zeroed", "the cache is not empty", "zero empty",
  "cache_of()", ("keys.append(np.zeros(shape, dtype))", "keys.append(np.full(shape, 1e-3, dtype))"))
w("write_kv", "position_of_first_row", "all rows are written at row 0's position", "position row",
  "write(position=np.array([1, 4]))", ("p = int(first[b])", "p = int(first[0])"))
w("write_kv", "value_is_key", "v is written where k is", "v k",
  "write()", ("cache.v[layer][b, p : p + T] = v[b]", "cache.v[layer][b, p : p + T] = k[b]"))
w("write_kv", "first_token_only", "only the first of T tokens is written", "tokens T",
  "write()", ("cache.k[layer][b, p : p + T] = k[b]", "cache.k[layer][b, p : p + 1] = k[b, :1]"))
w("write_kv", "layer_zero", "v always goes to layer 0", "layer",
  "write()", ("cache.v[layer]", "cache.v[0]"))
w("write_kv", "position_int8", "positions wrap at 128", "int8 position",
  "write(S=300, position=200)", ("p = int(first[b])", "p = int(first[b]) % 128"))
w("write_kv", "row_zero_missing", "the last row is not written when rows stand apart", "row last position",
  "write(position=np.array([1, 4]))", ("for b in range(k.shape[0]):", "for b in range(k.shape[0] - (len(set(first.tolist())) > 1)):"))
w("decode_step", "key_not_normed", "QK-norm skips the keys", "qk_norm key",
  "dec(qk_norm=True)", ("            k = rmsnorm_forward(k, params[f\"{name}.attention.k_norm.gain\"], eps=config.norm_eps)[0]\n", ""))
w("decode_step", "norm_after_rope", "QK-norm of the queries uses the keys' gain", "qk_norm gain",
  "dec(qk_norm=True)", ("attention.q_norm.gain", "attention.k_norm.gain"))
w("decode_step", "window_of_first_layer", "every layer has the first one's window", "window layer",
  "dec(steps=9, window=(2, 5), kind='alibi')", ("config.window_of(layer), S", "config.window_of(0), S"))
w("decode_step", "window_one_more", "an ALiBi layer's window holds one key too many", "window off by one",
  "dec(steps=9, window=3, kind='alibi')", ("positions[:, None] - where < window", "positions[:, None] - where <= window"))
w("decode_step", "rope_of_first_row", "all rows turn by row 0's position", "position row rope",
  "dec(position=[2, 5])", ("start=positions, scaling", "start=int(positions[0]), scaling"))
w("decode_step", "ring_not_wrapped", "what lies behind the ring's start is not seen once it wraps", "ring wrap window",
  "dec(steps=8, window=3)", ("may = where >= 0", "may = slot <= positions[:, None] % ring"))
w("decode_step", "alibi_by_slot", "ALiBi's slopes of other counts than powers of two", "alibi slopes heads",
  "dec(n_heads=3, kind='alibi', d_model=12)", ("return np.array(geometric(lower) + geometric(2 * lower)[0::2][: n - lower])", "return np.array(geometric(n))"))
w("decode_step", "learned_off_by_one", "the learned position is one late", "position off by one learned",
  "dec(kind='learned')", ('params["position.weight"][positions]', 'params["position.weight"][np.minimum(positions + 1, config.context_length - 1)]'))
w("decode_step", "post_norm_missing", "post-norm leaves out the second norm", "post norm",
  "dec(norm_placement='post')", ('            x = normed(params, config, f"{name}.ffn_norm", x)\n    if pre', "            pass\n    if pre"))
w("decode_step", "head_bias_ignored", "the head's bias is ignored", "head bias",
  "dec(head_bias=True)", ('return z + params["head.bias"] if "head.bias" in params else z', "return z"))
w("decode_step", "untied_head_ignored", "an untied head reads the embedding", "tied head",
  "dec(tied=False)", ('"embedding.weight" if config.tied else "head.weight"', '"embedding.weight"'))
w("decode_step", "norm_eps_fixed", "ε is 1e-5 whatever the config", "eps",
  "dec(norm_eps=0.1)", ("rmsnorm_forward(x, gain, eps=config.norm_eps)", "rmsnorm_forward(x, gain, eps=1e-5)"))
w("decode_step", "gelu_for_tanh", "the tanh form of GELU is the exact one", "gelu tanh",
  "dec(ffn='gelu_tanh')", ('"gelu_tanh": gelu_tanh_forward', '"gelu_tanh": gelu_forward'))
w("decode_step", "sinusoid_layout", "sines stand before cosines", "sinusoidal interleaved",
  "dec(kind='sinusoidal')", ("waves = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(B, D)", "waves = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)"))
w("decode_step", "value_not_written", "the value of the newest token goes one slot on", "value slot cache",
  "dec()", ("cache.v[layer][rows, slot] = v", "cache.v[layer][rows, (slot + 1) % S] = v"))
w("decode_step", "output_bias", "the bias of attention's way out is left out", "bias attention output",
  "dec(attn_bias=True)", ('f"{name}.attention.wo", f"{name}.attention.bo", h', 'f"{name}.attention.wo", "", h'))
w("decode_step", "heads_by_remainder", "query head h reads key head h % Hkv", "head mapping",
  "dec(n_heads=4, n_kv_heads=2)", ("q.reshape(B, Hkv, G, d), k) /", "q.reshape(B, G, Hkv, d).swapaxes(1, 2), k) /"), ('np.einsum("bhgs,bshd->bhgd", p, v).reshape', 'np.einsum("bhgs,bshd->bghd", p, v).reshape'))
w("decode_step", "rope_base_fixed", "the RoPE base is 10000 whatever the config", "base rope",
  "dec(steps=9)", ("base=config.rope_base", "base=10000.0"))
