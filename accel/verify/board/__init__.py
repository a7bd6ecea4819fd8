"""The scoreboard of ``myllm bench verify``: wrong and right kernels, and who tells them apart.

``corpus/`` holds right kernels of every op, one mistake each in 244 copies of them and a call that
shows it; ``mutants.py`` makes more wrong ones by rule; ``outcome.py`` knows what a call has to give
without asking verify; ``rules.py`` are the published rules of others; ``bench.py`` counts.
"""
