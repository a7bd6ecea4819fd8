"""Which hints name a planted mistake: by the op and the title of a wrong kernel, a pattern.

``judge`` counts: a hint that fits the pattern is right; one that asks a question and does not fit
misleads; an observation that does not fit does neither.

    python -m tests.helpers.kernels.hinted
"""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from accel.verify import check_module
from tests.helpers.kernels.patches import PATCHES, Patch
from tests.helpers.kernels.subtle import SUBTLE
from tests.helpers.kernels.wrong import WRITTEN, Written

_TABLE = """
attention: scale missing in dq | scale.*missing|missing scale|√d
attention: scale twice in dk | `?(scale|s_)`?.*twice|once too often|1/√d
attention: mask leaves out the diagonal | one key too few|`?>`? for|self.distance > 0
attention: mask shows one key too many | one key too many
attention: causal from the top left | top left
attention: key mask turned around | key_mask.*turned around
attention: documents of the wrong queries | documents.*(first|S - T)
attention: documents compared with ≥ | document.*>=
attention: ALiBi with the wrong sign | sign of ALiBi
attention: ALiBi by distance either way | ALiBi.*either way|ALiBi.*distance
attention: slopes in the wrong order of heads | slopes|alibi.*order
attention: query heads interleaved over key heads | head mapping
attention: dv of the first head of a group only | first.*group|group.*first
attention: mean over the group for sum in dk | mean for sum
attention: dropout missing in dP | dP \\* kappa|dropout.*missing|kappa.*missing
attention: dropout missing in dv | dropout|kappa
attention: no 1/(1 - p) in attention | 1/\\(1 - p\\)|1 - dropout.p
attention: rows with nothing allowed give a mean | nothing.*zeros|attend to nothing
attention: no maximum taken off | maximum
attention: softmax backward without its mean | dp \\* p.*missing|Σ dp p
rmsnorm: ε outside the root | eps outside
rmsnorm: sum for mean of squares | sum for mean
rmsnorm: the projection along n missing | mean\\(dn . n\\) missing
rmsnorm: gain missing in dx | gain.*missing|factor `g` missing
rmsnorm: mean for sum in dgain | mean for sum
rmsnorm: dgain of the first axis only | first axis|axis 0
layernorm: variance by D - 1 | D - 1
layernorm: mean(dn) missing | mean\\(dn\\).* missing
layernorm: the mean not taken off | mean not taken off
layernorm: dbias is dgain | dbias.*dgain|dbias is made|factor|`dy \\* n` for
layernorm: variance that cancels | mean\\(x²\\)
rope: sine with the wrong sign | other way|sign
rope: start ignored | start ignored
rope: positions from one | positions off by one
rope: the first row's start for all | first row's start
rope: the backward turns on | turn the same way
rope: frequencies by j/d | j/d
rope: angles in float32 | angles.*float32
rope: all heads turn | rotate_heads ignored
rope: scaling ignored | scaling ignored|scaling.*(not used|left out)|without scaling
rope: scaling of every pair | scaling
rope: scaling without a blend | scaling|blend
rope: 2π left out of the wavelength | 2π|scaling
rmsnorm: plus forgotten | plus
layernorm: plus written into | plus.*written into
linear: residual stream forgotten | plus
linear: residual stream written into | plus.*written into
linear: residual stream in dx | plus
swiglu: gate and up swapped | gate and up swapped
swiglu: gradients swapped | gradients.*swapped|dgate and dup swapped
swiglu: σ for its derivative | missing|σ
gelu: the density missing | density.*missing
relu: gradient at the kink | x is 0|at 0|kink|>=
scale: scale missing in the backward | the factor is missing|factor.*missing
dropout: no 1/(1 - p) | 1/\\(1 - p\\)
dropout: no 1/(1 - p) in the backward | 1/\\(1 - p\\)
dropout: dropout keeps what it should drop | turned around|kept.*dropped|keeps what
dropout: the sample's number ignored | sample
dropout: the high half of the seed lost | seed
embedding: repeated ids overwrite | repeated id overwritten
linear: dx with W | untransposed|`W.T` missing
linear: bias left out | bias left out
split_heads: heads cut in the wrong order | order|swapped
merge_heads: heads after tokens | heads.*(swapped|order|after)|swapped|laid out
linear_cross_entropy: mean for sum in the loss | mean for sum
linear_cross_entropy: masked targets counted | masked.*counted|n_valid|mask left out
linear_cross_entropy: dloss ignored | dloss.*not used|dloss.*missing
linear_cross_entropy: one-hot forgotten | one-hot|- 1.*missing|term `1` missing
linear_cross_entropy: masked rows pass a gradient | mask
linear_cross_entropy: the last chunk lost | last.*(chunk|tile)|rows > 256|256|chunk
linear_cross_entropy: dhead of the last chunk only | last chunk|assigned rather|rows > 256
softmax: softmax over the wrong axis | axis 0|first axis
adamw: ε inside the root | eps inside
adamw: no bias correction | bias correction.*(missing|left out)|1 - beta1
adamw: coupled decay | coupled
adamw: everything decays | applied to all
adamw: clipping forgotten | grad_scale ignored
adamw: v of g rather than g² | g²|factor `g` missing
muon: the norm is not taken off | not divided by its norm
muon: a coefficient left out | 2.0315
muon: four steps of Newton-Schulz | step of Newton-Schulz missing
muon: no look ahead | look ahead missing
muon: matrices side by side as one | orthogonalised as one
muon: the factor of wide matrices for all | columns alone
muon: clipping forgotten | grad_scale
square_sums: float32 sums | float32
square_sums: blocks off by one | one too few|off by one|last.*block
global_norm: no root | root|sqrt
accumulate: assigned, not added | assigned rather than added|dst.*missing
rmsnorm: out= forgotten | out=
embedding: tied gradient forgotten | accumulate
gelu_tanh: tanh form's constant | 0.044715|constant
rmsnorm: stale cache | stale cache
rope: table of angles kept by shape | stale cache|in between|earlier call|refilled
gelu: one buffer for every result | later call
relu: strides ignored | strides
swiglu: dout written into | written into
attention: cache written into | second backward|cache.*written|second call
attention: last tile of 16 lost | S > 16|last tile of 16|multiple of 16
attention: last tile of 64 lost | S > 64|last tile of 64|multiple of 64
attention: last tile of 128 lost in dk | S > 128|last tile of 128|multiple of 128
attention: dv wrong for groups of five | G > 4|G = 5|G
attention: mask lost with groups | key_mask left out|key_mask given
linear: float16 inside | float16
softmax: float32 inside | float32
scale: promotes to float64 | dtype in is dtype out
layernorm: written behind the end | behind the out=
linear_cross_entropy: masked targets read | masked targets read
rope: pairs j with j + d/2 | wrong pairs
attention: dk of one head lost in groups of three | G = 3|G
attention: dk of masked keys not zero | mask|is 0|is wrong only
attention: the last of an odd number of keys left out of dq | odd S|S
attention: P of the backward off by 2e-4 | 1.0002|S > 16|1 times
attention: scale is 1/d | 1/d rather
attention: the option scale ignored | option scale ignored
attention: documents of the batch's first row for all | documents.*first row
attention: key mask of the batch's first row for all | key_mask.*first row
attention: scale by the width of the values | width of the values|d ≠ dv|dv
attention: the dropout's step ignored | step
attention: a scale of one taken for none | scale = 1|option scale ignored
attention: the last query of the last tile sees all but itself | last index|last tile|T > 64
attention: bf16: the last tile's padding is not masked | S|last tile
attention: bf16: a tile on the diagonal taken for a whole one | T|S|causal
attention: bf16: a small tile on the diagonal taken for a whole one | T|S|causal
add: broadcast not summed | broadcast|not summed|sum.*missing
rope: rotate_heads = 0 taken for all | rotate_heads ignored|rotate_heads = 0|all heads
rope: negative positions taken for positive | start < 0|start|negative
rope: starts in 12 bits | start > |start
rope: the backward turns all heads | rotate_heads ignored
rmsnorm: ε rounded to float32 | eps.*float32
rmsnorm: dgain of the first 128 rows only | rows > 128
rmsnorm: a dout that is not contiguous read as if it were | dout is contiguous|strides
layernorm: dbias of the batch's last row only | axes|first axis|last row|batch
linear: dweight without the last of an odd number of rows | odd rows|rows
linear: dx by a weight rounded to bf16 | weight rounded to bf16
linear: bias gradient over the wrong axis | axis
linear: packed weights kept by shape | stale cache|in between|earlier call|refilled
embedding: the last id's row left out | last
embedding: an id counted 32 times at most | rows > 32|times|32
linear_cross_entropy: no valid target counted as one | no valid|max\\(1
linear_cross_entropy: dbias of masked rows, too | mask
linear_cross_entropy: the sign of dloss lost | sign
swiglu: σ that overflows | overflow
gelu_tanh: x² for 3x² in the slope | factor `3` missing|3
dropout: the site's number cut off | site
dropout: no 1/(1 - p) where p is a half | 1/\\(1 - p\\)|p = 0.5
logits: bias left out of the logits | bias left out
adamw: nothing decays taken for everything | n_decayed = 0|applied to all
adamw: no bias correction from step 1,000 on | step.*1,?000|step >|bias correction
global_norm: a last, partial block lost | 65,?536|n >|last
accumulate: a strided destination copied | strides|contiguous
write_kv: the first row's position for all | first row's position
write_kv: the last place wraps around | last place|last index|wrap
write_kv: only the last token written | last token|T > 1
kv_cache: a cache that is not empty | not empty|zeros
kv_cache: k and v in one and the same memory | same memory
kv_cache: a head for every query head | shape
decode_step: what is stale in a shorter row is seen | key_mask left out|position for each row|mask
decode_step: key/value head i % Hkv | head mapping
decode_step: a new token stands at zero | start ignored
decode_step: written one place late | one too far
decode_step: the third layer's cache forgotten | n_layers > 2|n_layers = 3|layer
"""


class Named(NamedTuple):
    """A wrong kernel, and what a hint must say to name what is wrong with it."""

    op: str
    title: str
    kernel: Any
    wrong: str
    dtype: str
    pattern: str


def corpus() -> Iterator[Named]:
    """Yield every planted kernel with the pattern of its hint."""
    lines = (line.rsplit(" | ", 1) for line in _TABLE.strip().splitlines())
    patterns = {what.strip(): pattern.strip() for what, pattern in lines}
    every: list[Patch | Written] = [*PATCHES, *WRITTEN, *SUBTLE]
    for wrong in every:
        dtype = getattr(wrong, "dtype", "float32")
        pattern = patterns.pop(f"{wrong.op}: {wrong.title}")
        yield Named(wrong.op, wrong.title, wrong.kernel, wrong.wrong, dtype, pattern)
    assert not patterns, f"no kernel is called {', '.join(patterns)}"


def judge(pattern: str, hints: Sequence[str]) -> str:
    """Say what hints are worth: right, misleading or none."""
    if any(re.search(pattern, hint, re.IGNORECASE) for hint in hints):
        return "right"
    return "misleading" if any("?" in hint for hint in hints) else "none"


def findings(named: Named, **options: Any) -> tuple[str, list[str], str]:
    """Return what the hints of one kernel are worth, they, and the report."""
    few = 60 if named.op == "attention" else None  # its cases are slow, and a few dozen enough
    options = {"examples": few, "raises": False, **options}
    report = check_module(named.kernel, ops=[named.op], dtypes=[named.dtype], **options)
    shown = [f for f in report.failures if named.wrong in (f.name, *f.also)]
    if not shown:
        return "uncaught", [], ""
    hints = [hint for failure in shown for hint in failure.hints]
    said = [*hints, *(failure.judged.problem for failure in shown)]
    return judge(named.pattern, said), hints, shown[0].case.describe()


def main() -> None:
    """Print the hints of every kernel, and how many are right."""
    counts: dict[str, int] = {}
    for named in corpus():
        if not re.search(sys.argv[1] if sys.argv[1:] else "", f"{named.op}: {named.title}"):
            continue
        started = time.monotonic()
        worth, hints, case = findings(named)
        counts[worth] = counts.get(worth, 0) + 1
        seconds = time.monotonic() - started
        print(
            f"{worth:<11}{seconds:5.1f} s  {named.op}: {named.title}\n    {case[:150]}", flush=True
        )
        for hint in hints:
            print(f"    {hint}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
