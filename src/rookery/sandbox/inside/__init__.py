"""What runs inside the jail: standard library only, copied in as the package `rookery_inside`.

server      imports the evaluator once and forks per candidate
candidate   one candidate's processes: limits, isolation, evaluation
program     the program's process: runs its code for the evaluator
proxy       the program as the evaluator's process sees it
values      plain data between the two
seeds       random generators start from one seed
isolation   namespaces, Landlock, seccomp, capabilities
scratch     removes what a candidate wrote
contract    calls the evaluator as OpenEvolve does, stage by stage
shim        `openevolve.evaluation_result` where OpenEvolve is not installed
"""

__all__: list[str] = []
