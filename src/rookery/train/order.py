"""Which data each step takes: epochs of shuffled data, cut into batches, by the seed alone.

Data of 5 rows, batches of 2: step 0 takes two rows of the first epoch's order, step 1 two more,
step 2 the last one and the first of the second epoch's order, and so on.
"""

from collections.abc import Iterator, Sequence

from rookery.seeding import bulk_stream

__all__ = ["order_batches", "order_rows"]


def order_batches(
    sizes: Sequence[int], *, rows: Iterator[int], batch_size: int, batch_tokens: int | None
) -> Iterator[list[int]]:
    """Batches of `batch_size` rows, or with `batch_tokens` of as many as fit in that many tokens.

    A row over `batch_tokens` is a batch of its own. `sizes` are the rows' tokens.
    """
    batch: list[int] = []
    num_tokens = 0
    for row in rows:
        is_full = len(batch) == batch_size
        if batch_tokens is not None:
            is_full = bool(batch) and num_tokens + sizes[row] > batch_tokens
        if is_full:
            yield batch
            batch, num_tokens = [], 0
        batch.append(row)
        num_tokens += sizes[row]
    if batch:
        yield batch


def order_rows(num_rows: int, *, seed: int, epochs: int | None) -> Iterator[int]:
    """Every row once per epoch, each epoch in an order of its own; None does not end."""
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from bulk_stream("order", seed, epoch).permutation(num_rows).tolist()
        epoch += 1
