"""The exceptions whose message says all: no traceback is shown for them.

Imports nothing, so that every layer may raise it. The entry point turns it into one message from rank 0 and exit
code 2; every other exception is a fault and ends the job with a traceback.
"""


class UserError(Exception):
    """A mistake in the configuration, the data or the surroundings.

    The message names the key, the value, what is allowed and what to do.
    """


class TrainingError(Exception):
    """Training cannot go on, for a reason that is not a fault of the program; the message says who or what it is.

    A ``__cause__`` is an exception of the user's own code, and its traceback is shown.
    """
