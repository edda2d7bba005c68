"""The one exception of this package."""


class RetrofitError(Exception):
    """Something about the input or the machine makes a conversion impossible; the message says what to do."""
