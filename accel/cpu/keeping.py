"""What the backward makes again rather than keep, where ``recompute`` is ``"auto"``.

An array that has left the caches is read again from memory, or made again from one that is: the
outputs of a norm and of an activation then lie in the caches when the product that needs them
comes, which pays for a part of the work. A model of 12.6 M parameters and 4,096 tokens saves
168 MiB so in float32, for about 1 % of a step, and 84 MiB in bf16, for 3.5 % (processor time of
one thread of a busy Zen 5, in turns). One of 6 M and 2,048 tokens, whose arrays hardly leave the
caches, would take 3 to 4 % longer in either mode.
"""

from reference.blocks import Recompute
from reference.config import Config

LARGE = 4 << 20  # bytes of the residual stream from which on it is


def recompute(config: Config, tokens: int) -> Recompute:
    """Return what to recompute of a micro-batch of so many tokens."""
    return "norms" if 4 * tokens * config.d_model >= LARGE else "none"
