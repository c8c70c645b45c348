"""Where workers run: `local` (processes and threads of this machine) and `simulated` (virtual time).

Both implement `core.protocols.Runtime`; nothing but `api` chooses between them. Read `service_host.py` first: it says
what hosting a service means, whatever hosts it.
"""
