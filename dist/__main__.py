"""``python -m dist`` is the command ``myllm``, for a checkout that is not installed."""

import sys

from dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
