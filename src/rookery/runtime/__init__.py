"""One of each mechanism that several parts need; imports nothing of ours but the errors.

file_lock   one process at a time, as long as it lives
"""

__all__: list[str] = []
