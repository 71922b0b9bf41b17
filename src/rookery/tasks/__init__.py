"""Tasksets and scorers: sources of tasks, their encoding as tokens, and rewards of answers.

taskset.py     configs and `load_taskset`: rows of a file, a dataset or a generator -> tasks
files.py       files and datasets -> rows
python_function.py  user functions, named by file or module
rows.py        one row -> one Task, or an error that names the line
splits.py      the disjoint task sets of search, select and report
generators.py  tasksets generated from a seed, and their words
template.py    Task -> tokens of one model
scorers/       Task x Completion -> reward
"""

__all__: list[str] = []
