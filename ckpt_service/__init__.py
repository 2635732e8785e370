"""The checkpoint daemon, and what it and the trainers agree on. Importing this package never imports torch."""

from ckpt_service._version import __version__

__all__ = ["__version__"]
