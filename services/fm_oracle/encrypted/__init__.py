"""The model owner's side of encrypted blocks. It has public and evaluation keys, never a secret one."""
