"""Experiments on the demo's corpus: what positions, norms and heads do to a small model.

Each file holds one experiment and the claims of the literature that it can speak of;
``myllm study ablations`` runs all and writes one page. Texts are taken byte by byte, so there is no
tokenizer between a choice and its loss.
"""
