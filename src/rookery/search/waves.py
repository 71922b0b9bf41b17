"""What a race asks next, also while answers are still out: whole blocks, the same for all.

waves = Waves(race, size=64)
asks = waves.next()          # candidate -> tasks; empty when everything has been asked for
"""

import math

from rookery.search.racing import Race

__all__ = ["Waves"]


class Waves:
    """The questions of one race. Owned and changed by whoever asks them."""

    def __init__(self, race: Race, *, size: int) -> None:
        """`size` is the number of answers of a wave at least: what fills the engine."""
        self._race = race
        self._size = size
        self._asked = race.num_told

    def next(self) -> dict[str, tuple[str, ...]]:
        """The next tasks of each live candidate; a candidate that came back after a rival failed is
        also asked for what it missed. Empty when all are asked for."""
        tasks, block = self._race.tasks, self._race.config.block
        open_names = [name for name in self._race.live if self._asked[name] < len(tasks)]
        if not open_names:
            return {}
        num_blocks = max(1, math.ceil(self._size / (block * len(open_names))))
        end = max(self._asked[name] for name in open_names) + num_blocks * block
        asks = {name: tasks[self._asked[name] : end] for name in open_names}
        self._asked |= {name: min(end, len(tasks)) for name in open_names}
        return asks
