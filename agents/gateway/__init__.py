"""`fleetpulse gateway`: receives other senders' telemetry over HTTP, and spools and sends it as an agent does.

`intake` makes requests durable, `gateway` is the HTTP server and the process.
"""
