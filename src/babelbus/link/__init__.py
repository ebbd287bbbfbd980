"""The link of an edge, which accepts clients, to the core, which runs their sessions.

It knows no protocol.
The seam is the connection: an edge passes on the bytes of its clients, and the core runs each session on a
`LinkedTransport`, as if the socket of the client were its own. So locks, wills, groups and orders are those of one
process. A link carries the bytes of all connections of an edge, with one write for each turn of the event loop.
"""
