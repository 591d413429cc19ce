"""The front end of a broker: request handlers of its remoting ports, and services. Started by `broker.open_broker`."""
