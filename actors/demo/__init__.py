"""The demo: the same load on a model server that can die, first without the guard, then with it.

``make demo``, or ``python -m actors.demo``. Everything in it is real (Valkey, Dramatiq's own command line, worker
processes, HTTP) except for the model server, which is a fake with a memory budget: asked for too much at once, its
host goes dark. All that is reported of the server was counted by the server.
"""
