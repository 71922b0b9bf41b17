"""evolve: programs evolved by a language model.

loop.py          `evolve`, the whole loop, and simpler searches with the same budget
scheduler.py     takes attempts through their stages, many at a time; resumes a run
order.py         the next attempt to ask or tell; backlog, budgets and stop reasons
stages.py        the record of each stage of an attempt
search_state.py  the state of a search, a function of what was told
parts.py         the parts of a search: models, evaluator, first programs
learning.py      the model trained on the run's own answers
proposer.py      from a plan to a child: prompt, model, answer; children compared by embedding
prompts.py       the prompt of an iteration: templates, history, artifacts
prompt_tasks.py  prompts as programs, scored on tasks
answers.py       from an answer to a child program or a failure: blocks, diffs, rewrites
imports.py       imports that an answer left out
program_evaluator.py  from a child to its metrics: jobs, confirmation, judges, tuning
tuning/          the numbers of a program, tuned
problem.py       the first program, checked; the evaluator in a sandbox, as workers run it
program.py       a program with its metrics and lineage: files, document, blob
outputs.py       best/, checkpoints/, the trace and logs/, and when they are written
report.py        the report, the population without timestamps, training data
config.py, config_sections.py  the config, and its sections
prompt_templates/     the texts of prompts
"""

__all__: list[str] = []
