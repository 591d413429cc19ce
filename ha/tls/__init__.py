"""TLS: SSL contexts that follow their PEM files, and bounded handshakes.

`files` and `certificate` read files, `credentials` replaces a context when its files change, `handshake` encrypts a
stream. This package knows neither protocols nor ports; remoting, replication and the admin port get functions that
encrypt a stream, and know no files.
"""
