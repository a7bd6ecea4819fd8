"""``myllm sweep``: many small runs that differ in a few keys, and what came of them."""
