"""TLS: SSL contexts that follow their PEM files, and bounded handshakes.

`files` creates contexts, `certificate` reads expiry dates, `credentials` replaces a context when its files change,
`handshake` encrypts a stream, and `ports` makes all of this from configuration keys. The package knows no protocols;
remoting, replication and the admin port get functions that encrypt a stream, and know no files.
"""
