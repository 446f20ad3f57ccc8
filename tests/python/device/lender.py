"""The other process of a test of shared memory: python lender.py <machine> <descriptor of a socket>.

It does what it is told through the socket until that is closed; see `Lender` in conftest.py.
"""

import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from conftest import MACHINES


def main(name: str, pipe: Connection) -> None:
    machine = MACHINES[name]()
    backend = machine.backend()
    lent: list[tuple[int, int]] = []
    while True:
        try:
            command, *content = pipe.recv()
        except EOFError:
            break
        if command == "lend":
            size = len(content[0])
            memory = backend.allocate_shared(size)
            lent.append((memory, size))
            home = machine.home(backend, content[0])
            backend.submit("fetch", [(memory, home.ctypes.data, size)]).wait_passed()
            told = backend.shared(memory)
            pipe.send((told.bytes, told.fd >= 0, told.handle))
            if told.fd >= 0:
                send_handle(pipe, told.fd, os.getppid())
        else:
            pipe.send(machine.drained(backend, *lent[-1]))
    for memory, _ in lent:
        backend.free(memory)
    machine.close()


if __name__ == "__main__":
    main(sys.argv[1], Connection(int(sys.argv[2])))
