"""Jobs of ranks whose control records travel in the last bucket, or between hosts."""

import logging
import os

from brimful.reducer._between_hosts import between_hosts

TRANSPORTS = ["in bucket", "between hosts"]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def over(rank, transport, job, *args):
    """The job, whose reducers all have this transport: none falls back to the other."""
    lines = Lines()
    logging.getLogger("brimful").addHandler(lines)
    with between_hosts(transport == TRANSPORTS[1]):
        result = job(rank, *args)
    assert not [line for line in lines.lines if "between hosts" in line], lines.lines
    return result


def threads():
    return len(os.listdir("/proc/self/task"))
