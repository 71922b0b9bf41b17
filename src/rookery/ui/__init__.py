"""What a person sees of a finished or unfinished run: one HTML page and the rows of a table.

display    progress while something runs               wording  numbers and rows as people read them
headline   the result in one number and one sentence
page       the self-contained HTML page                vendor/  the chart library, as published
grpo, icm, evolve  the same of a training, a labelling, an evolution of programs
"""

__all__: list[str] = []
