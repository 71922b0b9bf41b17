"""Rows of a Hugging Face dataset: from the hub, or a local file or folder. `datasets` reads it.

read_dataset("openai/gsm8k", subset="main", split="test")
read_dataset("claims.csv", subset="", split="train")
"""

from collections.abc import Iterator
from pathlib import Path

from rookery.errors import TaskError, boundary
from rookery.tasks.rows import Row

__all__ = ["LOCAL_FORMATS", "read_dataset"]

LOCAL_FORMATS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
"""The file names that are read through `datasets`, and its reader for each."""


def read_dataset(dataset: str, *, subset: str, split: str) -> Iterator[Row]:
    """The rows of one split; a single file has only the split `train`."""
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            "Reading a dataset needs the package datasets: pip install 'rookery[hf]'. "
            "Files of JSON lines need nothing."
        ) from error
    path = Path(dataset).expanduser()
    reader = LOCAL_FORMATS.get(path.suffix) if path.is_file() else None
    if path.is_file() and reader is None:
        raise TaskError(f"{path} is none of {', '.join(LOCAL_FORMATS)}: convert it to one of them.")
    with boundary(
        TaskError,
        f"Reading the split {split!r} of the dataset {dataset}",
        remedy={
            ConnectionError: "The hub was not reached: check the network, or give a local file",
            FileNotFoundError: "Check the id, the access, or give the path of a local file",
        },
    ):
        if reader is not None:
            rows = datasets.load_dataset(reader, data_files=str(path), split=split)
        elif (path / "dataset_info.json").is_file():
            rows = datasets.load_from_disk(str(path))
        elif (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(path))[split]
        else:
            rows = datasets.load_dataset(str(dataset), name=subset or None, split=split)
    for number, fields in enumerate(rows, start=1):
        yield Row(where=f"{dataset} [{split}] row {number}", fields=fields)
