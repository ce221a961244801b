"""Words that others send for people: shown in terminals and kept in the database, so printable and short."""

from veilfed.errors import Code, VeilfedError

__all__ = ["cut", "no_such_job", "printable"]

MAX_JOB_ID = 128


def printable(text: str, most: int) -> str:
    """At most `most` characters; what could steer a terminal becomes a space."""
    return "".join(character if character.isprintable() else " " for character in text[:most])


def cut(text: str, most: int) -> str:
    """At most `most` bytes of UTF-8, whole characters."""
    data = text.encode()
    return text if len(data) <= most else data[:most].decode(errors="ignore")


def no_such_job(job_id: str) -> VeilfedError:
    """NOT_FOUND for whoever asked: also of a job that is not theirs to know of."""
    return VeilfedError(Code.NOT_FOUND, f"there is no job {printable(job_id, MAX_JOB_ID)}")
