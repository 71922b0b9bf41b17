"""Models that are built in several threads at a time."""

import threading
from pathlib import Path

from rookery.slots import load_model
from rookery.slots.loading import weight_shapes


def test_a_model_is_whole_while_another_thread_describes_one(tiny_folder: Path) -> None:
    is_over = threading.Event()

    def describe() -> None:
        while not is_over.is_set():
            weight_shapes(tiny_folder)

    thread = threading.Thread(target=describe)
    thread.start()
    try:
        for _ in range(6):
            weights = load_model(tiny_folder).weights
            assert not any(weight.is_meta for weight in weights.values())
    finally:
        is_over.set()
        thread.join()
