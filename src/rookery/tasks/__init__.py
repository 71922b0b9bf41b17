"""Tasksets and scorers: where problems come from, how they become tokens, what an answer earns.

taskset.py     configs and `load_taskset`: rows of a file, a dataset or a generator -> tasks
files.py       files and datasets -> rows
python_function.py  functions of the user, by file and name
rows.py        one row -> one Task, or an error that names the line
splits.py      which tasks search, select and report may see
generators.py  tasksets made from a seed, and their words
template.py    Task -> tokens of one model
scorers/       Task x Completion -> reward
"""

__all__: list[str] = []
