"""One of each mechanism that several parts need; imports nothing of ours but the errors.

file_lock    a lock that ends with its process
retry        growing pauses between tries
process      child processes in groups of their own; guard ends them with their owner
stopping     Ctrl-C, SIGTERM and the time limit of a command
concurrency  task groups, threads that outlast a cancelled caller, an event loop in a thread
app_shell    web applications with keys, limits and answers to errors
"""

__all__: list[str] = []
