"""What a person sees of a finished or unfinished run: one HTML page and the rows of a table.

page       the self-contained HTML page                display  progress while something runs
headline   the result in one number and one sentence   wording  numbers as people read them
table      plain strings for a terminal                vendor/  the chart library, as published
icm        page and table of a labelling
"""

__all__: list[str] = []
