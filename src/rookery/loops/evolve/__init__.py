"""evolve: programs evolved by a language model.

loop.py          `evolve`: the whole of it, and simpler searches with as much to spend
scheduler.py     attempts through their stages, many at a time; how a run resumes
order.py         which attempt is asked and told next; the backlog, budgets and why a run stops
stages.py        what each stage of an attempt leaves behind
search_state.py  what the search knows, as a function of what was told
parts.py         what a search is made of: models, evaluator, the programs to start from
learning.py      the model trained on the run's own answers
proposer.py      from a plan to a child: prompt, model, answer; children compared by embedding
prompts.py       the prompt of an iteration: templates, history, artifacts
answers.py       from an answer to a child program or a failure: blocks, diffs, rewrites
program_evaluator.py  from a child to its metrics: jobs, confirmation, judges, tuning
tuning.py        the numbers of a program, tuned by CMA-ES
problem.py       the program to start from, checked; what workers run: its evaluator in a sandbox
program.py       a program with all that is known of it: files, document, blob
outputs.py       what is written for others and when: best/, checkpoints/, the trace; logs/
report.py        the report, the population without clocks, training data
config.py, config_sections.py  the config, and its sections
prompt_templates/     what prompts are made of
"""

__all__: list[str] = []
