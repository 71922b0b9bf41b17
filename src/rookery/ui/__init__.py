"""What a person sees of a finished or unfinished run: one HTML page and the rows of a table.

display    progress while something runs               wording  numbers as people read them
headline   the result in one number and one sentence   table    plain strings for a terminal
page       the self-contained HTML page                vendor/  the chart library, as published
icm        the same of a labelling: records, page, table
"""

__all__: list[str] = []
