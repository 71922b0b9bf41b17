"""evolve: programs evolved by a language model.

config/          OpenEvolve's config files, and our own keys under `rookery:`
program.py       a program with all that is known of it
source_files.py  folders as one text
first_program.py the program to start from, checked
language.py      what language a program is in
blocks.py        EVOLVE-BLOCK markers
diffs.py         SEARCH/REPLACE blocks and fenced rewrites
failures.py      why an answer gives no child
answers.py       from an answer to a child program or a failure
fitness.py       one number out of an evaluator's metrics
templates.py     prompt templates, and a user's own over them
prompts.py       the prompt of an iteration
history.py       earlier programs in a prompt
artifacts.py     what an evaluation printed, in a prompt
feedback.py      what models say of a program, as metrics
checkpoints/     checkpoint and `best` folders that OpenEvolve reads, and reading its own
trace.py         evolution_trace
"""

__all__: list[str] = []
