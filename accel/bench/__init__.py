"""``myllm bench``: what this code costs, beside others' where they are installed.

``timing.py`` takes times, ``report.py`` prints a row the moment it is measured, ``training.py`` is
a model of ours in training and ``peer.py`` the same in PyTorch. ``cpu.py`` and ``cuda.py`` measure
the backends; the benchmarks of the trainer and the tokenizer are in ``dist/bench/``.
"""
