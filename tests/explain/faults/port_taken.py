"""Another program listens on the rendezvous port when rank 0 opens its store there."""

import os
import socket

from job import start

taken = socket.create_server(("", 0))
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "2"}
start()
