"""POP consumption: messages are handed out for a time, and handed out again unless they are acknowledged."""
