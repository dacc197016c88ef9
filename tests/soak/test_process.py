"""What a process takes is read from the process itself."""

from __future__ import annotations

import subprocess
import sys

from tests.soak.ledger import footprint_faults
from tests.soak.process import MIB, Footprint

GROWING = """
import threading
print(flush=True)
input()
block, file = bytearray(b"x") * (64 << 20), open("/dev/null")
threading.Thread(target=input, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""


def test_a_process_that_grows_is_seen_to_grow() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        before = Footprint.of(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        process.stdout.readline()
        after = Footprint.of(process.pid)
        process.kill()
    assert after.rss - before.rss > 60 * MIB
    assert (after.files, after.threads) == (before.files + 1, before.threads + 1)
    assert len(footprint_faults(before, before, after, warm=True)) == 2
