"""`python`, where `support.forked` serves: ADDRESS PYTHON [words of python].

A module of the product, torchrun or a script is run in a process that is forked there, which has
this one's streams, folder and environment and gets its signals. Anything else is Python itself.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

address, python, *given = sys.argv[1:]
words = [word for word in given if word != "-u"] or [""]
script, module = words[0].endswith(".py"), words[0] == "-m"
if not script and not (module and words[1].startswith(("olm_", "torch."))):
    os.execv(python, [python, *given])
asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
text = json.dumps(asked).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    socket.send_fds(server, [len(text).to_bytes(8)], [0, 1, 2])
    server.sendall(text)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    code = int.from_bytes(server.recv(2, socket.MSG_WAITALL), signed=True)
if code < 0:
    with suppress(OSError):  # SIGKILL has no other
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
