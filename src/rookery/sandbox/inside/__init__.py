"""What runs inside the jail: standard library only, copied in as the package `rookery_inside`.

server      imports the evaluator once and forks per candidate
candidate   one candidate's processes: limits, random seeds, isolation, evaluation
program     the program's process: runs its code for the evaluator
proxy       the program as the evaluator's process sees it
values      plain data between the two
isolation   namespaces, Landlock, seccomp, capabilities; empties the scratch folder
contract    calls the evaluator as OpenEvolve does; its module where OpenEvolve is not installed
"""

__all__: list[str] = []
