"""The benchmarks of the trainer and of the tokenizer, with the report of ``accel/bench/``."""
