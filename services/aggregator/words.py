"""Words that agents send for people: shown in terminals and kept in the database, so printable and short."""

__all__ = ["cut", "printable"]


def printable(text: str, most: int) -> str:
    """At most `most` characters; what could steer a terminal becomes a space."""
    return "".join(character if character.isprintable() else " " for character in text[:most])


def cut(text: str, most: int) -> str:
    """At most `most` bytes of UTF-8, whole characters."""
    data = text.encode()
    return text if len(data) <= most else data[:most].decode(errors="ignore")
