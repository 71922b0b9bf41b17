"""Rows of a Hugging Face dataset: from the hub, or a local file or folder. `datasets` reads it,
all but a .csv, .json or .jsonl file, which needs no package.

read_dataset("openai/gsm8k", subset="main", split="test")
read_dataset("claims.csv")
read_dataset("mmlu.json", key="test")
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from rookery.errors import TaskError, boundary
from rookery.tasks.files import read_csv, read_json, read_jsonl
from rookery.tasks.rows import Row

__all__ = ["LOCAL_FORMATS", "read_dataset"]

LOCAL_FORMATS = (".csv", ".json", ".jsonl", ".parquet")
"""The names of files that can be a dataset."""


def read_dataset(
    dataset: str,
    *,
    subset: str = "",
    split: str = "train",
    key: str = "",
    on_bad: Callable[[TaskError], None] | None = None,
) -> Iterator[Row]:
    """The rows of one split, or under one key of a .json file.

    A single file has only the split `train`. `on_bad` is told of lines that are no row.
    """
    path = Path(dataset).expanduser()
    if key and not (path.is_file() and path.suffix == ".json"):
        raise TaskError(
            f"key is {key!r}, which names the list of rows in a .json file, and {dataset} is not "
            "one: leave key out. A dataset's own split is named by split."
        )
    if not path.is_file() or path.suffix not in (".csv", ".json", ".jsonl"):
        return _read_with_datasets(dataset, path, subset=subset, split=split)
    if split != "train":
        raise TaskError(
            f"split is {split!r}, and the file {path} has none: leave split out. The list of rows "
            "in a .json file is named by key."
        )
    if path.suffix == ".csv":
        return read_csv(path, on_bad=on_bad)
    if path.suffix == ".jsonl":
        return read_jsonl(path, on_bad=on_bad)
    return read_json(path, key=key, on_bad=on_bad)


def _read_with_datasets(dataset: str, path: Path, *, subset: str, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            "Reading a dataset needs the package datasets: pip install 'rookery[hf]'. "
            "Files of CSV, JSON and JSON lines need nothing."
        ) from error
    if path.is_file() and path.suffix not in LOCAL_FORMATS:
        raise TaskError(f"{path} is none of {', '.join(LOCAL_FORMATS)}: convert it to one of them.")
    with boundary(
        TaskError,
        f"Reading the split {split!r} of the dataset {dataset}",
        remedy={
            ConnectionError: "The hub was not reached: check the network, or give a local file",
            FileNotFoundError: "Check the id, the access, or give the path of a local file",
        },
    ):
        try:
            if path.is_file():
                rows = datasets.load_dataset(path.suffix[1:], data_files=str(path), split=split)
            elif (path / "dataset_info.json").is_file():
                rows = datasets.load_from_disk(str(path))
            elif (path / "dataset_dict.json").is_file():
                rows = datasets.load_from_disk(str(path))[split]
            else:
                rows = datasets.load_dataset(str(dataset), name=subset or None, split=split)
        except datasets.exceptions.DatasetGenerationError as error:
            # Its own sentence says only that an error occurred.
            raise error.__cause__ or error from None
    for number, fields in enumerate(rows, start=1):
        yield Row(where=f"{dataset} [{split}] row {number}", fields=fields)
