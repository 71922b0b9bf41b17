"""Code that runs inside the jail: standard library only, copied in as package `rookery_inside`.

server      imports the evaluator once and forks per candidate
candidate   one candidate's processes: limits, random seeds, isolation, evaluation
program     the program's process: runs its code for the evaluator
proxy       stand-ins for the program, in the evaluator's process
values      wire format of plain data between the two processes
isolation   namespaces, Landlock, seccomp, capabilities; empties the scratch folder
contract    calls the evaluator as OpenEvolve does; a stand-in if OpenEvolve is not installed
"""

__all__: list[str] = []
