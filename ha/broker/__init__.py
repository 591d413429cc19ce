"""The front of a broker: what the remoting port answers. `open_broker` puts it together."""
