"""evolve: programs evolved by a language model.

loop.py          `evolve`: the whole of it
hub.py           attempts through their stages, many at a time; how a run resumes
order.py         which attempt is asked and told next
stages.py        what each stage of an attempt leaves behind
search_state.py  what the search knows, as a function of what was told
parts.py         what a search is made of
proposer.py      from a plan to a child: prompt, model, answer
endpoint.py      one model: waits while it is down, retries
program_evaluator.py  from a child to its metrics: jobs, confirmation, judges
judges.py        models that judge programs
evaluation_task.py    what workers run: a warm sandbox around the evaluator
first_programs.py     the programs to start from, scored
program_store.py programs as blobs
budget.py        tokens, money, hours
baselines.py     simpler searches with as much to spend
outputs.py       best/, checkpoints/ and the trace
run_log.py       logs/
report.py        the report
export.py        the population without clocks
watcher.py       who is told meanwhile
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
