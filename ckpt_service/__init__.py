"""The checkpoint daemon, and what it and the trainers agree on. Importing this package never imports torch.

Raises:
    ImportError: this is not Linux.
"""

import sys

from ckpt_service._version import __version__

if not sys.platform.startswith("linux"):  # said here, before a module of this package looks for what is not there
    raise ImportError(
        f"ckpt-service needs Linux, and this is {sys.platform}: snapshots are handed over as sealed memory (memfd) and "
        "run directories are held by record locks; run it on Linux, or in a Linux container or virtual machine"
    )

__all__ = ["__version__"]
