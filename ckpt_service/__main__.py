"""``python -m ckpt_service`` is the command line."""

from ckpt_service.cli import main

if __name__ == "__main__":
    main()
