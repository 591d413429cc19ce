"""Encodes and decodes the formats that halog shares with RocketMQ, and its own; each has one codec.

Pure functions and sans-I/O parsers. They open no file or socket, read no clock and draw no random numbers; timestamps,
process ids and addresses are passed in. Untrusted bytes raise `ha.errors.RemoteProtocolError` and nothing else. Some
functions have compiled twins, which compiled.py selects during the import. The main modules:

    codes.py         request and response codes, languages, put statuses, sysFlag and permission bits
    properties.py    the property string of a message, tag codes (Java's String.hashCode)
    record.py        commitlog records V1 and V2, filler; record_encoding.py encodes them, record_digest.py converts
                     them to consume-queue entries and index keys
    batch.py         the body of a batch send
    message_id.py    offset message ids, client-made unique ids
    ha_frame.py      the default HA protocol: reports and transfer frames
    remoting.py      remoting frames in both header encodings
    headers.py       typed request and response fields of remoting commands
    java_json.py     the JSON dialect of the JVM side (bare integer keys, object keys, $ref)
    bodies.py        JSON bodies: routes, registration, topics, heartbeats, offsets, HA state
    store_files.py   consume queue, index, checkpoint and file names of a store directory
"""
