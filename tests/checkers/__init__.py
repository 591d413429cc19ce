"""Safety checkers: what must hold of a cluster's files, wire and answers, judged from outside.

Used by the simulator at every step and by the tests that crash real processes, on the directories those leave.

    history        what clients sent and were told, which nodes crashed and how
    store, records a node's files as bytes, and the records in them, by a parser of their own
    everything else   one checker a module: says at its top what it promises, in which fault model, and what it does
                   not look at; returns Violations

Nothing here imports `ha`, and nothing is shared with it: a mistake in halog's codec or in its idea of recovery must not
be made twice. `tests/checkers/test_independence.py` reads the imports.
"""
