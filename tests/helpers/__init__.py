"""What several tests share: cases, models, runs, kernels right and wrong, stand-ins."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
