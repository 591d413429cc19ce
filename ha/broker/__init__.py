"""The front of a broker: everything that answers requests on the remoting port. `open_broker` starts it."""
