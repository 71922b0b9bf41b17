"""One of each mechanism that several parts need; imports nothing of ours but the errors.

file_lock   one process at a time, as long as it lives
retry       growing pauses between tries
process     a program in a group of its own, ended with all it started; guard watches it
stopping    how a command ends by Ctrl-C, SIGTERM and its limit
"""

__all__: list[str] = []
