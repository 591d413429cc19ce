"""TLS: contexts made of PEM files, kept up to date with them, and bounded handshakes.

`files` and `certificate` know files and no sockets, `credentials` swaps a context when its files change, `handshake`
turns a stream into an encrypted one. Nothing here knows what is said over a stream, or which port it came from;
remoting, replication and the admin port get functions made of this and know no files.
"""
