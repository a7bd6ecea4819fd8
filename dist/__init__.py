"""Training, and the command ``myllm``."""
