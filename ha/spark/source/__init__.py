"""Reading: the options, where a query starts and ends, how it is dealt out to tasks; from files or over the network."""
