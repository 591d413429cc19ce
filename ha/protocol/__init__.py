"""Bytes to values and back: every format that halog shares with RocketMQ, one codec each.

Pure functions and sans-IO parsers. Nothing here opens a file or a socket, reads a clock or draws a random number;
what depends on those (timestamps, process ids, addresses) is passed in. Untrusted bytes raise
`ha.errors.RemoteProtocolError` and nothing else.

    codes.py         request and response codes, languages, put statuses, sysFlag and permission bits
    properties.py    the property string of a message, tag codes (Java's String.hashCode)
    record.py        commitlog records V1 and V2, filler; record_encoding.py makes them of messages
    batch.py         the body of a batch send
    message_id.py    offset message ids, client-made unique ids
    ha_frame.py      the default HA protocol: reports and transfer frames
    remoting.py      remoting frames in both header encodings
    headers.py       typed request and response fields of remoting commands
    java_json.py     the JSON dialect of the JVM side (bare integer keys, object keys, $ref)
    bodies.py        JSON bodies: routes, registration, topics, heartbeats, offsets, HA state
    store_files.py   consume queue, index, checkpoint and file names of a store directory
"""
