"""An agent's evaluation keys as an oracle reads them, in one process."""

import secrets

from client_agent.encrypted.vault import Vault
from veilfed.ckks.keys import EvaluationKeys
from veilfed.ckks.messages import key_messages, read_keys
from veilfed.ckks.sampling import SEED_BYTES
from veilfed.ckks.transform import Float


def evaluation_keys(vault: Vault) -> EvaluationKeys:
    seed = secrets.token_bytes(SEED_BYTES)
    return read_keys(key_messages(vault.key_digits(seed), seed, vault.basis), vault.steps, vault.basis)


def public_key(vault: Vault) -> Float:
    return vault.public_key(secrets.token_bytes(SEED_BYTES))
