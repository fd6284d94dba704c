"""Show progress and the time left: tqdm's bar if it is installed and stderr is a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

EVERY = 15.0  #: seconds between lines


class Progress:
    """Show how much of ``budget`` seconds is spent, ``before`` by earlier runs; this run may end after ``stop_after`` seconds."""

    def __init__(self, budget: float, before: float = 0.0, stop_after: float | None = None):
        self.begin, self.budget, self.before = time.monotonic(), budget, before
        self.end = min(budget, before + stop_after) if stop_after else budget
        self.shown = self.begin
        self.bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=round(self.end), initial=round(before), unit="s", bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} s{postfix}")
            except ImportError:
                pass

    def show(self, phase: str, done: int, failed: int) -> None:
        """Show where the run stands, at most a few times a second."""
        now = time.monotonic()
        if now - self.shown < (0.3 if self.bar is not None else EVERY):
            return
        self.shown = now
        spent = self.before + now - self.begin
        left = max(0, round(self.end - spent))
        if self.bar is not None:
            self.bar.n = min(round(spent), self.bar.total)
            self.bar.set_description_str(phase)
            self.bar.set_postfix_str(f"{done} done, {failed} failed, {left} s left at most")
        else:
            print(f"tune: {phase}: {done} done, {failed} failed, {spent:.0f} s, {left} s left at most", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Finish the line."""
        if self.bar is not None:
            self.bar.close()
