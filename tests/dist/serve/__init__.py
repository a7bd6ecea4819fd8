"""``myllm serve``: what it answers, whom it serves, how it ends, and its page."""
