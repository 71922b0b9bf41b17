"""Tasksets and scorers: where problems come from, how they become tokens, what an answer earns.

taskset.py     configs and `load_taskset`: rows of a file, of a dataset or of a generator
rows.py        one row -> one Task, or an error that names the line
splits.py      which tasks search, select and report may see
generators.py  tasksets made from a seed, on the words of wordlists.py
template.py    Task -> tokens of one model
scorers/       Task x Completion -> reward
"""

__all__: list[str] = []
