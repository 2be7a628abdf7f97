"""The one exception type that means "the user can mend this".

Imports nothing, so that every layer may raise it. The entry point turns it into one message from rank 0 and exit
code 2; every other exception is a fault and ends the job with a traceback.
"""


class UserError(Exception):
    """A mistake in the configuration, the data or the surroundings.

    The message names the key, the value, what is allowed and what to do.
    """
