"""What several tests share: cases, models, runs, kernels right and wrong, stand-ins."""

import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository

# what the caller has us ignore (under nohup, in the background) all that we start would ignore
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
