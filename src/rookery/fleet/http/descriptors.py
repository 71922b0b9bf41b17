"""How many connections this process may have: each takes a file descriptor.

connection_limit()      # 488 under `ulimit -n 1024` with 48 files open
"""

import os
import resource

__all__ = ["connection_limit"]

WANTED = 32_768
"""Descriptors that are enough for 10,000 requests in flight and everything else. Shells start
programs with 1,024 and let them raise it."""


def connection_limit() -> int:
    """Half of the free descriptors, after asking for `WANTED` of them.

    The other half is for files, processes, other clients, and servers in this same process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    total = WANTED if soft == resource.RLIM_INFINITY else soft
    return max(1, (total - len(os.listdir("/dev/fd"))) // 2)
