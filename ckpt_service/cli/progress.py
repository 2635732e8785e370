"""One line that is written over while a verb waits; on a terminal only."""

from __future__ import annotations

import sys

_MOST_COLUMNS = 200


class ProgressLine:
    """A context in which :meth:`show` replaces the line on standard error; it is gone afterwards."""

    def __init__(self) -> None:
        self._shown = ""
        self.wanted = sys.stderr.isatty()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        if self.wanted and text != self._shown:
            sys.stderr.write(f"\r\x1b[K{text[:_MOST_COLUMNS]}")
            sys.stderr.flush()
            self._shown = text
