"""TLS: SSL contexts that are replaced when their PEM files change, and handshakes with limits.

`files` creates contexts, `certificate` reads expiry dates, `credentials` replaces a context when its files change,
`stream` encrypts, `handshake` performs and limits handshakes, and `ports` sets all of this up from configuration keys.
The package knows no protocols above TLS. The packages of remoting, gRPC, replication and the admin port get functions
that encrypt a stream, and know no PEM files.
"""
