"""The one exception of this package, and how it quotes those of others."""


class RetrofitError(Exception):
    """Something about the input or the machine makes a conversion impossible; the message says what to do."""


def one_line(error: Exception) -> str:
    """What another library says, which may be paragraphs, for use within a sentence."""
    return " ".join(str(error).split()).rstrip(".")
