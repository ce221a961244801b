"""The ledger of what left an institution: written by its agent, verified by anyone, offline.

`chain` is the file, `receipts` are the aggregator's signatures over its head, `audit` checks both.
"""

from veilfed.ledger.audit import Audit, Summary, verify
from veilfed.ledger.chain import EMPTY, Head, Ledger, Record, canonical, head_statement, read
from veilfed.ledger.receipts import SignedHead, receipts_path

__all__ = [
    "EMPTY",
    "Audit",
    "Head",
    "Ledger",
    "Record",
    "SignedHead",
    "Summary",
    "canonical",
    "head_statement",
    "read",
    "receipts_path",
    "verify",
]
